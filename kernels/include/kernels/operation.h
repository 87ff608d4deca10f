// One operation of one rank, as a kernel runs it. Plain data.
//
// Pointers are addresses on this device, or of a peer's memory that is mapped here.
#pragma once

#include "kernels/divisor.h"
#include "kernels/rows.h"
#include "proto/exchange.h"
#include "proto/results.h"

#include <cstddef>
#include <cstdint>

namespace epd::kernels {

inline constexpr std::uint32_t kMaxRanks = 32;  // reached over NVLink; a set of ranks is one 32-bit word
inline constexpr std::uint32_t kMaxThreads = 512;

// Why an operation failed. The comments name the fields of OpResult that are set.
enum class OpError : std::uint32_t {
  kNone = 0,
  kBadChoice,  // token, k, value
  kNoRoom,     // failed rank, expert, rows, room
  kMismatch,   // failed rank: the rank that announced another operation
  kAborted,    // failed rank: the lowest rank that was awaited
  kDeadline,   // the same
  // Only of calls, which then have not begun:
  kNoRouting,   // the routing record holds no routing
  kOldRouting,  // rows: the epoch of the routing. Ranks have left or joined since
  kOldMemory,   // rows, room: number and generation of memory that is not mapped (any more)
  kBadCall,     // the client may not ask for this (abi::bad_field)
  kLostCall,    // call `room` was never found; call `rows` lies in its place
  kNotBegun,    // its enabled epoch had ended before its main kernel began
};

// The result of an operation. `tag` is stored last, with release at system scope.
struct OpResult {
  std::uint64_t tag;
  std::uint64_t left;  // of a failed operation: its tag, stored when no CTA runs it any more
  OpError error;
  std::int32_t failed_rank;
  std::uint32_t token;
  std::uint32_t k;
  std::int32_t value;  // of an invalid choice, saturated to 32 bits
  std::int32_t expert;
  std::uint64_t rows;
  std::uint64_t room;
  std::uint32_t num_recv_rows;
  std::uint32_t num_dropped;  // selections of inactive ranks; of kAborted only when all are counted
  std::uint64_t ran_ns;  // time since the device began the operation; 0: unknown (failures, noops, hosts)
};

// One rank of the group. An inactive rank has `ready` null.
struct Peer {
  // The rank's exchange block for this operation (abi::ExchangeArenaLayout).
  abi::SignalLine* ready = nullptr;             // [R]
  abi::SignalLine* arrived = nullptr;           // [R]
  abi::OpAnnouncement* announcement = nullptr;  // [R]
  std::uint32_t* rank_counts = nullptr;         // [R,R]
  std::uint32_t* expert_counts = nullptr;       // [R,E]
  // The rank's inbox for this operation (abi::InboxLayout), if the group has inboxes.
  std::uint8_t* inbox = nullptr;
  DispatchTarget target;  // of a dispatch
  CombineSource source;   // of a combine
};

// The offsets in every rank's inbox (abi::InboxLayout). In groups with inboxes a row, or a partial sum,
// crosses NVLink once for each (token, rank).
struct Inbox {
  std::uint32_t max_tokens = 0;  // T; 0: the group has no inboxes
  std::uint32_t count = 1;       // inboxes of a rank, which operations use in turn
  std::uint32_t slot_bytes = 0;
  std::uint64_t begin_messages = 0;  // [R] begin words of 16 bytes, each on a line of 64 bytes
  std::uint64_t tags = 0;            // [R,T,abi::kInboxPieces] tags of slots
  // [R] plan messages of 1 + ceil(T/64) + R * ceil(E/R/4) words of 16 bytes, on lines of 64.
  std::uint64_t plans = 0;
  std::uint64_t requested = 0;  // [R,T,K] requested words of 16 bytes, on lines of 64
  std::uint64_t slots = 0;      // [R,T] slots of slot_bytes
};
constexpr Inbox inbox_of(const abi::GroupShape& s) {
  const abi::InboxLayout layout(s);
  if (layout.bytes == 0) return {};
  return {s.max_tokens,          s.depth,     static_cast<std::uint32_t>(layout.slot_bytes),
          layout.begin_messages, layout.tags, layout.plans,
          layout.requested,      layout.slots};
}

// The sizes and formats of a group.
struct Shape {
  std::uint32_t num_ranks = 0;
  std::uint32_t num_experts = 0;
  std::uint32_t topk = 0;
  std::uint32_t hidden = 0;
  bool per_expert = false;
  bool expert_blocks = false;
  bool index64 = false;
  bool packed_ranges = false;  // source_ranges are abi::RangeFormat::kPacked64
  std::uint32_t alignment = 1;
  std::uint64_t expert_capacity = 0;
  std::uint64_t recv_rows = 0;
  RowFormat format;
  // Set by configure(), for kernels that divide often.
  std::uint32_t experts_per_rank = 0;
  Divisor experts_per_rank_divisor;  // by experts_per_rank
  Divisor num_ranks_divisor;         // by num_ranks
  Divisor other_ranks_divisor;       // by num_ranks - 1
  Divisor count_words_divisor;       // by the words of a plan message about one rank's experts
};

// The parts of a CTA's shared memory before the stages: byte offsets, set by configure().
struct HeaderParts {
  std::uint32_t barriers = 0;  // [warps*stages]
  std::uint32_t targets = 0;   // [R] DispatchTarget
  // Place of the first row at each target: compact [CTA,R] for each CTA, else [E] for this CTA.
  std::uint32_t base = 0;
  std::uint32_t ends = 0;     // [E/R,2] own experts: end of the rows received, end of the block
  std::uint32_t headers = 0;  // combine: [warps*stages] StageHeader
  // Dispatch: Counters. Low-latency path: the rows of each source at own experts.
  std::uint32_t scratch = 0;
  // Low-latency dispatch: sets of tokens, one for each expert and two for each rank.
  std::uint32_t bits = 0;
  std::uint32_t counting_warps = 0;
};

// How CTAs divide an operation's work and their shared memory; set by configure().
struct alignas(16) WorkDivision {
  std::uint32_t ctas = 0;
  std::uint32_t threads = 0;
  std::uint32_t shared_bytes = 0;
  std::uint32_t header_bytes = 0;  // bytes before the stages
  HeaderParts header;
  std::uint32_t warps = 0;   // copy warps
  std::uint32_t stages = 2;  // stages of each copy warp
  std::uint32_t stage_bytes = 0;
  std::uint32_t chunk_bytes = 0;  // combine: bytes of a row's piece
  // Low-latency path, as in Shape: by the CTAs that copy rows, by the stages, by the pieces of a sum.
  Divisor senders_divisor;
  Divisor stages_divisor;
  Divisor pieces_divisor;
  // Low-latency dispatch.
  abi::InboxRow inbox_row;
  std::uint32_t inbox_pitch = 0;  // bytes between two rows in a stage
  abi::PlanWords plan;
  std::uint32_t set_words = 0;  // words of a set of tokens
  std::uint32_t row_steps = 0;  // steps in which a row is cast
  Divisor row_steps_divisor;
};

// A routing in this device's own memory, for combine and for dispatches that reuse it.
struct Routing {
  std::int32_t* topk = nullptr;  // [n,K] validated copy; -1 for choices of inactive ranks
  // [n,K] The row at the choice's rank if the choice sends it, else -1. During the dispatch also -2 - i, for
  // the i-th row of a CTA.
  std::int32_t* rows = nullptr;
  std::int32_t* placement = nullptr;  // see abi::placement_words, kernels::Placement
  // A dispatch that makes the routing stores this when all ranks are done, the handle last. Null: not wanted.
  abi::RoutingRecord* head = nullptr;
  // The record of the dispatch before, for an operation that uses its routing. Its dropped selections count
  // again.
  const abi::RoutingRecord* record = nullptr;
  std::uint64_t handle = 0;
  std::uint64_t epoch = 0;
};

// Where a dispatch delivers its counts. Null: not wanted.
struct CountOutputs {
  std::int32_t* rank_offsets = nullptr;
  std::int32_t* expert_counts = nullptr;
  std::int32_t* expert_offsets = nullptr;
  std::int32_t* source_ranges = nullptr;
  // Host memory, for a polling CPU: the placement's words. Each word has `mark` in its upper half, so one
  // access shows whether it is there.
  std::uint64_t* host_words = nullptr;
  // Becomes `mark` when this rank's rows have left. The kernel does not read x any more; rows of other ranks
  // may still arrive.
  std::uint32_t* host_sent = nullptr;
  std::uint32_t mark = 0;
};

// Words in the rank's user arena by which the client's streams hear of the end of a call. May be null.
struct Signal {
  std::uint32_t* done = nullptr;  // becomes `value`, after the others, with or without an error
  std::uint32_t value = 0;
  std::uint32_t* flag = nullptr;    // becomes 1
  std::uint32_t* failed = nullptr;  // incremented if the operation has failed
};

// Where the result of a call goes, beside Operation::result. Host memory.
struct ResultOut {
  abi::CallResult* to = nullptr;  // null: nowhere
  std::uint32_t number = 0;       // number of this writing
};

// Everything about one operation of one rank, except the other ranks.
struct alignas(64) Operation {
  Shape shape;
  WorkDivision division;
  std::uint32_t rank = 0;
  std::uint32_t num_tokens = 0;
  std::uint64_t tag = 0;
  abi::OpAnnouncement announcement = {};  // has the same tag and num_tokens
  bool cached = false;                    // dispatch: `routing` exists already
  bool mark_unused = false;               // also mark the rows after those received
  bool zero_padding = false;              // also zero the rows that are marked
  bool sum_weights = false;               // combine: out_weights are summed over ranks (CombineArgs)
  Routing routing;
  CountOutputs counts;
  Inbox inbox;
  // Dispatch.
  const void* topk_idx = nullptr;       // [n,K], the client's memory; it may change at any time
  const float* topk_weights = nullptr;  // [n,K] or null; a combine with null is unweighted
  const void* x = nullptr;
  const void* x_scales = nullptr;
  // Combine.
  const std::uint16_t* bias[2] = {};
  std::uint16_t* out = nullptr;
  float* out_weights = nullptr;

  Signal signal;
  void* workspace = nullptr;  // zeroed once
  std::uint64_t workspace_bytes = 0;
  const std::uint32_t* abort = nullptr;  // nonzero: the operation must end; may be null
  std::uint64_t timeout_ns = 0;          // for the operation on the device
  OpResult* result = nullptr;
  ResultOut out_result;
  // [R,kMaxMapped] The memories that ranks have mapped, as this device reaches them; null: operations have no
  // places.
  const abi::MappedMemory* memories = nullptr;
};

enum class Kind { kDispatch, kCombine };

namespace cuda {

// An operation as kernels have it, in shared memory. As a kernel's parameter it would cost a microsecond for
// each line of constant memory that is touched, one after the other.
struct Operation : kernels::Operation {
  Peer peers[kMaxRanks];
};

}  // namespace cuda

}  // namespace epd::kernels
