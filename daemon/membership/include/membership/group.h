// A group as the supervisor sees it: who its members are, and how far each engine that serves it is.
// Plain data; only GroupRegistry changes it.
#pragma once

#include "common/status.h"
#include "membership/ids.h"
#include "membership/messages.h"
#include "proto/attach.h"
#include "proto/link.h"

#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace epd::membership {

inline constexpr std::uint64_t kNever = std::numeric_limits<std::uint64_t>::max();

enum class GroupPhase {
  kForming,   // ranks are missing
  kStarting,  // engines have been told; not all are ready
  kActive,
  kBreaking,  // recoverable: waiting for every engine to have broken, then a new epoch
  kFailing,   // fatal: it ends; waiting for every engine to have broken
  kLost,      // fatal, and every engine has let go; waiting for the members to leave
  kRemoving,  // waiting for every engine to have forgotten it
};

// The states of a variant name their phase as kPhase.
template <typename State>
constexpr auto phase_of(const State& state) {
  return std::visit([](const auto& of) { return of.kPhase; }, state);
}

enum class Presence {
  kHere,
  kJoining,  // it rejoins a degraded group, and has no Joined yet
  kGone,     // left, died or was evicted
};

struct Member {
  // Whether its engine takes calls of it.
  struct Taken {};
  struct Stopping {            // kStopMember sent and not answered
    std::uint64_t due_ns = 0;  // for the answer
    bool asked_again = false;  // its engine has missed the first deadline
  };
  struct Stopped {
    std::uint64_t next_submit = 0;  // the first operation that it will never submit
  };

  SessionId session;
  std::uint32_t rank = 0;
  std::uint32_t member = 0;  // make_member_id
  std::uint32_t uid = 0;
  std::int32_t pid = 0;
  EngineId engine;
  std::uint32_t sms = 0;
  std::int32_t priority = 0;
  std::uint32_t join_request = 0;
  std::uint64_t join_due_ns = 0;
  std::uint64_t board_index = 0;  // Board::next_index, as its node has told it last

  std::uint64_t active_since = 1;  // the epoch in which it came
  std::uint64_t first_index = 0;   // the operation with which it came
  bool announced = false;          // its engine has been told of it
  bool holds_memory = false;
  Presence presence = Presence::kHere;
  std::string evicted;  // kGone: how it was evicted; its client lives, and is to hear of it
  std::variant<Taken, Stopping, Stopped> calls;
  std::optional<std::uint32_t> leave_request;  // a kLeave that waits for its reply

  bool gone() const { return presence == Presence::kGone; }
  RequestId join_id() const { return {session, join_request}; }
};

// A rank whose memory has been asked for: the rank is taken, and counts for nothing yet.
struct Arrival {
  JoinRequest request;
  Member member;  // holds_memory: it has come; the rank waits for others that have been asked for theirs
};

// How far one engine is with one group.
enum class EnginePhase {
  kAbsent,    // it is down; it will be told when it is back
  kStarting,  // told, not ready
  kServing,
  kBreaking,  // kBreak sent
  kBroken,
  kRemoving,  // kRemoveGroup sent
  kDone,      // knows nothing of the group and never will again
};

struct EngineSlot {
  struct Absent {
    static constexpr EnginePhase kPhase = EnginePhase::kAbsent;
  };
  struct Starting {
    static constexpr EnginePhase kPhase = EnginePhase::kStarting;
    std::uint64_t due_ns = 0;  // for kGroupReady
  };
  struct Serving {
    static constexpr EnginePhase kPhase = EnginePhase::kServing;
    std::uint64_t due_ns = 0;  // for kResumed; 0: nobody waits for it
  };
  struct Breaking {
    static constexpr EnginePhase kPhase = EnginePhase::kBreaking;
    std::uint64_t due_ns = 0;  // for kBroken
    bool fatal = false;
  };
  struct Broken {
    static constexpr EnginePhase kPhase = EnginePhase::kBroken;
    std::uint64_t next_index = 0;  // the first operation that it has not completed
    bool released = false;         // kRelease sent
    bool fatal = false;            // it has no more to be told but kRemoveGroup
    bool restarted = false;        // so no kBreak has told it why
  };
  struct Removing {
    static constexpr EnginePhase kPhase = EnginePhase::kRemoving;
    std::uint64_t due_ns = 0;  // for kGroupRemoved
  };
  struct Done {
    static constexpr EnginePhase kPhase = EnginePhase::kDone;
  };

  std::variant<Absent, Starting, Serving, Breaking, Broken, Removing, Done> state;
  std::uint64_t resumed = 0;  // the last epoch that it has said it serves
  std::string waits_for;      // what its kGroupReady or kResumed waits for, as it last said; "": nothing
  std::uint32_t failed_starts = 0;  // how often it went down in place of kGroupReady, in a row

  EnginePhase phase() const { return phase_of(state); }
  bool is(EnginePhase wanted) const { return phase() == wanted; }
  // When the answer that it owes is due; null: it owes none.
  const std::uint64_t* due_ns() const;
  std::uint64_t* due_ns() { return const_cast<std::uint64_t*>(std::as_const(*this).due_ns()); }
};

// Returns `said` if an engine may end operations or joins with it. A code that tells a client to try again,
// or that is about something else, becomes `otherwise`.
StatusCode said_cause(StatusCode said, StatusCode otherwise);

