// The engine's end of one session: takes submissions, posts completions, rings the client. Everything that
// the client can write is read once and validated.
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
  // Maps the segments. Takes over what a former engine has left: its indices and its operations in flight.
  struct Ends {
    UniqueFd segment_a;
    UniqueFd segment_b;
    UniqueFd ring_client;  // an eventfd of the client's porter, which rings the client
  };
  static Result<std::unique_ptr<SessionPort>> open(std::uint64_t id, Ends ends);

  std::uint64_t id() const { return id_; }

  // A private copy of the next submission, if there is one and there is room to answer it.
  std::optional<abi::Submission> take();
  // Records an operation as taken. Must precede the next take(), which gives its ring slot back.
  void begin(const abi::Submission& submission, std::uint64_t op_index);
  // Posts a completion, now or as soon as the client makes room, and forgets the operation.
  void complete(const abi::Completion& completion);
  // Tries again to post completions that did not fit. True if at least one did.
  bool flush();
  std::size_t inflight() const { return inflight_; }

  // Rings the client if it sleeps.
  void ring();
  void set_sleeping(bool sleeping) {
    const abi::Sleep asleep = waiting_.empty() ? abi::kAsleep : abi::kAsleepForRoom;
    b_->engine_sleep.sleeping.store(sleeping ? asleep : abi::kAwake, std::memory_order_relaxed);
  }
  // Whether flush() would post a completion.
  bool can_flush() const;
  bool has_submission();

  void set_state(abi::SessionState state) {
    b_->state.store(static_cast<std::uint32_t>(state), std::memory_order_release);
  }
  // Ends the session for the client: publishes the reason, then the state, then rings.
  void end(StatusCode status, const std::string& text);
  bool ended() const { return ended_; }

  // Operations that a former engine took and never answered. open() fills the list. The engine empties it
  // when it knows what became of them.
  struct Ending {
    std::uint32_t num_recv_rows = 0;
    std::uint32_t num_dropped = 0;
  };
  struct Orphan {
    abi::InflightRecord record;
    std::optional<Ending> ending;  // of an operation that has ended since
  };
  std::vector<Orphan>& orphans() { return orphans_; }
  // Another engine has served this session before. So the client may submit for memberships that this engine
  // has not been told of yet. After set_all_told() it never will be: those groups have ended.
  bool inherited() const { return inherited_; }
  // No submission in the ring waits for its group any more.
  void set_all_told() { awaits_groups_ = false; }

  std::unordered_map<std::uint32_t, Member*> members;  // by the number that submissions carry
  // Removes a membership. Submissions for it that may be in the ring by now, at most a ring's length, are not
  // illegal.
  void end_member(std::uint32_t number);
  // Whether the submission taken last was for a former member.
  bool was_member(std::uint32_t number) const;
  Statistics statistics;
  bool removing = false;  // kRemoveSession came; the session goes when nothing is in flight

 private:
  SessionPort() = default;
  bool post(const abi::Completion& completion);
  void adopt();
  void give_back_recorded();

  std::uint64_t id_ = 0;
  // Whether the submission waits in the ring for its group.
  bool awaits_group(const abi::Submission& submission) const;
  // Counts, once, that the submission at the head must wait. Always returns nullopt.
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

// In InflightRecord::op_index: the operation has no number in its group.
inline constexpr std::uint64_t kUnnumbered = ~std::uint64_t{0};

// The answer to a submission, or to its record, that became no operation: the fields that all answers have.
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
