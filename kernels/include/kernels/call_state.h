// Calls: operations that clients write into a lane's rings (abi::CallWords). This file has what the kernels
// and their engine keep about calls and exchange with each other. Plain data.
#pragma once

#include "kernels/operation.h"
#include "proto/call_words.h"

#include <cstddef>
#include <cstdint>

namespace epd::kernels {

inline constexpr std::uint32_t kJournalEntries = 1024;

// The two rings of a lane: calls that streams enqueue, and calls that the client's CPU enqueues. Each ring
// numbers its calls by itself.
enum CallRing : std::uint32_t { kByStreams = 0, kByHost = 1, kCallRings = 2 };

// The state of a routing record.
struct RouteState {
  std::uint64_t tag = 0;  // tag of the dispatch that made it (abi::op_tag); 0: no routing
  std::uint32_t num_tokens = 0;
  std::uint32_t half = 0;  // the half of the record that holds it; the next dispatch writes the other half
};

// Where an enabled epoch starts. The host writes it in pinned memory, and a gate reads it once for each
// enabled epoch.
struct CallStart {
  std::uint64_t epoch = 0;
  std::uint64_t index = 0;          // number of the next dispatch or combine in the group
  std::uint64_t changed_epoch = 0;  // a cached dispatch needs a routing of this epoch or a later one
  std::uint32_t num_routes = 0;
  std::uint64_t index_base = 0;        // `index` plus this is the number that clients know
  const RouteState* routes = nullptr;  // [num_routes], pinned
};

// The end of a call, for the host. Entries are in order. A discarded call has no entry.
struct alignas(64) JournalEntry {
  abi::PackedCall call;
  // `tag` and `left` are the operation's, or 0 if it has not begun. The tag of a noop only counts noops.
  OpResult result;
  // The operation's number in the group. A noop, and a call that has not begun, have the number of the next
  // operation.
  std::uint64_t index;
  CallRing ring;         // ring of the call
  std::uint32_t number;  // number of the entry plus 1, cyclic; stored last, with release at system scope
};
static_assert(sizeof(JournalEntry) == 128);

// Pinned host memory. Kernels write it, and read only `start`.
struct CallHost {
  alignas(64) CallStart start;
  alignas(64) JournalEntry journal[kJournalEntries];
};

// The state of a lane's calls: the host's words for the kernels, and what the kernels keep between their
// launches. Device memory, zeroed once. RouteState[num_routes] follow.
struct alignas(64) CallState {
  // The host writes these words by stream memory operations.
  std::uint32_t sms;             // SMs that an operation of the group may use; 0: all
  std::uint32_t guaranteed_sms;  // SMs that the lane may always use (SmCredits); not 0
  std::uint32_t journal_read;    // journal entries that the host has read
  std::uint32_t timeout_ms;      // of a call that names none
  std::uint32_t abort;           // not 0: the running operation must end
  // Not 0: the lane is closed. Gates discard calls and ring again, so that the stream empties.
  std::uint32_t leaves;
  std::uint32_t linger_us;  // how long a main kernel lingers after a call, for the next one
  std::uint32_t drains;     // not 0: gates ring again, so that the stream empties. Calls are run
  // The kernels write the rest. The host writes `sequence` and `results` once, before the first one.
  alignas(64) std::uint64_t epoch;
  std::uint64_t index;
  std::uint64_t changed_epoch;
  std::uint64_t index_base;
  std::uint32_t sequence[kCallRings];  // of the next call
  std::uint32_t journal;               // journal entries written
  std::uint32_t enabled_epoch_taken;
  std::uint32_t failed;  // a call has failed: calls are discarded until the next enabled epoch
  std::uint32_t last;    // CallRing of the last call that was taken
  std::uint64_t noops;
  std::uint32_t results;    // results written
  std::uint32_t together;   // GroupView::together of the enabled epoch
  std::uint32_t others;     // likewise, GroupView::others
  std::uint64_t called;     // tag of the last operation of which other ranks were told; 0: none
  std::uint64_t called_ns;  // when
};
static_assert(sizeof(CallState) == 192);

// How many calls of a replayed graph have ended with one result. Device memory.
struct alignas(8) ResultRuns {
  std::uint32_t result;  // plus 1; 0: none
  std::uint32_t runs;
};

struct DeviceView;  // in group_view.h

// The kernels' arguments for taking calls. Clients write `words`, so the gate reads each word once and then
// validates it.
struct CallArguments {
  abi::CallWords* words = nullptr;
  CallState* state = nullptr;
  RouteState* routes = nullptr;
  // The group view of the epoch. The host writes it while no call can run.
  const DeviceView* view = nullptr;
  const WorkDivision* division = nullptr;  // [kDivisionKinds][most_ctas] work divisions (division_index())
  std::uint32_t most_ctas = 0;
  CallHost* host = nullptr;
  abi::Results* results = nullptr;              // host memory; the kernel only writes it
  std::uint32_t counts_stride = 0;              // see abi::ResultsLayout
  ResultRuns* runs = nullptr;                   // [kReplayedResults]
  const abi::MappedMemory* memories = nullptr;  // [kMaxMapped] of the rank
  abi::OpLimits limits;
  bool per_expert = false;
};

}  // namespace epd::kernels
