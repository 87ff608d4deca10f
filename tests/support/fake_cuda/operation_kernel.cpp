#include "fake_cuda/operation_kernel.h"

#include "fake_cuda/operation_exchange.h"
#include "kernels/operations.h"
#include "kernels/routing.h"

#include <algorithm>
#include <array>
#include <limits>
#include <vector>

namespace epd::fake_cuda {
namespace {

using namespace kernels;
using namespace kernels::cuda;

class Kernel : public OperationExchange {
 public:
  Kernel(const Operation& op, const KernelDevice& device)
      : OperationExchange(op, device),
        experts_(op.shape.num_experts / std::max(op.shape.num_ranks, 1u)) {}  // a noop has no shape

  std::string dispatch();
  std::string combine();
  void noop() { publish(ended(OpError::kNone, -1)); }

 private:
  bool count_choices();
  void send_counts() const;
  bool place();
  void record();
  std::int32_t row_of(std::uint32_t token, std::uint32_t k) const;
  std::string recall();
  void deliver_counts() const;
  void send_rows();
  void fill_unused();
  PlacementRules rules() const;

  const std::uint32_t experts_;  // of one rank
  RoutingPlan plan_;
  Placement placement_;
};

PlacementRules Kernel::rules() const {
  const Shape& s = op_.shape;
  return {s.num_ranks,       s.num_experts, s.per_expert, s.expert_blocks,
          s.expert_capacity, s.alignment,   s.recv_rows};
}

bool Kernel::count_choices() {
  std::array<std::uint8_t, kMaxRanks> masked{};
  for (std::uint32_t rank = 0; rank < op_.shape.num_ranks; ++rank) masked[rank] = is_there(rank) ? 0 : 1;
  const RoutingInput input{op_.topk_idx,          op_.shape.index64,
                           op_.shape.per_expert,  op_.num_tokens,
                           op_.shape.topk,        op_.shape.num_ranks,
                           op_.shape.num_experts, std::span(masked).first(op_.shape.num_ranks)};
  const RoutingError error = build_routing_plan(input, plan_);
  if (!error.bad) {
    num_dropped_ = plan_.num_dropped;
    std::copy(plan_.topk.begin(), plan_.topk.end(), op_.routing.topk);
    return true;
  }
  OpResult ending = ended(OpError::kBadChoice, static_cast<std::int32_t>(op_.rank));
  ending.token = error.token;
  ending.k = error.k;
  ending.value = static_cast<std::int32_t>(std::clamp<std::int64_t>(
      error.value, std::numeric_limits<std::int32_t>::min(), std::numeric_limits<std::int32_t>::max()));
  publish(ending);
  return false;
}

void Kernel::send_counts() const {
  const std::size_t ranks = op_.shape.num_ranks;
  const std::size_t experts = op_.shape.num_experts;
  for_ranks_there([&](std::uint32_t rank) {
    std::copy(plan_.rank_counts.begin(), plan_.rank_counts.end(),
              op_.peers[rank].rank_counts + op_.rank * ranks);
    const std::size_t first = op_.shape.per_expert ? 0 : std::size_t{rank} * experts_;
    const std::size_t count = op_.shape.per_expert ? experts : experts_;
    std::copy_n(plan_.expert_counts.data() + first, count,
                op_.peers[rank].expert_counts + op_.rank * experts + first);
  });
}

bool Kernel::place() {
  std::vector<const std::uint32_t*> rank_counts(op_.shape.num_ranks, nullptr);
  std::vector<const std::uint32_t*> expert_counts(op_.shape.num_ranks, nullptr);
  for_ranks_there([&](std::uint32_t rank) {
    rank_counts[rank] = own().rank_counts + std::size_t{rank} * op_.shape.num_ranks;
    expert_counts[rank] = own().expert_counts + std::size_t{rank} * op_.shape.num_experts;
  });
  const PlacementError error = place_rows(rules(), {rank_counts, expert_counts}, op_.rank, placement_);
  if (!error.bad) return true;
  OpResult ending = ended(OpError::kNoRoom, static_cast<std::int32_t>(error.rank));
  ending.expert = error.expert;
  ending.rows = error.rows;
  ending.room = error.room;
  publish(ending);
  return false;
}

// The row of a choice at its rank, if it is the first of its token to name the target.
std::int32_t Kernel::row_of(std::uint32_t token, std::uint32_t k) const {
  const auto target_of = [&](std::int32_t expert) {
    const auto e = static_cast<std::uint32_t>(expert);
    return op_.shape.per_expert ? e : e / experts_;
  };
  const std::int32_t* const chosen = plan_.topk.data() + std::size_t{token} * op_.shape.topk;
  if (chosen[k] < 0) return -1;
  const std::uint32_t target = target_of(chosen[k]);
  for (std::uint32_t lower = 0; lower < k; ++lower) {
    if (chosen[lower] >= 0 && target_of(chosen[lower]) == target) return -1;
  }
  for (std::uint32_t i = plan_.begin[token]; i < plan_.begin[token + 1]; ++i) {
    const RouteEntry& entry = plan_.entries[i];
    if (entry.target == target) return placement_.base()[target] + static_cast<std::int32_t>(entry.position);
  }
  return -1;
}

void Kernel::record() {
  const std::span<const std::int32_t> words = placement_.words();
  std::copy(words.begin(), words.end(), op_.routing.placement);
  for (std::uint32_t token = 0; token < op_.num_tokens; ++token) {
    for (std::uint32_t k = 0; k < op_.shape.topk; ++k) {
      op_.routing.rows[std::size_t{token} * op_.shape.topk + k] = row_of(token, k);
    }
  }
}

// The plan and the placement from what an earlier dispatch left. What it left has to fit together.
std::string Kernel::recall() {
  const RoutingInput input{
      op_.routing.topk,      false, op_.shape.per_expert, op_.num_tokens, op_.shape.topk, op_.shape.num_ranks,
      op_.shape.num_experts, {}};
  if (build_routing_plan(input, plan_).bad) return "routing.topk names an expert that does not exist";
  placement_.reset(op_.shape.num_ranks, op_.shape.num_experts, op_.shape.per_expert);
  const std::span<std::int32_t> words = placement_.words();
  std::copy_n(op_.routing.placement, words.size(), words.begin());
  std::int64_t rows = 0;
  if (!op_.shape.per_expert) {
    rows = placement_.rank_offsets().back();
  } else if (!op_.shape.expert_blocks) {
    rows = placement_.expert_offsets().back();
  } else {
    for (const std::int32_t count : placement_.expert_counts()) rows += count;
  }
  placement_.num_recv_rows = static_cast<std::uint32_t>(rows);
  for (std::uint32_t token = 0; token < op_.num_tokens; ++token) {
    for (std::uint32_t k = 0; k < op_.shape.topk; ++k) {
      const std::int32_t row = op_.routing.rows[std::size_t{token} * op_.shape.topk + k];
      if (row != row_of(token, k) || (row >= 0 && static_cast<std::uint64_t>(row) >= op_.shape.recv_rows))
        return "routing.rows does not follow from routing.topk and routing.placement";
    }
  }
  return {};
}

void Kernel::deliver_counts() const {
  const auto put = [](std::span<const std::int32_t> words, std::int32_t* to) {
    if (to != nullptr) std::copy(words.begin(), words.end(), to);
  };
  put(placement_.rank_offsets(), op_.counts.rank_offsets);
  put(placement_.expert_counts(), op_.counts.expert_counts);
  put(placement_.expert_offsets(), op_.counts.expert_offsets);
  put(placement_.source_ranges(), op_.counts.source_ranges);
  put(placement_.words(), op_.counts.host_placement);
  if (op_.counts.host_ready != nullptr) store_release(op_.counts.host_ready, op_.tag);
}

void Kernel::send_rows() {
  std::array<DispatchTarget, kMaxRanks> targets{};
  for_ranks_there([&](std::uint32_t rank) { targets[rank] = op_.peers[rank].target; });
  DispatchArgs args;
  args.plan = &plan_;
  args.base = placement_.base();
  args.x = op_.x;
  args.x_scales = op_.x_scales;
  args.topk_weights = op_.topk_weights;
  args.targets = std::span(targets).first(op_.shape.num_ranks);
  args.format = op_.shape.format;
  args.source_rank = op_.rank;
  args.topk = op_.shape.topk;
  args.experts_per_rank = experts_;
  args.index64 = op_.shape.index64;
  dispatch_rows(args, 0, op_.num_tokens);
}

void Kernel::fill_unused() {
  const std::vector<RowRange> ranges = unfilled_rows(rules(), placement_, op_.mark_unused);
  std::uint32_t rows = 0;
  for (const RowRange& range : ranges) rows += range.count;
  FillArgs args;
  args.target = own().target;
  args.ranges = ranges;
  args.format = op_.shape.format;
  args.choices_per_row = op_.shape.per_expert ? 1 : op_.shape.topk;
  args.index64 = op_.shape.index64;
  args.zero = op_.zero_padding;
  fill_rows(args, 0, rows);
}

std::string Kernel::dispatch() {
  if (op_.cached) {
    announce();
    if (std::string wrong = recall(); !wrong.empty()) return wrong;
  } else {
    if (op_.routing.head != nullptr) store_release(&op_.routing.head->handle, std::uint64_t{0});
    if (!count_choices()) return {};
    send_counts();
    announce();
  }
  if (!wait_signals(own().ready) || !check_announcements()) return {};
  if (!op_.cached) {
    if (!place()) return {};
    record();
  }
  deliver_counts();
  send_rows();
  fill_unused();
  if (!arrive()) return {};
  OpResult ending = ended(OpError::kNone, -1);
  ending.num_recv_rows = placement_.num_recv_rows;
  ending.num_dropped = op_.cached ? 0 : plan_.num_dropped;
  if (!op_.cached && op_.routing.head != nullptr) {
    abi::RoutingRecord& head = *op_.routing.head;
    head.epoch = op_.routing.epoch;
    head.num_tokens = op_.num_tokens;
    head.num_recv_rows = ending.num_recv_rows;
    head.num_dropped = ending.num_dropped;
    store_release(&head.handle, op_.routing.handle);
  }
  publish(ending);
  return {};
}

std::string Kernel::combine() {
  announce();
  if (!wait_signals(own().ready) || !check_announcements()) return {};
  if (std::string wrong = recall(); !wrong.empty()) return wrong;
  std::array<CombineSource, kMaxRanks> sources{};
  for_ranks_there([&](std::uint32_t rank) { sources[rank] = op_.peers[rank].source; });
  CombineArgs args;
  args.plan = &plan_;
  args.base = placement_.base();
  args.sources = std::span(sources).first(op_.shape.num_ranks);
  args.topk_weights = op_.topk_weights;
  std::copy_n(op_.bias, 2, args.bias);
  args.out = op_.out;
  args.out_weights = op_.out_weights;
  args.hidden = op_.shape.hidden;
  args.topk = op_.shape.topk;
  args.experts_per_rank = experts_;
  combine_rows(args, 0, op_.num_tokens);
  if (arrive()) publish(ended(OpError::kNone, -1));
  return {};
}

}  // namespace

std::string run_operation(Task task, const Operation& op, const KernelDevice& device) {
  Kernel kernel(op, device);
  std::string wrong;
  if (kernel.wait_ready()) {
    if (task == Task::kNoop) kernel.noop();
    if (task == Task::kDispatch) wrong = kernel.dispatch();
    if (task == Task::kCombine || task == Task::kCombinePerExpert) wrong = kernel.combine();
  }
  kernel.leave();
  return wrong;
}

}  // namespace epd::fake_cuda