// Why a group breaks; the text is what clients read.
struct BreakReason {
  StatusCode cause = StatusCode::kOk;
  std::int32_t failed_rank = -1;
  std::string text;
  bool orderly = false;  // the failed rank left or detached: nothing went wrong
};

// A join that came while a degraded group breaks.
struct WaitingJoin {
  JoinRequest request;
  std::uint64_t due_ns = 0;
};

struct LateRank {
  SessionId session;
  std::uint32_t member = 0;  // its number, until then
};

struct Group {
  struct Forming {
    static constexpr GroupPhase kPhase = GroupPhase::kForming;
  };
  struct Starting {
    static constexpr GroupPhase kPhase = GroupPhase::kStarting;
    std::uint64_t due_ns = 0;  // until then the engines must have mapped it
  };
  struct Active {
    static constexpr GroupPhase kPhase = GroupPhase::kActive;
  };
  struct Breaking {
    static constexpr GroupPhase kPhase = GroupPhase::kBreaking;
    std::set<std::uint32_t> changed;   // ranks that came or went, to be told before kResume
    bool reason_changed = false;       // since kBreak told it
    std::uint64_t release_due_ns = 0;  // then clients are told of failures all the same
  };
  struct Failing {
    static constexpr GroupPhase kPhase = GroupPhase::kFailing;
    std::uint64_t fail_from = kNever;  // operations from this one on fail; 0: none runs to its end
    bool told = false;                 // kBreak fatal is out, with fail_from
  };
  struct Lost {
    static constexpr GroupPhase kPhase = GroupPhase::kLost;
  };
  struct Removing {
    static constexpr GroupPhase kPhase = GroupPhase::kRemoving;
  };

  std::uint64_t id = 0;
  std::uint32_t uid = 0;        // of all its members
  std::uint32_t sole_node = 0;  // the only node of which it is known that ranks joined; 0: of several
  std::string name;
  abi::GroupShape shape{};
  std::uint32_t asked_sum_ranks = 0;                     // of its first join; those that follow say the same
  abi::DeviceKind device_kind = abi::DeviceKind::kHost;  // of all its members' devices
  std::uint64_t epoch = 1;
  std::uint64_t resume_index = 0;
  std::uint64_t view = 1;  // grows when other ranks take part
  EpochKey epoch_key;
  std::uint64_t created_ns = 0;
  std::string refusal;                        // "; rank 1 was refused: ...", the last one while it forms
  std::map<std::uint32_t, Member> members;    // by rank; a masked one is missing
  std::map<std::uint32_t, Arrival> arrivals;  // by rank; none of them is in members
  std::map<EngineId, EngineSlot> engines;     // empty while forming

  std::variant<Forming, Starting, Active, Breaking, Failing, Lost, Removing> state;
  BreakReason reason;                // of the last break
  std::vector<WaitingJoin> waiting;  // degrade: for the end of the break
  // degrade_late: ranks that were lost because they were late, and whose sessions continue.
  std::map<std::uint32_t, LateRank> late;
  // Living ranks that have asked, in this epoch, to take the late ones back.
  std::map<std::uint32_t, WaitingJoin> asked;

  GroupPhase phase() const { return phase_of(state); }
  bool is(GroupPhase wanted) const { return phase() == wanted; }
  GroupLabel label() const { return {id, uid, name}; }
  // Returns the part of the description that is equal for all engines: without ranks, members and far
  // engines.
  GroupDescription describe() const;
  void take(const GroupDescription& told);
  bool all_gone() const;
  bool lives(std::uint32_t rank) const;
  // Returns the living or arriving member. Null: the rank is free, or lost.
  const Member* holder(std::uint32_t rank) const;
  // Whether it runs, and lost ranks may come back.
  bool takes_ranks_back() const;
  std::uint32_t num_lost() const;
  // Returns what the engines that owe an answer are waiting for, each reason behind "; ". Empty: none waits.
  std::string waits() const;
  // Whether the engine serves a living rank.
  bool needs(EngineId engine) const;
  // Why it breaks when an engine that it needs has ended as `text` says. Names the rank that the engine
  // served.
  BreakReason reason_of_end(EngineId engine, const std::string& text) const;
  RankDescription describe(std::uint32_t rank) const;
  // Returns what the engine's ranks ask for: most SMs (0: none asks), highest priority.
  abi::GroupSettings settings_on(EngineId engine) const;
};

MemberDescription describe(const Member& member);

// Rules of Joins. Refusals name the field, the value and what is allowed.

// Judges every field by the limits of shape.h.
Status check_join(const abi::Join& join);
Status check_group_name(std::string_view name);
// UNSUPPORTED: such groups are in another registry, or in none.
Status check_span(abi::Span span, bool spanning);
// UNSUPPORTED: devices of this kind can't do it.
Status check_device(abi::DeviceKind kind, const abi::GroupShape& shape);
// INVALID_ARGUMENT: the ranks of a group are on devices of one kind.
Status check_same_kind(abi::DeviceKind first, abi::DeviceKind joiner, const std::string& group);
// INVALID_ARGUMENT naming the first field that differs, with both values.
Status check_same_shape(const abi::GroupShape& first, const abi::GroupShape& joiner,
                        const std::string& group);

}  // namespace epd::membership
