// What ranks send and answer in a run. It follows from the seed, so any rank can compute that of another one
// for the oracle.
#pragma once

#include "kit/random.h"
#include "plan.h"
#include "proto/arena.h"

#include <cstddef>
#include <cstdint>
#include <vector>

namespace epd::bench {

inline std::uint64_t x_seed(const RunPlan& plan, std::uint32_t rank) {
  return kit::derive(plan.seed, 0x10000 + rank);
}

inline std::uint64_t y_seed(const RunPlan& plan, std::uint32_t rank) {
  return kit::derive(plan.seed, 0x20000 + rank);
}

inline std::uint64_t bias_seed(const RunPlan& plan, std::uint32_t rank, std::uint32_t which) {
  return kit::derive(plan.seed, 0x30000 + 2 * rank + which);
}

// `count` elements of random bytes that are finite as bf16, e4m3, scales or float32.
template <typename T>
std::vector<T> any_data(std::uint64_t seed, std::size_t count) {
  std::vector<T> data(abi::align_up(count * sizeof(T), 8) / sizeof(T));
  kit::fill_bf16(seed, reinterpret_cast<std::uint16_t*>(data.data()), data.size() * sizeof(T) / 2);
  data.resize(count);
  return data;
}

}  // namespace epd::bench
