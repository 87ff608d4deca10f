// The words by which ranks tell each other about operations, and their layout in exchange arenas: `depth`
// blocks, each for one operation at a time, and the routings that combine needs. Engines and their kernels
// only. Computed here and nowhere else. Plain data, also for device code.
#pragma once

#include "proto/row_place.h"
#include "proto/shape.h"

#include <cstddef>
#include <cstdint>

namespace epd::abi {

inline constexpr std::uint64_t kRegionAlign = 4096;

constexpr std::uint64_t align_up(std::uint64_t value, std::uint64_t alignment) {
  return (value + alignment - 1) / alignment * alignment;
}

// One signal word on a cache line of its own; holds an operation tag (see op_tag) that only grows. Of
// `called` the last one may be taken back.
struct alignas(64) SignalLine {
  std::uint64_t tag;
  std::uint64_t at_ns;    // when it was given, CLOCK_MONOTONIC: stored before the tag, by hosts alone
  std::uint64_t waiting;  // of `called`: the last operation that waits until all ranks have called it
};
static_assert(sizeof(SignalLine) == 64);

// An operation's place in the group's history. Tags grow with the operation and with the epoch,
// so "the peer has got this far" is one comparison, and tags of an abandoned epoch never match.
//
// Operations are numbered for as long as the group lives. Tags, blocks and routing records count them from
// the epoch's base, so that an epoch may begin at any number: the base is the last multiple of kTagRound
// that is not above the epoch's first operation. An engine has the group break when the count comes to
// kTagRenewal, and the next epoch has the next base. So a count never needs more than kTagIndexBits.
inline constexpr std::uint32_t kTagIndexBits = 40;
inline constexpr std::uint64_t kTagRound = std::uint64_t{1} << (kTagIndexBits - 1);
// Ranks are no further apart than what they have in flight: all have passed kTagRound by then.
inline constexpr std::uint64_t kTagRenewal = kTagRound + 1024;
constexpr std::uint64_t tag_base(std::uint64_t first_index_of_epoch) {
  return first_index_of_epoch / kTagRound * kTagRound;
}
// `op_index`: counted from the epoch's base.
constexpr std::uint64_t op_tag(std::uint64_t epoch, std::uint64_t op_index) {
  return (epoch << kTagIndexBits) | ((op_index + 1) & ((std::uint64_t{1} << kTagIndexBits) - 1));
}
constexpr std::uint64_t epoch_of_tag(std::uint64_t tag) {
  return tag >> kTagIndexBits;
}
constexpr std::uint64_t index_of_tag(std::uint64_t tag) {
  return (tag & ((std::uint64_t{1} << kTagIndexBits) - 1)) - 1;
}

// Whether two counts are of one operation. Either count's base may be another epoch's.
constexpr bool same_index(std::uint64_t a, std::uint64_t b) {
  return (a ^ b) % kTagRound == 0;
}
// A rank that came after a dispatch announces this as its routing's number if it does not know the number. It
// is the number of a record without a routing.
inline constexpr std::uint64_t kUnknownRouting = (std::uint64_t{1} << kTagIndexBits) - 1;
// Whether two announcements name the same routing (0: a new one), by the dispatch's tag. A rank that came
// after the dispatch does not know its epoch and says 0, nor from which base that counts its operations.
constexpr bool same_routing(std::uint64_t a, std::uint64_t b) {
  if (a == b) return true;
  if (a == kUnknownRouting || b == kUnknownRouting) return a != 0 && b != 0;
  const bool came_later = a != 0 && b != 0 && (epoch_of_tag(a) == 0 || epoch_of_tag(b) == 0);
  return came_later && same_index(a, b);
}
// Whether `a` is of the operation of `b` or of a later one that was in flight beside it.
constexpr bool not_before(std::uint64_t a, std::uint64_t b) {
  return (a - b) % kTagRound < std::uint64_t{1} << 20;
}
// Tags end below 2^63, which kernels' own tags have. No epoch comes after this one.
inline constexpr std::uint64_t kLastEpoch = (std::uint64_t{1} << (63 - kTagIndexBits)) - 1;

// A source announces this about its operation before any row moves; compared by every peer.
struct OpAnnouncement {
  std::uint64_t tag;
  std::uint32_t op;  // abi::Op
  std::uint16_t slot;
  std::uint16_t format;      // of a dispatch's rows (GroupShape::format); else 0
  std::uint64_t routing;     // op_tag of the dispatch whose routing is used; 0 = a new one
  std::uint32_t num_tokens;  // n of the source (not compared)
  std::uint16_t flags;       // (not compared)
  std::uint16_t route;       // the source's routing record, made or used (not compared)
  RowPlace place;            // of the rows that others store or load: its recv_x or y (not compared)
};
static_assert(sizeof(OpAnnouncement) == 40 && kMaxDepth + kMaxHandles <= 1u << 16);

// A dispatch's routing, kept by the rank's own engine for combine and for dispatches that reuse it. It
// lies in the arena so that it outlives the engine. Record r < depth is that of buffer slot r's last
// dispatch, the others are kept until a dispatch names them again.
struct RoutingRecord {
  std::uint64_t handle;  // op_index (from its epoch's base) + 1 of the dispatch; 0 = none. Stored last
  std::uint64_t epoch;   // of the group at that dispatch
  std::uint32_t num_tokens;
  std::uint32_t num_recv_rows;
  std::uint32_t num_dropped;  // selections of lost ranks' experts; they are -1 in topk
  std::uint32_t reserved;
};
static_assert(sizeof(RoutingRecord) == 32);

// The places that a dispatch decided, as one array of int32 (kernels::Placement has the same sections):
//   base[R] (compact) or base[E]   where this rank's rows begin at each rank, or at each expert
//   rank_offsets[R+1], expert_counts[E/R], then if per_expert: expert_offsets[E/R+1], source_ranges[E/R,R,2]
constexpr std::uint64_t placement_words(std::uint64_t num_ranks, std::uint64_t num_experts, bool per_expert) {
  const std::uint64_t experts = num_experts / num_ranks;
  if (!per_expert) return num_ranks + (num_ranks + 1) + experts;
  return num_experts + (num_ranks + 1) + experts + (experts + 1) + experts * num_ranks * 2;
}
constexpr std::uint64_t placement_words(const GroupShape& s) {
  return placement_words(s.num_ranks, s.num_experts, s.per_expert());
}

// Where rows lie on their way while few tokens travel and each would have several rows at a rank: once for a
// (token, rank), in place of once for every row. Written by peers:
//   hello[s]          source s has begun the operation with so many tokens: it may be written to
//   plans[s][]        dispatch: what source s sends, in words of 16 bytes that carry the tag with them: its
//                     number of tokens; the set of those that come here, 64 to a word; for each rank how many
//                     rows each of its experts gets, four to a word
//   asked[s][t][k]    combine: for each choice of token t a word (with the tag) with the row that it takes,
//                     and its weight
//   landed[s][t][p]   tag. Dispatch: token t of source s lies in its slot (p = 0). Combine: rank s has stored
//                     piece p of its partial sum for this rank's token t
//   slots[s][t]       dispatch: the row, its scales, a weight and a word for each choice (expert, number of
//                     the row among those of its source there). Combine: the partial sum
inline constexpr std::uint32_t kInboxRanks = 32;
inline constexpr std::uint64_t kInboxTokens = 512;
inline constexpr std::uint64_t kInboxBytes = std::uint64_t{256} << 20;
inline constexpr std::uint32_t kInboxExperts = 2048;                   // kernels have in shared memory
inline constexpr std::uint64_t kInboxCounts = std::uint64_t{1} << 13;  // a count for each (expert, rank)
inline constexpr std::uint64_t kInboxBits = std::uint64_t{1} << 18;    // and a bit for each (expert, token)
inline constexpr std::uint32_t kInboxPieces = 16;                      // of a partial sum, at most

// A plan. Word 0 has the number of tokens. Then:
struct PlanWords {
  std::uint32_t set_words = 0;    // the tokens that come to the rank, 64 to a word
  std::uint32_t count_words = 0;  // for the experts of each rank: rows, four experts to a word
  std::uint32_t end = 0;

