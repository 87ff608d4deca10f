// The board of one membership: the engine's view of the group, read without locks. All reads copy, because
// the engine may write at any time.
#pragma once

#include "common/memory.h"
#include "proto/session.h"
#include "proto/waits.h"

#include <string>

namespace epd::client {

struct BoardSnapshot {
  abi::GroupState state = abi::GroupState::kForming;
  std::uint64_t epoch = 0;
  std::uint64_t resume_index = 0;
  std::uint64_t released = 0;
  StatusCode cause = StatusCode::kOk;
  std::int32_t failed_rank = -1;
  std::uint32_t num_active_ranks = 0;
  char message[abi::kMessageBytes] = "";
};

class BoardView {
 public:
  BoardView() = default;
  // The mapping must hold WaitsLayout(shape).total_bytes.
  BoardView(Mapping mapping, const abi::GroupShape& shape) : mapping_(std::move(mapping)), shape_(shape) {}

  // Its memory, which another board of the shape takes. Nobody reads this one any more.
  Mapping take() { return std::move(mapping_); }
  bool valid() const { return mapping_.valid(); }
  bool magic_fits() const { return board().magic == abi::kBoardMagic; }
  // False while the engine writes, or if it died while it wrote. Its successor writes the board again.
  bool snapshot(BoardSnapshot& out) const;
  // OK while a member in `epoch` may submit, else the cause of the break. Two loads if there is none.
  Status usable_in(std::uint64_t epoch) const;
  // The group has ended.
  bool lost() const {
    const auto lost = static_cast<std::uint32_t>(abi::GroupState::kLost);
    return board().state.load(std::memory_order_acquire) == lost;
  }
  std::uint64_t epoch() const { return board().epoch.load(std::memory_order_acquire); }
  // One word of the set, which is read whole.
  bool active(std::uint32_t rank) const {
    return (board().active[rank / 64].load(std::memory_order_acquire) >> (rank % 64) & 1) != 0;
  }
  std::uint32_t num_active() const;
  // All operations below this number have completed on this rank.
  std::uint64_t next_index() const { return board().next_index.load(std::memory_order_acquire); }

  // How long this rank has waited for the other one so far.
  const abi::PeerWait& waited_for(std::uint32_t rank) const {
    return mapping_.as<const abi::PeerWait>(abi::WaitsLayout(shape_).peers)[rank];
  }

 private:
  const abi::Board& board() const { return *mapping_.as<const abi::Board>(); }

  Mapping mapping_;
  abi::GroupShape shape_{};
};

// The cause of a break as the caller sees it.
Status break_status(const BoardSnapshot& board);

}  // namespace epd::client
