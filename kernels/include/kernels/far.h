// Rows for other nodes, on the host: the records of far messages (proto/far.h). A rank packs its rows for the
// gateway at a node, which forwards them to the ranks there. For combine the owner of the tokens asks the
// gateway, which adds up the rows of its node's ranks, and the owner merges these sums with its own node's
// rows. Results are those of dispatch_rows and combine_rows, bit for bit.
//
// Records that come from a network may lie at any alignment. Every value of a record is judged before it is
// used. The memory must not change in the meantime.
#pragma once

#include "kernels/routing.h"
#include "kernels/rows.h"
#include "proto/far.h"

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace epd::kernels {

// The part that is the same for all records of a group.
struct FarShape {
  RowFormat format;  // of dispatched rows
  std::uint32_t num_ranks = 0;
  std::uint32_t experts_per_rank = 0;
  std::uint32_t topk = 0;    // at most abi::kMaxTopk
  std::uint32_t hidden = 0;  // of combined rows
  bool per_expert = false;
  bool index64 = false;  // type of recv_topk_idx
  bool crc = false;      // records end with their CRCs: made with them, checked before they are used

  std::uint32_t num_experts() const { return num_ranks * experts_per_rank; }
  std::uint32_t num_targets() const { return per_expert ? num_experts() : num_ranks; }
  std::uint32_t rank_of(std::uint32_t target) const {
    return per_expert ? target / experts_per_rank : target;
  }
  // Bytes of a record.
  std::size_t row_stride() const {
    return abi::far_row_bytes(std::uint64_t{format.row_bytes} + format.scale_bytes, topk);
  }
  std::size_t ask_stride() const { return abi::far_ask_bytes(topk); }
  std::size_t sum_stride(bool return_weights) const {
    return abi::far_sum_bytes(std::uint64_t{hidden} * 2, return_weights ? topk : 0);
  }
};

// The node of each rank, as one rank sees it in one operation: [R], below the number of far nodes; kNotFar:
// the rank is on the same node, or masked, or came after the dispatch whose routing a combine uses.
using FarNodes = std::span<const std::uint32_t>;
inline constexpr std::uint32_t kNotFar = 0xffffffff;

// ---- what is announced

// Lists the tokens that have rows on each far node, ascending, in steps. `plan`, `nodes` and `lists` must
// stay valid until it is done.
class FarLister {
 public:
  // `lists`: one for each far node. Its memory is reused.
  FarLister(const FarShape& shape, const RoutingPlan& plan, FarNodes nodes,
            std::span<PlanArray<std::uint32_t>> lists);

  // Takes that many more tokens. Returns true when it is done.
  bool advance(std::uint32_t tokens);

 private:
  const RoutingPlan& plan_;
  const std::span<PlanArray<std::uint32_t>> lists_;
  std::vector<std::uint32_t> node_of_target_;
  std::uint32_t token_ = 0;
};

// The counts of some ranks as they are announced, uint32: rank_counts of each, then expert_counts of each
// one's experts.
inline std::size_t num_far_counts(const FarShape& shape, std::size_t num_ranks) {
  return num_ranks * (1 + std::size_t{shape.experts_per_rank});
}
void gather_far_counts(const FarShape& shape, const RoutingPlan& plan, std::span<const std::uint32_t> ranks,
                       std::byte* counts);

// ---- judging

// The field of a record that is bad.
enum class FarField : std::uint32_t {
  kNone = 0,
  kToken,       // row, ask: not below num_tokens; sum: not the one that comes next
  kExpert,      // row: neither -1 nor of an active rank of this node; or there is none
  kPosition,    // row, ask: not below the count; layout compact: two at a rank
  kNumEntries,  // ask: not 1 .. K
  kTarget,      // ask: not of a rank of this node that has rows, or its rank does not ascend
  kChoices,     // ask: not below 2^K
  kDomain,      // sum: not the one that comes next
  kCount,       // announced counts: more rows than tokens, or more choices than they have
  kCrc,         // the record is not as it was made
};
inline constexpr std::uint32_t kNumFarFields = 10;
const char* far_field_name(FarField field);

struct FarFault {
  FarField field = FarField::kNone;
  std::uint32_t record = 0;
  std::uint32_t index = 0;  // choice or entry of the record; announced counts: which
  std::int64_t value = 0;

  explicit operator bool() const { return field != FarField::kNone; }
};

// Judges the counts that a source with so many tokens announces for `ranks`, and stores them into its rows
// ([R] and [E]) of the count matrices. After a fault nothing has been stored.
FarFault scatter_far_counts(const FarShape& shape, const std::byte* counts, std::uint32_t num_tokens,
                            std::span<const std::uint32_t> ranks, std::uint32_t* rank_counts,
                            std::uint32_t* expert_counts);

// ---- dispatch

struct FarPackArgs {
  FarShape shape;
  const RoutingPlan* plan = nullptr;
  FarNodes nodes;
  std::uint32_t node = 0;                 // for which records are made
  std::span<const std::uint32_t> tokens;  // of the node (FarLister)
  const void* x = nullptr;                // [n,x_bytes]
  const void* x_scales = nullptr;         // [n,scale_bytes], if rows come with scales
  const float* topk_weights = nullptr;    // [n,K], or null: zeros are delivered
};

// Makes the records of tokens [begin, end) of the list, from `records` on, which is aligned to
// abi::kFarRecordAlign. A record has
//   compact         choices[k] for each k: its expert if it is on that node, its position among this rank's
//                   rows at the expert's rank, its weight as given
//   packed, expert  choices[i] for each row there, in plan order: its expert, its position among this rank's
//                   rows at the expert, the sum of the weights that name it
// All other choices have expert -1.
void pack_rows(const FarPackArgs& args, std::uint32_t begin, std::uint32_t end, std::byte* records);

struct FarForwardArgs {
  FarShape shape;
  std::span<const DispatchTarget> targets;  // [R] recv_x null: not an active rank of this node
  const SourcePlaces* places = nullptr;     // of the source at the ranks of this node
  std::uint32_t num_tokens = 0;             // of the source, as announced
  std::size_t volume = 0;  // bytes of all that the operation writes here: decides about stores
};

// Writes the rows of records [begin, end) to all their places on this node. Ranges may run in parallel. All
// stores are fenced. After a fault the records before the bad one have been written, and nothing of it and of
// those after it.
FarFault forward_rows(const FarForwardArgs& args, const std::byte* records, std::uint32_t begin,
                      std::uint32_t end);

// ---- combine

struct FarAskArgs {
  FarShape shape;
  const RoutingPlan* plan = nullptr;  // of the dispatch
  FarNodes nodes;
  std::uint32_t node = 0;
  std::span<const std::uint32_t> tokens;  // of the node (FarLister)
  const float* topk_weights = nullptr;    // [n,K], or null: unweighted
};

// Makes the asks for tokens [begin, end) of the list, from `asks` on: all entries of the token that go to
// that node.
void make_asks(const FarAskArgs& args, std::uint32_t begin, std::uint32_t end, std::byte* asks);

struct FarSumArgs {
  FarShape shape;
  std::span<const CombineSource> sources;  // [R] y null: not on this node, or it has no rows of the routing
  const SourcePlaces* places = nullptr;    // of the owner's rows at the ranks of this node
  std::uint32_t num_tokens = 0;            // of the owner, as announced
  std::uint32_t sum_ranks = 0;             // as in CombineArgs
  // [domains] not 0: all its active ranks are on one node. Empty: no domain is whole.
  std::span<const std::uint8_t> whole_domains;
  bool weighted = false;
  bool return_weights = false;
  bool sum_weights = false;  // as in CombineArgs
};

// The most records that one ask of so many ranks on this node may lead to.
inline std::uint32_t most_far_sums(const FarShape& shape, std::uint32_t num_ranks) {
  return num_ranks < shape.topk ? num_ranks : shape.topk;
}

struct FarSummed {
  FarFault fault;
  std::uint32_t asks = 0;     // served: from `begin` on
  std::uint32_t records = 0;  // made
};

// Serves asks [begin, end) in order, as many as lead to at most `room` records. `sums`: aligned to
// abi::kFarRecordAlign. An ask leads to one record for each domain that is whole and has rows of the token:
// their sum, rounded to bf16. A domain that is not whole gives one record for each of its ranks here that has
// rows of the token: compact the row, packed and expert the rank's partial sum rounded to bf16. Domains and
// ranks ascend. weights[k]: y_weights of the row that carried choice k, if it is one of the record's; else
// +0.0. With sum_weights, compact: the sum of the k-th y_weights of the record's rows.
FarSummed sum_rows_for(const FarSumArgs& args, const std::byte* asks, std::uint32_t begin, std::uint32_t end,
                       std::byte* sums, std::uint32_t room);

// Consecutive records in memory.
struct FarBatch {
  const std::byte* records = nullptr;
  std::uint32_t num_records = 0;
};

// The sums of one node for one rank, in the order in which that node makes them: batches without a gap, as
// far as they have come, and the next record that has not been used.
struct FarStream {
  std::span<const FarBatch> batches;
  std::uint32_t batch = 0;
  std::uint32_t record = 0;  // of the batch
};

struct FarMergeArgs {
  CombineArgs combine;  // sources: y null: not on this node, or it adds nothing
  FarNodes nodes;
  std::span<const std::uint8_t> whole_domains;  // as in FarSumArgs
  bool crc = false;                             // as in FarShape
};

struct FarMerged {
  FarFault fault;            // record: of the batch
  std::uint32_t node = 0;    // of the fault
  std::uint32_t batch = 0;   // of the fault
  std::uint32_t tokens = 0;  // done: from `begin` on
};

// Sums tokens [begin, end) of the owner into out and out_weights, in order, as far as the streams ([far
// nodes]) have all that a token needs. The streams continue after the records that were used. After a fault
// the tokens before it are done.
FarMerged merge_sums(const FarMergeArgs& args, std::span<FarStream> streams, std::uint32_t begin,
                     std::uint32_t end);

// Judges like merge_sums and moves the streams on like it, but sums nothing, and checks the CRC only of a
// record that is bad: so tokens can be cut into ranges that run in parallel, each with the streams as they
// were at its beginning.
FarMerged judge_sums(const FarMergeArgs& args, std::span<FarStream> streams, std::uint32_t begin,
                     std::uint32_t end);

}  // namespace epd::kernels