  constexpr PlanWords() = default;
  constexpr PlanWords(std::uint32_t num_ranks, std::uint32_t num_experts, std::uint32_t max_tokens)
      : set_words((max_tokens + 63) / 64),
        count_words((num_experts / num_ranks + 3) / 4),
        end(counts_of(num_ranks)) {}
  constexpr std::uint32_t counts_of(std::uint32_t rank) const { return 1 + set_words + rank * count_words; }
};

// A slot of a dispatch, byte offsets: row and scales; for each choice a weight, and which row it is.
struct InboxRow {
  std::uint32_t weights = 0;
  std::uint32_t choices = 0;
  std::uint32_t bytes = 0;

  constexpr InboxRow() = default;
  constexpr InboxRow(std::uint32_t row_bytes, std::uint32_t scale_bytes, std::uint32_t topk)
      : weights((row_bytes + scale_bytes + 15) / 16 * 16),
        choices(weights + (topk + 3) / 4 * 16),
        bytes(choices + (topk + 3) / 4 * 16) {}
};

struct InboxLayout {
  std::uint64_t begin_messages = 0;
  std::uint64_t tags = 0;
  std::uint64_t plans = 0;
  std::uint64_t requested = 0;
  std::uint64_t slots = 0;
  std::uint64_t slot_bytes = 0;
  std::uint64_t bytes = 0;  // 0: there is none

