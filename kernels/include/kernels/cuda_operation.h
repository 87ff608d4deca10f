// One operation of one rank, as a kernel runs it. Plain data.
//
// Pointers are addresses of this device, or of a peer's memory that is mapped here.
#pragma once

#include "kernels/divisor.h"
#include "kernels/operations.h"
#include "proto/exchange.h"
#include "proto/results.h"

#include <cstddef>
#include <cstdint>

namespace epd::kernels::cuda {

inline constexpr std::uint32_t kMaxRanks = 32;  // reached over NVLink; a set of ranks is one word
inline constexpr std::uint32_t kMaxThreads = 512;

enum class OpError : std::uint32_t {
  kNone = 0,
  kBadChoice,  // token, k, value
  kNoRoom,     // culprit, expert, rows, room
  kMismatch,   // culprit announced something else
  kAborted,    // culprit: the lowest rank that was waited for
  kDeadline,   // likewise
  // Of calls alone, and without having begun:
  kNoRouting,    // its record holds none
  kOldRouting,   // rows: the routing's epoch. Ranks have come or gone since
  kBadCall,      // the client must not ask for that (abi::bad_field says what)
  kLostCommand,  // the call that lies where call `room` should be, which later ones have replaced
};

// Where an operation ended. `tag` is stored last, with release at system scope.
struct OpResult {
  std::uint64_t tag;
  std::uint64_t left;  // the same tag, of one that failed, when no CTA runs it any more: stored after `tag`
  OpError error;
  std::int32_t culprit;
  std::uint32_t token;
  std::uint32_t k;
  std::int32_t value;  // of a bad choice, saturated to 32 bits
  std::int32_t expert;
  std::uint64_t rows;
  std::uint64_t room;
  std::uint32_t num_recv_rows;
  std::uint32_t num_dropped;  // selections of ranks that are not there; kAborted too, once all are counted
  std::uint64_t ran_ns;  // of one that ended well, from when the device began it. 0: not known (noops, hosts)
};

// One rank of the group. `ready` is null for a rank that is not there.
struct Peer {
  // Its exchange block of this operation (abi::ExchangeArenaLayout).
  abi::SignalLine* ready = nullptr;             // [R]
  abi::SignalLine* arrived = nullptr;           // [R]
  abi::OpAnnouncement* announcement = nullptr;  // [R]
  std::uint32_t* rank_counts = nullptr;         // [R,R]
  std::uint32_t* expert_counts = nullptr;       // [R,E]
  std::uint8_t* landing = nullptr;  // its abi::LandingLayout of this operation, if the group has one
  DispatchTarget target;            // dispatch
  CombineSource source;             // combine
};

// abi::LandingLayout: where the parts of every rank's landing begin. Groups with one send a row (or a partial
// sum) once for a (token, rank).
struct Landing {
  std::uint32_t max_tokens = 0;  // T; 0: there is none
  std::uint32_t count = 1;       // of a rank; operations take turns at them
  std::uint32_t slot_bytes = 0;
  std::uint64_t hello = 0;   // [R] words of 16 bytes on 64-byte lines
  std::uint64_t landed = 0;  // [R,T,abi::kLandingPieces] tags
  std::uint64_t plans = 0;   // [R] of 1 + ceil(T/64) + R * ceil(E/R/4) words of 16 bytes, on 64-byte lines
  std::uint64_t asked = 0;   // [R,T,K] words of 16 bytes, on 64-byte lines
  std::uint64_t slots = 0;   // [R,T] of slot_bytes
};
constexpr Landing landing_of(const abi::GroupShape& s) {
  const abi::LandingLayout layout(s);
  if (layout.bytes == 0) return {};
  return {s.max_tokens, s.depth,       static_cast<std::uint32_t>(layout.slot_bytes),
          layout.hello, layout.landed, layout.plans,
          layout.asked, layout.slots};
}

struct Shape {
  std::uint32_t num_ranks = 0;
  std::uint32_t num_experts = 0;
  std::uint32_t topk = 0;
  std::uint32_t hidden = 0;
  bool per_expert = false;
  bool expert_blocks = false;
  bool index64 = false;
  std::uint32_t alignment = 1;
  std::uint64_t expert_capacity = 0;
  std::uint64_t recv_rows = 0;
  RowFormat format;
  // By configure(), for kernels that divide in many places.
  std::uint32_t experts_per_rank = 0;
  Divisor experts_per_rank_divisor;  // of experts_per_rank
  Divisor topk_divisor;
  Divisor num_ranks_divisor;    // of num_ranks
  Divisor other_ranks_divisor;  // of num_ranks - 1
  Divisor count_words_divisor;  // of the words of a plan that are about one rank's experts
};

// Byte offsets of the parts of a CTA's shared memory before the stages; from configure().
struct HeaderParts {
  std::uint32_t barriers = 0;  // [warps*stages]
  std::uint32_t targets = 0;   // [R] pointers of DispatchTarget
  std::uint32_t base = 0;  // compact [CTA,R], else [E]: where the first row for each target lies, of each CTA
                           // or of this one
  std::uint32_t ends = 0;  // [E/R,2] own experts: end of the rows received, end of the block
  std::uint32_t headers = 0;  // [warps*stages] StageHeader, combine
  std::uint32_t scratch = 0;  // dispatch: Counters; through landings rows of each source at own experts
  std::uint32_t bits = 0;  // dispatch through landings: sets of tokens, of each expert and twice of each rank
  std::uint32_t counting_warps = 0;
};

// How a CTA divides its shared memory; from configure().
struct alignas(16) Movers {
  std::uint32_t ctas = 0;
  std::uint32_t threads = 0;
  std::uint32_t shared_bytes = 0;
  std::uint32_t header_bytes = 0;  // before the stages
  HeaderParts header;
  std::uint32_t warps = 0;   // that move rows
  std::uint32_t stages = 2;  // of each
  std::uint32_t stage_bytes = 0;
  std::uint32_t chunk_bytes = 0;  // combine: of a row, at a time
  // Through landings, as in Shape: of the CTAs that move rows, of the stages, of the pieces of a sum.
  Divisor senders_divisor;
  Divisor stages_divisor;
  Divisor pieces_divisor;
  // Of a dispatch through landings.
  abi::LandedRow landed;
  std::uint32_t landed_pitch = 0;  // of rows in a stage
  abi::PlanWords plan;
  std::uint32_t set_words = 0;  // of a set of tokens
  std::uint32_t row_steps = 0;  // of a cast
  Divisor row_steps_divisor;
};

// What a routing leaves for combine and for dispatches that reuse it: this device's own memory.
struct Routing {
  std::int32_t* topk = nullptr;  // [n,K] validated copy; -1 for ranks that are not there
  std::int32_t* rows = nullptr;  // [n,K] row at the choice's rank if the choice sends it, else -1 (while the
                                 // dispatch runs also -2 - i: the i-th row of a CTA)
  std::int32_t* placement = nullptr;  // abi::placement_words, kernels::Placement
  // A dispatch that makes the routing stores this when every rank is done, the handle last. Null: not wanted.
  abi::RoutingRecord* head = nullptr;
  // Of a call that uses the routing: what its dispatch has stored, which it counts on from.
  const abi::RoutingRecord* record = nullptr;
  std::uint64_t handle = 0;
  std::uint64_t epoch = 0;
};

// Where a dispatch tells what was received. Null: not wanted.
struct CountOutputs {
  std::int32_t* rank_offsets = nullptr;
  std::int32_t* expert_counts = nullptr;
  std::int32_t* expert_offsets = nullptr;
  std::int32_t* source_ranges = nullptr;
  // For a CPU that polls, in host memory: the placement's words, each with `mark` in its upper half, so that
  // a word tells by itself whether it is there.
  std::uint64_t* host_words = nullptr;
  // Gets `mark` when this rank's rows have left, before those of others have come: x is read no more.
  std::uint32_t* host_sent = nullptr;
  std::uint32_t mark = 0;
};

// Words by which operations and streams of the client wait for each other; in the rank's user arena. Compared
// cyclically.
struct Signal {
  std::uint32_t* ready = nullptr;  // the operation begins when this has got to `value`. Null: at once
  std::uint32_t* done = nullptr;   // gets `value` when the operation has ended, well or not. May be null
  std::uint32_t value = 0;
  // Of commands, stored before `done`; may be null.
  std::uint32_t* flag = nullptr;    // gets 1
  std::uint32_t* failed = nullptr;  // one is added if it ended badly
};

// Where the result of a call goes, beside Operation::result. Host memory.
struct ResultOut {
  abi::CallResult* to = nullptr;  // null: nowhere
  std::uint32_t number = 0;       // of the writing
};

// Everything about one operation of one rank. It lies in device memory until the operation
// has ended; each CTA copies it first. (As a kernel's parameter it would cost a microsecond for each line
// of constant memory that is touched, one after the other.)
struct alignas(64) Operation {
  Shape shape;
  Movers movers;
  std::uint32_t rank = 0;
  std::uint32_t num_tokens = 0;
  std::uint64_t tag = 0;
  abi::OpAnnouncement announcement = {};  // with the same tag and num_tokens
  bool cached = false;                    // dispatch: `routing` is already made
  bool mark_unused = false;               // rows above what was received are marked too
  bool zero_padding = false;              // and rows so marked are zeroed
  Routing routing;
  CountOutputs counts;
  Landing landing;
  // dispatch
  const void* topk_idx = nullptr;       // [n,K], the client's: read once
  const float* topk_weights = nullptr;  // [n,K] or null; combine: null = unweighted
  const void* x = nullptr;
  const void* x_scales = nullptr;
  // combine
  const std::uint16_t* bias[2] = {};
  std::uint16_t* out = nullptr;
  float* out_weights = nullptr;

  Signal signal;
  void* workspace = nullptr;  // zeroed once
  std::uint64_t workspace_bytes = 0;
  const std::uint32_t* abort = nullptr;  // nonzero: leave. May be null
  std::uint64_t timeout_ns = 0;          // of the operation on the device
  OpResult* result = nullptr;
  ResultOut out_result;
  Peer peers[kMaxRanks];
};

enum class Kind { kDispatch, kCombine, kNoop };

}  // namespace epd::kernels::cuda
