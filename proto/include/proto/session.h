// The two shared segments of a session and the board of a group member.
//
//   segment A   client read-write, engine read-write   submissions; the client's own indices
//   segment B   client READ-ONLY,  engine read-write   completions, engine's indices, session state
//   board       client READ-ONLY,  engine read-write   one per joined group: epoch, counts, messages
//
// All are zero-filled memfds made and sealed by the supervisor. The README of this room tells the
// protocol; field comments say who writes what.
#pragma once

#include "proto/operation.h"
#include "proto/ring.h"
#include "proto/shape.h"
#include "proto/status.h"

#include <atomic>
#include <cstdint>

namespace epd::abi {

inline constexpr std::uint32_t kSegmentAMagic = 0x41445045;  // "EPDA"
inline constexpr std::uint32_t kSegmentBMagic = 0x42445045;  // "EPDB"
inline constexpr std::uint32_t kBoardMagic = 0x43445045;     // "EPDC"
inline constexpr std::size_t kSubmissionSlots = 64;
inline constexpr std::size_t kCompletionSlots = 64;
inline constexpr std::size_t kMessageBytes = 256;
// Submission::handle of a combine: a dispatch from before this rank joined, which does not know its number.
inline constexpr std::uint64_t kEarlierDispatch = ~std::uint64_t{0};

struct Submission {
  std::uint64_t sequence;   // ring position + 1, stored last
  std::uint64_t ticket;     // chosen by the client, echoed; not 0, and not one in flight
  std::uint64_t epoch;      // the group epoch that the client acts in
  std::uint64_t handle;     // combine, cached dispatch: op_index of the dispatch whose routing is used;
                            // combine: kEarlierDispatch
  std::uint64_t submit_ns;  // CLOCK_MONOTONIC
  Op op;
  std::uint32_t member;        // from Joined; index and generation
  std::uint32_t slot;          // buffer slot, < depth
  std::uint32_t num_tokens;    // n, <= max_tokens; combine and cached dispatch: 0
  std::uint32_t flags;         // OpFlags
  std::uint32_t timeout_ms;    // 0 = the daemon's default
  std::uint32_t route;         // routing record that is written or used: `slot`, or depth .. num_routes() - 1
  std::uint32_t sms;           // of the device, at most; 0 = the group's
  std::uint32_t reserved[14];  // zero
};
static_assert(sizeof(Submission) == 128);

struct Completion {
  std::uint64_t sequence;  // ring position + 1, stored last
  std::uint64_t ticket;
  std::uint64_t op_index;  // the operation's number in its group
  StatusCode status;
  std::int32_t failed_rank;  // the rank that the status is about, or -1
  std::uint32_t member;
  std::uint32_t slot;
  std::uint32_t num_recv_rows;  // dispatch: M
  std::uint32_t seen_us;        // microseconds after submit_ns; each saturates
  std::uint32_t launched_us;    // the device began it
  std::uint32_t done_us;
  std::uint32_t num_dropped_selections;  // of this rank's tokens, because the expert's rank is lost (degrade)
  std::uint32_t reserved;
};
static_assert(sizeof(Completion) == 64);

// The producer of a ring makes a system call only for a consumer that says it sleeps. Protocol of
// the sleeper: store not 0, fence (seq_cst), look once more, sleep, store 0. Of the ringer: publish,
// fence (seq_cst), load, and if not 0 ring the sleeper's bell, never blocking (a full one is fine: the
// sleeper has something to wake for). An engine that has completions for which the
// ring had no room stores kAsleepForRoom; a client that takes completions rings for that value.
// Model-checked: proto/model.
enum Sleep : std::uint32_t { kAwake = 0, kAsleep = 1, kAsleepForRoom = 2 };

struct alignas(64) SleepLine {
  std::atomic<std::uint32_t> sleeping;
};

struct SegmentA {
  alignas(64) std::uint32_t magic;  // written by the supervisor before sealing
  std::uint32_t version;
  SleepLine client_sleep;     // written by the client
  IndexLine completion_head;  // written by the client: completions consumed
  RingSlots<Submission, kSubmissionSlots> submissions;
};

enum class SessionState : std::uint32_t {
  kStarting = 0,  // no engine serves it yet, or its engine is being restarted
  kServing = 1,
  kEnded = 2,  // refused for an illegal submission or ended by the operator; see message
};

// An operation taken from the ring and not yet completed. Kept in shared memory so that the next
// engine can say ENGINE_RESTARTED for it.
struct InflightRecord {
  std::uint64_t ticket;  // 0 = free
  std::uint64_t op_index;
  std::uint64_t submit_ns;
  std::uint32_t member;
  std::uint32_t slot;
  std::uint32_t route;
  std::uint32_t reserved;
};

struct SegmentB {
  alignas(64) std::uint32_t magic;
  std::uint32_t version;
  alignas(64) std::atomic<std::uint32_t> state;  // SessionState
  std::atomic<std::uint32_t> end_status;         // StatusCode, when ended
  std::atomic<std::uint32_t> incarnation;        // engine starts, from 1
  SleepLine engine_sleep;
  IndexLine submission_head;  // submissions consumed
  IndexLine completion_tail;  // engine's own position, kept here for the next engine
  InflightRecord inflight[kSubmissionSlots];
  char message[kMessageBytes];  // valid before state becomes kEnded; zero-terminated
  RingSlots<Completion, kCompletionSlots> completions;
};

enum class GroupState : std::uint32_t {
  kForming = 0,
  kActive = 1,
  kBroken = 2,  // an operation failed for everybody; go on with resume_index in the new epoch
  kLost = 3,    // the group has ended: leave
};

struct BoardSlot {
  alignas(64) std::atomic<std::uint64_t> counts_ticket;  // counts below belong to this ticket; stored last
  std::atomic<std::uint64_t> message_ticket;             // message below belongs to this ticket; stored last
  std::atomic<std::uint64_t> sent_ticket;  // this operation (kFlagDefer) reads its inputs no more
  std::uint32_t num_recv_rows;             // M
  char message[kMessageBytes];
};

struct Board {
  alignas(64) std::uint32_t magic;
  std::uint32_t version;
  // Even = stable. The engine makes it odd, writes the fields below, makes it even again.
  alignas(64) std::atomic<std::uint32_t> change;
  std::atomic<std::uint32_t> state;  // GroupState
  std::atomic<std::uint64_t> epoch;
  std::atomic<std::uint64_t> resume_index;  // first operation of this epoch
  std::atomic<std::uint64_t> next_index;    // every operation below has completed on this rank
  std::atomic<std::uint32_t> cause;         // StatusCode of the last break
  std::atomic<std::int32_t> failed_rank;
  char message[kMessageBytes];
  std::atomic<std::uint32_t> memory_cleared;  // an engine has seen to it that the arenas began as zeros
  std::uint32_t reserved;
  std::atomic<std::uint64_t> active[kMaxRanks / 64];  // bit r % 64 of word r / 64: rank r takes part
  BoardSlot slots[kMaxDepth];
  // then, per slot: int32 rank_offsets[R + 1], expert_counts[E/R], expert_offsets[E/R + 1]; see BoardLayout
};

struct BoardLayout {
  std::uint64_t counts = sizeof(Board);
  std::uint64_t counts_stride = 0;  // per slot
  std::uint64_t total_bytes = 0;

  constexpr explicit BoardLayout(const GroupShape& s) {
    counts_stride = (std::uint64_t{s.num_ranks} + 1 + 2 * std::uint64_t{s.experts_per_rank()} + 1) * 4;
    counts_stride = (counts_stride + 63) / 64 * 64;
    total_bytes = counts + counts_stride * s.depth;
  }
  constexpr std::uint64_t rank_offsets(std::uint32_t slot) const { return counts + counts_stride * slot; }
  constexpr std::uint64_t expert_counts(const GroupShape& s, std::uint32_t slot) const {
    return rank_offsets(slot) + (std::uint64_t{s.num_ranks} + 1) * 4;
  }
  constexpr std::uint64_t expert_offsets(const GroupShape& s, std::uint32_t slot) const {
    return expert_counts(s, slot) + std::uint64_t{s.experts_per_rank()} * 4;
  }
};

}  // namespace epd::abi