  constexpr explicit InboxLayout(const GroupShape& s) {
    const std::uint64_t bits = s.num_experts * align_up(s.max_tokens, 32);
    const bool small = s.max_tokens <= kInboxTokens && s.num_ranks <= kInboxRanks &&
                       s.num_experts <= kInboxExperts && bits <= kInboxBits &&
                       std::uint64_t{s.num_experts} * s.num_ranks <= kInboxCounts;
    if (!s.per_expert() || s.topk < 2 || !small) return;
    const std::uint64_t tokens = std::uint64_t{s.num_ranks} * s.max_tokens;
    slot_bytes = s.most_of_formats(
        [](const GroupShape& f) { return InboxRow(f.row_bytes(), f.scale_bytes(), f.topk).bytes; });
    if (slot_bytes < s.hidden * 2) slot_bytes = s.hidden * 2;
    if (tokens * slot_bytes > kInboxBytes) return;
    tags = begin_messages + std::uint64_t{s.num_ranks} * 64;
    plans = align_up(tags + tokens * kInboxPieces * 8, 64);
    const PlanWords plan(s.num_ranks, s.num_experts, s.max_tokens);
    requested = plans + s.num_ranks * align_up(std::uint64_t{plan.end} * 16, 64);
    slots = align_up(requested + tokens * s.topk * 16, 128);
    bytes = align_up(slots + tokens * slot_bytes, kRegionAlign);
  }
};

// Block b of the exchange arena of rank d serves the operations numbered b, b + depth, b + 2*depth, ...
// It is written by the source ranks' engines:
//   ready[s]          source s has announced (op, counts): and its own slot may be written
//   arrived[s]        source s is done with d: its rows have landed (dispatch), or it has pulled
//                     what it needs (combine)
//   called[s]         source s, whose operations are calls, has called the operation. A rank that shares a
//   GPU
//                     with others, or defers receiving, tells this before it begins (GroupView::together)
//   announcement[s]   OpAnnouncement of source s
//   rank_counts[s][r] rows that s sends to r (the whole matrix: d needs its column prefix everywhere).
//                     One per (token, rank) whatever the layout
//   expert_counts[s][e] compact: selections of s for the experts of d, other columns are not written;
//                     else: rows that s sends to each expert
// A dispatch that reuses a routing announces no counts.
// After the blocks and the routing records, one inbox for each block, if few tokens may travel: see
// InboxLayout. Only kernels of CUDA devices use it.
// Beside the blocks, num_routes() routing records, written by d's own engine. On CUDA devices each has two
// halves, since a dispatch overwrites before all ranks have come to it: the older is overwritten. Each half:
//   record, placement (placement_words), topk[T,K] (int32, validated), and on CUDA devices
//   rows[T,K] (int32: the row at the choice's rank if the choice sends it, else -1)
struct ExchangeArenaLayout {
  std::uint64_t ready = 0;
  std::uint64_t arrived = 0;
  std::uint64_t called = 0;
  std::uint64_t announcement = 0;
  std::uint64_t rank_counts = 0;
  std::uint64_t expert_counts = 0;
  std::uint64_t block_bytes = 0;
  std::uint64_t routing = 0;    // of record 0
  std::uint64_t placement = 0;  // within a half
  std::uint64_t topk = 0;       // likewise
  std::uint64_t rows = 0;       // likewise
  std::uint64_t half_bytes = 0;
  std::uint64_t routing_bytes = 0;  // of a record
  std::uint64_t inboxes = 0;        // of block 0
  std::uint64_t inbox_bytes = 0;    // of each; 0: there are none
  std::uint64_t generation = 0;     // a line: how many engines have served the rank, of CUDA devices
  std::uint64_t total_bytes = 0;

  constexpr explicit ExchangeArenaLayout(const GroupShape& s) {
    const std::uint64_t ranks = s.num_ranks;
    arrived = ready + ranks * sizeof(SignalLine);
    called = arrived + ranks * sizeof(SignalLine);
    announcement = called + ranks * sizeof(SignalLine);
    rank_counts = align_up(announcement + ranks * sizeof(OpAnnouncement), 64);
    expert_counts = align_up(rank_counts + ranks * ranks * 4, 64);
    block_bytes = align_up(expert_counts + ranks * s.num_experts * 4, kRegionAlign);
    routing = block_bytes * s.depth;
    placement = align_up(sizeof(RoutingRecord), 64);
    topk = align_up(placement + placement_words(s) * 4, 64);
    rows = align_up(topk + std::uint64_t{s.max_tokens} * s.topk * 4, 64);
    half_bytes = align_up(rows + std::uint64_t{s.max_tokens} * s.topk * 4, kRegionAlign);
    routing_bytes = half_bytes * 2;
    inboxes = routing + routing_bytes * s.num_routes();
    inbox_bytes = InboxLayout(s).bytes;
    generation = inboxes + inbox_bytes * s.depth;
    total_bytes = generation + sizeof(SignalLine);
  }
  constexpr std::uint64_t block(std::uint64_t op_index, std::uint32_t depth) const {
    return block_bytes * (op_index % depth);
  }
  constexpr std::uint64_t routing_of(std::uint32_t route) const { return routing + routing_bytes * route; }
  constexpr std::uint64_t inbox(std::uint64_t op_index, std::uint32_t depth) const {
    return inboxes + inbox_bytes * (op_index % depth);
  }
};

}  // namespace epd::abi
