// The link protocol: supervisor and engine, over the socketpair that the engine inherits. Both
// ends are ours, so lengths and types are checked as invariants, not as hostile input.
//
// The supervisor is the only one that decides; engines report. A group comes to an engine as
// kGroupBegin, one kGroupRank per rank (all R), one kGroupMember per rank that this device serves,
// then kGroupCommit, which the engine answers with kGroupReady. Between kBroken and kResume the same
// kGroupRank and kGroupMember say what has changed: a rank that is lost (masked) or one that has rejoined.
//
// A group breaks in one of two ways (README, "When a group breaks"):
//   recoverable  every operation in flight fails. Each engine stops touching the arenas and answers
//                kBroken. Clients learn of failed calls with kResume, which brings the new epoch and
//                the first operation to redo, or with kRelease because another engine is silent.
//   fatal        a rank is gone for good. Operations numbered fail_from or above fail at once;
//                those below have all their announcements and run to their end. kBroken follows
//                when none is left, with every mapping of the group's arenas dropped.
#pragma once

#include "proto/arena.h"
#include "proto/far.h"
#include "proto/far_statistics.h"
#include "proto/mapped_memory.h"
#include "proto/statistics.h"
#include "proto/wire.h"

namespace epd::abi {

enum class LinkType : std::uint16_t {
  // supervisor -> engine
  kAddSession = 1,     // fds: segment A, segment B (rw), an eventfd by which the client is rung
  kRemoveSession = 2,  // answered with kSessionRemoved at once
  kGroupBegin = 3,
  // fds: user arena, exchange arena, eventfd and EnginePage of that rank's engine; none if it is masked, or
  // on another node
  kGroupRank = 4,
  kGroupMember = 5,  // fds: board (rw)
  kGroupCommit = 6,
  kStopMember = 7,  // take no more calls of this rank; answered with kMemberStopped
  kBreak = 8,
  kResume = 9,        // answered with kResumed
  kRemoveGroup = 10,  // answered with kGroupRemoved; forgets everything about the group
  kSettings = 11,
  kStop = 12,     // finish nothing more, exit 0
  kRelease = 13,  // after kBroken: clients are told of failed calls now, though the group is still broken
  kGroupSettings = 14,
  // fd: user arena of a rank that no engine will serve any more, and this one never has. It lets streams that
  // wait there for operations continue. Not answered
  kCloseStreams = 15,
  // An engine of another node, before a group names it; again when it has another address, or none
  kFarEngine = 17,
  // Memory of a rank's client in which rows of its calls may lie; fd: the memory, if it goes by descriptor.
  // After kGroupRank. Answered with kMemoryMapped
  kMapMemory = 18,
  // engine -> supervisor
  kReady = 32,
  kSessionFailed = 33,  // an illegal call; SegmentB already says so
  kSessionRemoved = 34,
  kGroupReady = 35,
  kMemberStopped = 36,
  kBreakRequest = 37,  // deadline or mismatch: please break
  kBroken = 38,
  kGroupRemoved = 39,
  kResumed = 40,
  kDeviceFailed = 41,  // its last word: nothing of it runs on the device any more, and its process ends
  kRankRefused = 42,   // the rank's memory can't be mapped here; it stays masked
  kGroupWaits =
      43,  // kGroupReady or kResumed has to wait for what is no fault of the engine's: again and again
  kPeerLost = 44,  // an engine of another node, with which groups are shared, is of no use
  kMemoryMapped = 45,
};

// How an engine's process ends: 0 as told, 1 the supervisor is gone, 2 something that a restart may not mend,
// and:
inline constexpr int kExitDeviceFailed = 3;  // nothing can be done with the GPU any more; memory is as it was
inline constexpr int kExitDeviceBusy = 4;    // the GPU takes no new process yet: try again
// It needs a network of its own to other nodes: there was none when it started and now there is, or nobody
// can connect to it any more.
inline constexpr int kExitForNetwork = 5;

struct AddSession {
  std::uint64_t session_id;
  std::uint32_t uid;
  std::int32_t pid;
};

struct SessionRef {  // kRemoveSession, kSessionRemoved
  std::uint64_t session_id;
};

struct SessionFailed {
  std::uint64_t session_id;
  StatusCode status;
  char text[kTextBytes];
};

struct GroupBegin {
  std::uint64_t group_id;
  std::uint64_t epoch;
  std::uint64_t resume_index;
  std::uint32_t sms;         // 0 = the device's
  std::uint32_t own_linger;  // 1: linger_us is the group's; 0: the device's holds
  std::uint32_t linger_us;
  std::uint32_t broken;   // 1: wait for kResume before serving (an engine that was restarted)
  std::int32_t priority;  // of its operations among those of the device
  std::uint32_t node;     // this engine's, as the group counts nodes; 0: the group is on one node
  std::uint64_t view;     // these are 0 then
  std::uint64_t epoch_key[2];
  GroupShape shape;
  char name[kMaxGroupName + 1];
};

struct GroupRank {
  std::uint64_t group_id;
  std::uint32_t rank;
  std::uint32_t device_index;
  std::uint64_t active_since;  // the epoch in which it came; 0: masked, it takes no part
  std::uint32_t node = 0;      // its node; 0: the group is on one node
};
inline constexpr std::size_t kRankFds = 4;

struct GroupMember {
  std::uint64_t group_id;
  std::uint64_t session_id;
  std::uint32_t rank;
  std::uint32_t member;       // as told to the client
  std::uint64_t first_index;  // its first operation; of dispatches before it has no rows
};

struct GroupRef {  // kGroupCommit, kRemoveGroup, kGroupRemoved, kRelease
  std::uint64_t group_id;
};

struct CloseStreams {
  std::uint64_t user_bytes;
  std::uint64_t calls;  // offset of CallWords in the user arena
};

struct GroupReady {
  std::uint64_t group_id;
  StatusCode status;
  char text[kTextBytes];
};

struct GroupWaits {
  std::uint64_t group_id;
  char text[kTextBytes];  // for what
};

struct RankRefused {
  std::uint64_t group_id;
  std::uint32_t rank;
  StatusCode status;
  char text[kTextBytes];
};

struct GroupMemory {  // kMapMemory
  std::uint64_t group_id;
  std::uint32_t rank;
  std::uint32_t here;  // 1: this engine's own device serves the rank
  MemoryRange range;
};

struct MemoryMapped {
  std::uint64_t group_id;
  std::uint32_t rank;
  std::uint32_t number;
  std::uint32_t generation;
  StatusCode status;
  char text[kTextBytes];
};

struct MemberRef {  // kStopMember, kMemberStopped
  std::uint64_t group_id;
  std::uint32_t rank;
  std::uint32_t reserved;
  std::uint64_t next_submit;  // kMemberStopped: the number its next operation would have had
};

struct Break {  // kBreak and kBreakRequest
  std::uint64_t group_id;
  std::uint64_t epoch;      // kBreakRequest: the epoch it happened in; kBreak: the epoch that ends
  std::uint64_t fail_from;  // fatal only
  std::uint32_t fatal;
  StatusCode cause;
  std::int32_t failed_rank;  // -1 = none
  char text[kMessageBytes];
};

struct Broken {
  std::uint64_t group_id;
  std::uint64_t epoch;       // the one that ended
  std::uint64_t next_index;  // lowest operation not completed, over the living ranks on this device
};

struct Resume {
  std::uint64_t group_id;
  std::uint64_t epoch;  // the new one
  std::uint64_t resume_index;
  StatusCode cause;  // OK: kBreak's stands. Else the engine is a new one, or something worse has happened
  std::int32_t failed_rank;
  char text[kMessageBytes];
  std::uint64_t view = 0;  // these are 0 in a group of one node
  std::uint64_t epoch_key[2] = {};
};

struct Resumed {
  std::uint64_t group_id;
  std::uint64_t epoch;
};

inline constexpr std::size_t kLogLevelBytes = 160;
struct Settings {
  std::uint32_t sms;                 // of the device
  std::uint32_t default_timeout_ms;  // for operations that give none
  std::uint32_t linger_us;  // how long SMs stay after a call, in groups that have no value of their own
  std::uint32_t spin_us;    // how long an idle engine polls before it sleeps
  char log_levels[kLogLevelBytes];  // as log.level of the configuration
};

struct GroupSettings {  // for operations that are launched from now on
  std::uint64_t group_id;
  std::uint32_t sms;      // 0 = the device's
  std::int32_t priority;  // kMinPriority .. kMaxPriority; higher goes first
  // Each node's own:
  std::uint32_t own_linger;  // 1: linger_us is the group's; 0: the device's holds
  std::uint32_t linger_us;
};

struct EngineReady {
  std::int32_t pid;
  std::uint32_t max_sms;
  std::uint32_t address_bytes;  // 0: engines of other nodes can't reach it
  std::uint8_t address[kMaxFarAddressBytes];
};

// Nodes are numbered by their cluster's coordinator, from 1.
struct FarEngine {
  std::uint32_t node;
  std::uint32_t device_index;
  std::uint32_t address_bytes;  // 0: it is down
  char node_name[kFarNodeBytes];
  std::uint8_t address[kMaxFarAddressBytes];
};

enum class PeerLoss : std::uint32_t {
  kUnreachable = 0,  // nothing comes from it, or it was told something else of the group
  kCorrupt = 1,      // what it sent came corrupted, or is missing
};
struct PeerLost {
  std::uint32_t node;
  std::uint32_t device_index;
  PeerLoss loss;
  char text[kTextBytes];
};

// A page that each engine writes and the supervisor, and the engines it shares groups with, read.
// No request is needed to see what an engine is doing.
inline constexpr std::uint32_t kEnginePageMagic = 0x50445045;  // "EPDP"
inline constexpr std::size_t kMaxOpsShown = 128;

enum class OpStage : std::uint32_t {
  kNone = 0,
  kPlanning = 1,     // counting tokens per rank
  kWaitReady = 2,    // for every rank's announcement
  kMoving = 3,       // rows are being pushed or pulled
  kWaitArrived = 4,  // for every rank's rows or pulls
  kBreaking = 5,     // failed; waiting for the group to agree
};
inline constexpr std::size_t kNumOpStages = 6;
inline constexpr std::size_t kFarWaitBytes = 192;

struct OpView {
  std::atomic<std::uint64_t> ticket;  // 0 = free; others are a hint while it changes
  std::uint64_t session_id;
  std::uint64_t group_id;
  std::uint64_t op_index;
  std::uint64_t submit_ns;
  Op op;
  std::uint32_t rank;
  std::uint32_t slot;
  std::uint32_t num_tokens;
  std::atomic<std::uint32_t> stage;       // OpStage
  std::atomic<std::int32_t> waiting_for;  // rank, or -1
  std::uint64_t epoch;
  std::uint64_t seen_ns;
  std::uint64_t deadline_ns;
  std::atomic<std::uint64_t> waiting_since_ns;        // for waiting_for; 0 = for nobody
  std::atomic<std::uint64_t> stage_ns[kNumOpStages];  // when each was entered, by OpStage; 0 = not yet
  PageText<kFarWaitBytes>
      far_wait;  // for what of another node, "a credit for rows of rank 3 on node-b"; or ""
};

// An engine whose heartbeat is older is stopped, or hangs. A sleeping one turns each second.
inline constexpr std::uint64_t kStandsStillNs = 3'000'000'000;

struct EnginePage {
  alignas(64) std::uint32_t magic;
  std::uint32_t version;
  SleepLine sleep;                               // peers ring the eventfd only when set
  alignas(64) std::atomic<std::uint64_t> loops;  // advances while the engine lives
  std::atomic<std::uint64_t> heartbeat_ns;       // CLOCK_MONOTONIC of the last loop
  std::atomic<std::uint64_t> ops_submitted;
  std::atomic<std::uint64_t> ops_completed;  // with OK
  std::atomic<std::uint64_t> ops_failed;
  std::atomic<std::uint64_t> bytes_dispatched;  // rows delivered to its ranks x row bytes
  std::atomic<std::uint64_t> bytes_combined;    // rows taken from its ranks x row bytes
  std::atomic<std::uint64_t> submissions_refused;
  // Time with an operation in flight; where operations are calls, the sum of their times on the device.
  std::atomic<std::uint64_t> busy_ns;
  std::atomic<std::uint64_t> sleeps;
  std::atomic<std::uint32_t> sms;
  alignas(64) OpView ops[kMaxOpsShown];
  std::uint64_t next_row_key;  // the engine's own
  StatisticsTable<kSessionRows> sessions;
  StatisticsTable<kMemberRows> members;
  std::atomic<std::uint32_t> times_stuck;  // how often the GPU began no kernel for 100 ms
  FarTable far;
};

}  // namespace epd::abi
