// Random groups for the tests of dispatch and combine: shapes, routings, values and the way to run, all from
// one seed; and memory that shows every store outside.
#pragma once

#include "host/row_kernels.h"
#include "kernels/reference.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <iosfwd>
#include <random>
#include <thread>
#include <type_traits>
#include <vector>

namespace epd::kernels::testing_cases {

std::uint32_t between(std::mt19937& random, std::uint32_t low, std::uint32_t high);

// Bytes at a chosen distance from a 64-byte boundary, poisoned, between canaries.
class Guarded {
 public:
  static constexpr std::uint8_t kPoison = 0xcd;

  Guarded(std::size_t bytes, std::size_t shift);
  template <typename T>
  T* as() {
    return reinterpret_cast<T*>(storage_.data() + start_);
  }
  template <typename T>
  const T* as() const {
    return reinterpret_cast<const T*>(storage_.data() + start_);
  }
  // Nothing beside the bytes has changed.
  void expect_intact(const char* what) const;
  // Bytes [begin, end) are as they were at first.
  bool is_poison(std::size_t begin, std::size_t end) const;

 private:
  static constexpr std::size_t kGuard = 128;
  std::size_t bytes_;
  std::vector<std::uint8_t> storage_;
  std::size_t start_ = 0;
};

struct Case {
  reference::GroupParams params;
  std::vector<reference::RankInput> inputs;
  std::vector<RoutingPlan> plans;     // [R], of ranks that are there
  std::vector<Placement> placements;  // likewise
  PlacementRules rules;
  bool index64 = false;
  std::size_t shift = 0;  // of outputs from alignment, bytes
  std::uint32_t threads = 1;
  host::Choice choice{};

  std::uint32_t experts_per_rank() const { return params.num_experts / params.num_ranks; }
  std::uint32_t choices_per_row() const {
    return params.layout == reference::Layout::kCompact ? params.topk : 1;
  }
  bool is_there(std::uint32_t rank) const { return params.masked.empty() || !params.masked[rank]; }
  RowFormat format() const;
};

Case random_case(std::uint32_t seed, const host::RowKernels* kernels);
// Plans and placements of c.inputs; again after a change.
void route(Case& c);

std::uint16_t random_bf16(std::mt19937& random, std::uint32_t mood);
float random_weight(std::mt19937& random, std::uint32_t mood);

std::ostream& operator<<(std::ostream& out, const Case& c);

// Runs work(begin, end) over [0, items) in as many threads as asked for.
template <typename Work>
void split(std::uint32_t threads, std::uint32_t items, Work work) {
  if (threads == 1) return work(0u, items);
  std::vector<std::thread> running;
  for (std::uint32_t i = 0; i < threads; ++i) {
    running.emplace_back([=] { work(items * i / threads, items * (i + 1) / threads); });
  }
  for (std::thread& thread : running) thread.join();
}

// -0.0 differs from 0.0 and a NaN equals itself.
template <typename T>
auto bits_of(T value) {
  if constexpr (std::is_same_v<T, float>) {
    return std::bit_cast<std::uint32_t>(value);
  } else {
    return value;
  }
}

template <typename T>
void expect_bits(const char* what, const T* actual, const T* expected, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    ASSERT_EQ(bits_of(actual[i]), bits_of(expected[i]))
        << what << "[" << i << "] is " << +actual[i] << ", the reference says " << +expected[i];
  }
}

template <typename T>
void expect_bits(const char* what, const T* actual, const std::vector<T>& expected) {
  expect_bits(what, actual, expected.data(), expected.size());
}

}  // namespace epd::kernels::testing_cases
