// Cases of the reference on ranks of the fake driver: values in and out.
#pragma once

#include "unit/fake_cuda/fake_cuda_world.h"

#include <bit>
#include <cstdlib>

namespace epd::fake_cuda_test {

using gpu_test::Case;
using gpu_test::Random;
using gpu_test::shape_of;
namespace ref = kernels::reference;

template <typename T>
void put(void* to, const std::vector<T>& values) {
  if (!values.empty()) std::memcpy(to, values.data(), values.size() * sizeof(T));
}
template <typename T>
std::vector<T> get(const void* from, std::size_t count) {
  const T* const first = static_cast<const T*>(from);
  return {first, first + count};
}
inline std::vector<std::uint32_t> bits(const std::vector<float>& values) {
  std::vector<std::uint32_t> result;
  result.reserve(values.size());
  for (const float value : values) result.push_back(std::bit_cast<std::uint32_t>(value));
  return result;
}

// The first of the seeds to test.
inline std::uint64_t first_seed() {
  const char* const given = std::getenv("EPD_TEST_SEED");
  return given == nullptr ? 1 : std::strtoull(given, nullptr, 10);
}

}  // namespace epd::fake_cuda_test
