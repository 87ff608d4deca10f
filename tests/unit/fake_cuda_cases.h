// Cases of the reference on ranks of the fake driver: the shape that kernels are told, values in and out.
#pragma once

#include "unit/fake_cuda_world.h"

#include <bit>
#include <cstdlib>

namespace epd::fake_cuda_test {

using gpu_test::Case;
using gpu_test::Random;
namespace ref = kernels::reference;

inline kernels::cuda::Shape shape_of(const Case& c, std::uint64_t recv_rows) {
  const ref::GroupParams& g = c.group;
  kernels::cuda::Shape s;
  s.num_ranks = g.num_ranks;
  s.num_experts = g.num_experts;
  s.topk = g.topk;
  s.hidden = g.hidden;
  s.per_expert = g.layout != ref::Layout::kCompact;
  s.expert_blocks = g.layout == ref::Layout::kExpert;
  s.index64 = c.index64;
  s.alignment = g.alignment;
  s.expert_capacity = g.expert_capacity;
  s.recv_rows = recv_rows;
  s.format = {g.payload == ref::Payload::kFp8Cast,
              g.scale_format,
              g.hidden,
              ref::x_bytes(g),
              ref::row_bytes(g),
              ref::scale_bytes(g)};
  return s;
}

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
  for (const float value : values) result.push_back(std::bit_cast<std::uint32_t>(value));
  return result;
}

// The first of the seeds to test.
inline std::uint64_t first_seed() {
  const char* const given = std::getenv("EPD_TEST_SEED");
  return given == nullptr ? 1 : std::strtoull(given, nullptr, 10);
}

}  // namespace epd::fake_cuda_test
