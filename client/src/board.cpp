#include "board.h"

#include "errors.h"
#include "proto/wire.h"

#include <bit>
#include <cstring>

namespace epd::client {
namespace {

std::string text_of(const char (&field)[abi::kMessageBytes]) {
  return std::string(field, abi::text_length(field));
}

}  // namespace

bool BoardView::snapshot(BoardSnapshot& out) const {
  const abi::Board& b = board();
  for (int attempt = 0; attempt < 64; ++attempt) {
    const std::uint32_t before = b.change.load(std::memory_order_acquire);
    if (before % 2 != 0) continue;
    const std::uint32_t state = b.state.load(std::memory_order_relaxed);
    out.state = state <= static_cast<std::uint32_t>(abi::GroupState::kLost)
                    ? static_cast<abi::GroupState>(state)
                    : abi::GroupState::kLost;
    out.epoch = b.epoch.load(std::memory_order_relaxed);
    out.resume_index = b.resume_index.load(std::memory_order_relaxed);
    out.released = b.released.load(std::memory_order_relaxed);
    out.cause = checked_code(b.cause.load(std::memory_order_relaxed));
    out.failed_rank = b.failed_rank.load(std::memory_order_relaxed);
    out.num_active_ranks = num_active();
    std::memcpy(out.message, b.message, sizeof(out.message));
    std::atomic_thread_fence(std::memory_order_acquire);
    if (b.change.load(std::memory_order_relaxed) == before) return true;
  }
  return false;
}

std::uint32_t BoardView::num_active() const {
  std::uint32_t count = 0;
  for (const auto& word : board().active)
    count += static_cast<std::uint32_t>(std::popcount(word.load(std::memory_order_relaxed)));
  return count;
}

Status BoardView::usable_in(std::uint64_t epoch) const {
  const abi::Board& b = board();
  const auto state = static_cast<abi::GroupState>(b.state.load(std::memory_order_acquire));
  const bool ended = state == abi::GroupState::kBroken || state == abi::GroupState::kLost;
  if (!ended && b.epoch.load(std::memory_order_acquire) <= epoch) return {};
  BoardSnapshot now;
  if (snapshot(now)) return break_status(now);
  // The engine is writing it. The code is enough for the caller; the message might be torn.
  now.cause = checked_code(b.cause.load(std::memory_order_relaxed));
  now.failed_rank = b.failed_rank.load(std::memory_order_relaxed);
  now.message[0] = '\0';
  return break_status(now);
}

Status break_status(const BoardSnapshot& board) {
  StatusCode code = board.cause;
  // A new epoch without a cause. The caller must do the same as after a restart.
  if (code == StatusCode::kOk) {
    code = board.state == abi::GroupState::kLost ? StatusCode::kRankLost : StatusCode::kEngineRestarted;
  }
  const std::string text = text_of(board.message);
  return {code, text.empty() ? describe(code, board.failed_rank) : text};
}

}  // namespace epd::client
