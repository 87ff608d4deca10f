// Groups whose ranks are on several nodes, for the tests of rows for other nodes.
#pragma once

#include "host/far_rows.h"
#include "kernels_cases.h"

#include <memory>

namespace epd::kernels::testing_cases {

constexpr std::uint32_t kNoRank = 0xffffffff;

// Bytes at any alignment, on a piece of the heap that is not larger.
class Unaligned {
 public:
  Unaligned(std::mt19937& random, const std::byte* bytes, std::size_t count)
      : shift_(between(random, 0, 15)), memory_(std::make_unique<std::byte[]>(count + shift_)) {
    std::copy_n(bytes, count, data());
  }
  std::byte* data() { return memory_.get() + shift_; }

 private:
  std::size_t shift_;
  std::unique_ptr<std::byte[]> memory_;
};

// A case, and on which node each rank is. `lost`: a rank that was lost after the routing was made.
struct FarCase {
  Case c;
  std::uint32_t num_nodes = 1;
  std::vector<std::uint32_t> node_of_rank;  // [R]
  std::uint32_t lost = kNoRank;
  bool crc = false;

  FarShape shape() const;
  bool is_there(std::uint32_t rank) const { return c.is_there(rank) && rank != lost; }
  bool is_near(std::uint32_t rank, std::uint32_t node) const {
    return is_there(rank) && node_of_rank[rank] == node;
  }
  std::vector<std::uint32_t> ranks_of(std::uint32_t node) const;  // that are there, ascending
  // [R] as the ranks of `node` see the others.
  std::vector<std::uint32_t> nodes_seen_from(std::uint32_t node) const;
  std::vector<std::uint8_t> whole_domains() const;
  // The lists of the tokens of `source`, one for each node. `piece`: tokens of a step.
  std::vector<PlanArray<std::uint32_t>> lists(std::uint32_t source, std::uint32_t piece) const;
  // Where the rows of `source` lie at the ranks of `node`, as these have placed them.
  SourcePlaces places(std::uint32_t source, std::uint32_t node) const;
  // The experts of the token of `source` that are on `node`, for each k; else -1.
  std::vector<std::int64_t> choices_on(std::uint32_t node, std::uint32_t source, std::uint32_t token) const;
};

// One to four nodes, which have as many ranks as chance gives them: consecutive ones or any.
FarCase random_far_case(std::uint32_t seed, const host::RowKernels* kernels);
void split_into_nodes(std::mt19937& random, FarCase& far);

std::ostream& operator<<(std::ostream& out, const FarCase& far);

}  // namespace epd::kernels::testing_cases
