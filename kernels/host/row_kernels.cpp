#include "host/row_kernels.h"

#include <array>

namespace epd::kernels::host {
namespace {

struct Available {
  std::array<const RowKernels*, 4> kernels{};
  std::size_t count = 0;
};

Available find_available() {
  Available found;
  found.kernels[found.count++] = &kPlainRowKernels;
#if defined(__x86_64__)
  // These also check that the operating system saves the registers.
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    found.kernels[found.count++] = &kAvx2RowKernels;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
      found.kernels[found.count++] = &kAvx512RowKernels;
      if (__builtin_cpu_supports("vpclmulqdq")) found.kernels[found.count++] = &kAvx512CrcRowKernels;
    }
  }
#endif
  return found;
}

const Available& available() {
  static const Available found = find_available();
  return found;
}

}  // namespace

std::span<const RowKernels* const> available_row_kernels() {
  return {available().kernels.data(), available().count};
}

const RowKernels& best_row_kernels() {
  return *available().kernels[available().count - 1];
}

}  // namespace epd::kernels::host
