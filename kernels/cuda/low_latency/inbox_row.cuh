// Rows as they lie in an inbox, and how a warp sends them.
#pragma once

#include "cuda/common/routing.cuh"
#include "cuda/low_latency/inbox.cuh"

namespace epd::kernels::cuda {

// A choice as it lies after its row: the expert, and the row's number among the rows that this expert gets
// from the source. Every number is below abi::kInboxTokens.
struct InboxChoice {
  std::uint32_t word;
  // As an expert: no choice. As a number: a lower k chose the same expert.
  static constexpr std::uint32_t kNone = 0xffff;
  static __device__ InboxChoice make(std::uint32_t expert, std::uint32_t number) {
    return {number << 16 | (expert & 0xffff)};
  }
  __device__ std::uint32_t expert() const { return word & 0xffff; }
  __device__ std::uint32_t number() const { return word >> 16; }
};

// The row of a warp that is in flight to inboxes. Each round releases the round before, so there is one.
class SentRow {
 public:
  // Sets the destinations of the row that is sent next, when none is in flight: every rank that a choice
  // names. Lane k has the expert of choice k, or kFull. With `is_local` this rank is left out, because it
  // takes the row from the stage.
  __device__ void prepare(const Operation& op, std::uint32_t expert, std::uint32_t token, bool is_local) {
    const std::uint32_t rank = expert != kFull ? rank_of_expert(op.shape, expert) : op.rank;
    EPD_BELOW(rank, op.shape.num_ranks);
    const bool leaves = expert != kFull && !(is_local && rank == op.rank);
    const std::uint32_t ranks = __reduce_or_sync(kFull, leaves ? 1u << rank : 0u);
    const bool mine = ((ranks >> lane_of()) & 1) != 0;
    const std::uint32_t to = mine ? lane_of() : op.rank;
    slot_ = inbox_slot(op, to, op.rank, token);
    tag_ = mine ? inbox_tag(op, to, op.rank, token, 0) : nullptr;
  }
  // Sends the row in `stage`, which is complete with choices and weights.
  __device__ void send(const Operation& op, std::uint8_t* stage) {
    warp_store(slot_, stage, op.division.inbox_row.bytes, tag_ != nullptr);
    stores_commit();
    in_flight_ = true;
  }
  // Releases the row's tags, if a row is in flight. kLater is the number of groups of stores that the warp
  // has issued after it.
  template <std::uint32_t kLater = 0>
  __device__ void release(const Operation& op) {
    if (!in_flight_) return;
    in_flight_ = false;
    stores_wait_done_but<kLater>();
    __syncwarp();
    if (tag_ != nullptr) store_release_system(tag_, op.tag);
  }

 private:
  bool in_flight_ = false;
  std::uint64_t* tag_ = nullptr;  // the tag at lane's rank, or null
  std::uint8_t* slot_ = nullptr;
};

}  // namespace epd::kernels::cuda
