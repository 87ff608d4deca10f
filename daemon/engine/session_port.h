// The engine's end of one session: takes submissions, posts completions, rings the client.
// Everything the client can write is read once and believed never.
#pragma once

#include "common/memory.h"
#include "page.h"
#include "proto/session.h"
#include "proto/wire.h"
#include "stats.h"

#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

namespace epd::engine {

class Member;

class SessionPort {
 public:
  // Maps the segments; takes over what a former engine left: its indices and its operations in flight.
  struct Ends {
    UniqueFd segment_a;
    UniqueFd segment_b;
    UniqueFd ring_client;  // an eventfd of the client's porter, which rings the client
  };
  static Result<std::unique_ptr<SessionPort>> open(std::uint64_t id, Ends ends);

  std::uint64_t id() const { return id_; }

  // The next submission, private copy, if there is one and there is room to answer it.
  std::optional<abi::Submission> take();
  // Records an operation as taken; must precede release of its ring slot by the next take().
  void begin(const abi::Submission& submission, std::uint64_t op_index);
  // Posts a completion, now or as soon as the client makes room, and forgets the operation.
  void complete(const abi::Completion& completion);
  // Tries again to post what did not fit. True if something moved.
  bool flush();
  std::size_t inflight() const { return inflight_; }

  // Rings the client if it sleeps.
  void ring();
  void set_sleeping(bool sleeping) {
    const abi::Sleep asleep = waiting_.empty() ? abi::kAsleep : abi::kAsleepForRoom;
    b_->engine_sleep.sleeping.store(sleeping ? asleep : abi::kAwake, std::memory_order_relaxed);
  }
  // flush() would move something.
  bool can_flush() const;
  bool has_submission();

  void set_state(abi::SessionState state) {
    b_->state.store(static_cast<std::uint32_t>(state), std::memory_order_release);
  }
  // Ends the session for the client: reason first, then the state, then the bell.
  void end(StatusCode status, const std::string& text);
  bool ended() const { return ended_; }

  // Operations that a former engine took and never answered. Filled by open(), emptied by the engine
  // when it can say what became of them.
  struct Ending {
    std::uint32_t num_recv_rows = 0;
    std::uint32_t num_dropped = 0;
  };
  struct Orphan {
    abi::InflightRecord record;
    std::optional<Ending> ending;  // of one that has ended since
  };
  std::vector<Orphan>& orphans() { return orphans_; }
  // Another engine has served this session before: what its client submits may name memberships that this
  // one has yet to hear of, or (set_all_told()) never will because their group has ended.
  bool inherited() const { return inherited_; }
  // No submission waits in the ring any more for the group that it names.
  void set_all_told() { awaits_groups_ = false; }

  std::unordered_map<std::uint32_t, Member*> members;  // by the number that submissions carry
  // Takes a membership out. What may be in the ring of it by now, a ring's length at most, is not illegal.
  void end_member(std::uint32_t number);
  // Of the submission taken last.
  bool was_member(std::uint32_t number) const;
  Statistics statistics;
  bool removing = false;  // kRemoveSession came; goes when nothing is in flight

 private:
  SessionPort() = default;
  bool post(const abi::Completion& completion);
  void adopt();
  void give_back_recorded();

  std::uint64_t id_ = 0;
  // The submission waits in the ring for the group that it names.
  bool awaits_group(const abi::Submission& submission) const;
  // Counts, once, that the submission at the head must wait; always nullopt.
  std::optional<abi::Submission> stall(abi::Stall why);

  bool inherited_ = false;
  bool awaits_groups_ = false;
  UniqueFd ring_client_;
  Mapping a_mapping_;
  Mapping b_mapping_;
  abi::SegmentA* a_ = nullptr;
  abi::SegmentB* b_ = nullptr;
  std::uint64_t head_ = 0;                        // submissions taken
  std::uint64_t tail_ = 0;                        // completions posted
  std::uint64_t stalled_at_ = ~std::uint64_t{0};  // the head that was counted as stalled
  std::size_t inflight_ = 0;
  std::deque<abi::Completion> waiting_;  // for room in the ring
  std::vector<Orphan> orphans_;
  struct Former {
    std::uint32_t number;
    std::uint64_t until;  // ring position
  };
  std::unordered_map<std::uint16_t, Former>
      former_;  // by index (low half of the number): the last that ended
  bool ended_ = false;
};

// Set in InflightRecord::op_index for an operation that has no number in its group.
inline constexpr std::uint64_t kUnnumbered = ~std::uint64_t{0};

// Of a submission, or of its record, that has no operation: what every answer says.
template <typename Taken>
abi::Completion completion_of(const Taken& taken, StatusCode status) {
  abi::Completion completion{};
  completion.ticket = taken.ticket;
  completion.status = status;
  completion.failed_rank = -1;
  completion.member = taken.member;
  completion.slot = taken.slot;
  return completion;
}

}  // namespace epd::engine
