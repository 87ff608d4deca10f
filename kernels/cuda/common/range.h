// Range checks. A check compares a number that was computed from data with a bound from the operation, before
// the number is used. Only code compiled with EPD_KERNEL_ASSERTS has checks: the debug image of the kernels,
// and device code that tests run on the host. In other code the macros are empty and evaluate nothing.
//
//   EPD_BELOW(row, op.shape.recv_rows);
//
// A violation prints file, line, the value's text, the value and the bound. Then it ends the kernel by a
// trap, or ends the host process.
#pragma once

#ifndef EPD_KERNEL_ASSERTS

#define EPD_BELOW(value, bound) static_cast<void>(0)
#define EPD_BELOW_OR_NONE(value, bound) static_cast<void>(0)
#define EPD_AT_MOST(value, bound) static_cast<void>(0)

#else

#include "kernels/host_device.h"

#include <cstdio>
#include <cstdlib>

#ifdef __CUDACC__
#define EPD_COLD __noinline__
#else
#define EPD_COLD [[gnu::cold]]
#endif

#define EPD_BELOW(value, bound) epd::kernels::cuda::check_below(value, bound, {__FILE__, __LINE__, #value})
// Also accepts a value with all bits set, which means "none".
#define EPD_BELOW_OR_NONE(value, bound) \
  epd::kernels::cuda::check_below_or_none(value, bound, {__FILE__, __LINE__, #value})
#define EPD_AT_MOST(value, bound) \
  epd::kernels::cuda::check_at_most(value, bound, {__FILE__, __LINE__, #value})

namespace epd::kernels::cuda {

// Where a check is, and the text of the checked expression.
struct CheckedValue {
  const char* file;
  int line;
  const char* text;
};

EPD_HOST_DEVICE EPD_COLD inline void out_of_range(const CheckedValue& what, long long value, const char* must,
                                                  long long bound) {
#ifdef __CUDA_ARCH__
  std::printf("%s:%d: %s is %lld, allowed: %s %lld (CTA %u, thread %u)\n", what.file, what.line, what.text,
              value, must, bound, blockIdx.x, threadIdx.x);
  __trap();
#else
  std::fprintf(stderr, "%s:%d: %s is %lld, allowed: %s %lld\n", what.file, what.line, what.text, value, must,
               bound);
  std::abort();
#endif
}

// A negative number counts as larger than any bound.
template <typename Value, typename Bound>
EPD_HOST_DEVICE constexpr bool is_below(Value value, Bound bound) {
  return static_cast<unsigned long long>(value) < static_cast<unsigned long long>(bound);
}
template <typename Value, typename Bound>
EPD_HOST_DEVICE inline void check_below(Value value, Bound bound, const CheckedValue& what) {
  if (!is_below(value, bound))
    out_of_range(what, static_cast<long long>(value), "below", static_cast<long long>(bound));
}
template <typename Value, typename Bound>
EPD_HOST_DEVICE inline void check_below_or_none(Value value, Bound bound, const CheckedValue& what) {
  if (value != static_cast<Value>(-1) && !is_below(value, bound))
    out_of_range(what, static_cast<long long>(value), "none, or below", static_cast<long long>(bound));
}
template <typename Value, typename Bound>
EPD_HOST_DEVICE inline void check_at_most(Value value, Bound bound, const CheckedValue& what) {
  if (is_below(bound, value))
    out_of_range(what, static_cast<long long>(value), "at most", static_cast<long long>(bound));
}

}  // namespace epd::kernels::cuda

#endif
