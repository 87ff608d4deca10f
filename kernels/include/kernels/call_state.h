// Calls: operations that clients hand to a resident kernel (abi::CommandWords). What the kernel and its
// engine keep of them, and tell each other. Plain data.
#pragma once

#include "kernels/cuda_operation.h"
#include "proto/commands.h"

#include <cstddef>
#include <cstdint>

namespace epd::kernels::cuda {

inline constexpr std::uint32_t kJournalEntries = 1024;

// Who enqueues calls; each has a ring, and numbers of its own.
enum CallRing : std::uint32_t { kByStreams = 0, kByHost = 1, kCallRings = 2 };

// A routing record as commands know it.
struct RouteState {
  std::uint64_t tag = 0;  // of its dispatch, abi::op_tag; 0: it holds none
  std::uint32_t num_tokens = 0;
  std::uint32_t half = 0;  // in which it lies. The next dispatch writes the other one
};

// Where commands go on. By the host in pinned memory, read once for each odd turn (`sets` and `sequence` also
// when a kernel starts).
struct CommandStart {
  std::uint64_t epoch = 0;
  std::uint64_t index = 0;          // of the next dispatch or combine in the group
  std::uint64_t changed_epoch = 0;  // a cached dispatch needs a routing of this epoch or a later one
  std::uint32_t num_routes = 0;
  std::uint32_t sets = 0;  // 1: `sequence` counts too (a new engine): at the first kernel's start, or in the
                           // first odd turn that says so. Later the kernel knows better
  std::uint32_t sequence[kCallRings] = {};  // of the next call
  std::uint64_t index_base = 0;             // added to `index`: the number that clients know
  const RouteState* routes = nullptr;       // [num_routes], pinned
};

// An end that the host is to know, in order. Discarded calls have none.
struct alignas(64) JournalEntry {
  abi::PackedCall call;
  OpResult result;  // tag and left: the operation's, 0 if it has not begun. A noop's tag only counts noops
  std::uint64_t index;   // its number in the group; of a noop, and of what has not begun: the next one's
  CallRing ring;         // in which the call lay
  std::uint32_t number;  // of the entry + 1, cyclic. Stored last, with release at system scope
};
static_assert(sizeof(JournalEntry) == 128);

// Pinned memory of the host, which the kernel writes, and reads only as said at CommandStart.
struct CommandHost {
  alignas(64) CommandStart start;
  alignas(64) std::uint32_t turn;  // the turn that the kernel has taken: stored when no command of an earlier
                                   // one runs any more
  alignas(64) JournalEntry journal[kJournalEntries];
};

// What the kernel keeps, and the host's words for it (by stream memory operations). Device memory, zeroed
// once; RouteState[num_routes] lie behind.
struct alignas(64) CommandState {
  // By the host. Each pair is read at once.
  alignas(8) std::uint32_t turn;  // odd: calls are carried out from CommandStart on; even: they are discarded
  std::uint32_t sms;              // of the device, that the group's operations may use; 0: all
  alignas(8) std::uint32_t journal_read;  // entries that the host has read
  std::uint32_t timeout_ms;               // of a call that says none
  std::uint32_t stop;                     // number of the kernel that is to leave, see ResidentArguments
  std::uint32_t abort;                    // not 0: the call that runs is to end
  // The kernel's own.
  alignas(64) std::uint64_t epoch;
  std::uint64_t index;
  std::uint64_t changed_epoch;
  std::uint64_t index_base;
  std::uint32_t sequence[kCallRings];  // of the next call
  std::uint32_t journal;               // entries written
  std::uint32_t turn_taken;
  std::uint32_t failed;        // one has failed: others are discarded until the next turn
  std::uint32_t sequence_set;  // CommandStart::sets has been heeded: it counts once in a lane's life
  std::uint64_t noops;
  std::uint32_t results;  // written
  std::uint32_t reserved;
};

// How many calls of a replayed graph have ended with one result. Device memory.
struct alignas(8) ResultRuns {
  std::uint32_t result;  // + 1; 0: none has
  std::uint32_t runs;
};

struct DeviceView;  // group_view.h

// The client writes `words`: each is read once, and judged.
struct CommandArguments {
  abi::CommandWords* words = nullptr;
  CommandState* state = nullptr;
  RouteState* routes = nullptr;
  // What is constant in an epoch. By the host, while no call can run.
  const DeviceView* view = nullptr;
  const Movers* movers = nullptr;  // [kMoverKinds][most_ctas]: of each number of CTAs, see movers_index()
  std::uint32_t most_ctas = 0;
  CommandHost* host = nullptr;
  abi::Results* results = nullptr;  // of the host: written alone
  std::uint32_t counts_stride = 0;  // abi::ResultsLayout
  ResultRuns* runs = nullptr;       // [kReplayedResults]
  abi::OpLimits limits;
  bool per_expert = false;
};

}  // namespace epd::kernels::cuda
