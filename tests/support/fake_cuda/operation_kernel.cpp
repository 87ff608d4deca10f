#include "fake_cuda/operation_kernel.h"

#include "fake_cuda/operation_exchange.h"
#include "host_operation.h"

#include <algorithm>
#include <array>
#include <span>

namespace epd::fake_cuda {
namespace {

using device::HostPlan;

using namespace kernels;
using namespace kernels::cuda;
using kernels::cuda::Operation;

class Peers final : public device::OperationPeers {
 public:
  explicit Peers(const Operation& op) : op_(op) {
    for (std::uint32_t rank = 0; rank < kMaxRanks; ++rank)
      masked_[rank] = op.peers[rank].ready == nullptr ? 1 : 0;
  }
  Peer peer(std::uint32_t rank) const override { return op_.peers[rank]; }
  std::span<const std::uint8_t> masked() const override {
    return std::span(masked_).first(op_.shape.num_ranks);
  }
  void ring() const override {}

 private:
  const Operation& op_;
  std::array<std::uint8_t, kMaxRanks> masked_{};
};

// The product's host operation, and what only kernels do beside it: they say all by words in memory, keep
// `routing.rows`, and store a routing's head at the end.
class Kernel : public OperationExchange {
 public:
  Kernel(Task task, const Operation& op, const KernelDevice& device)
      : OperationExchange(op, device),
        is_dispatch_(task == Task::kDispatch),
        makes_(is_dispatch_ && !op.cached) {}

  std::string run();

 private:
  std::string note(device::HostOperation& operation);
  std::int32_t row_of(const HostPlan& plan, std::uint32_t token, std::uint32_t k) const;
  std::string check_rows(const HostPlan& plan) const;
  void record_rows(const HostPlan& plan) const;
  void tell_counts(const Placement& placement) const;
  void store_head(const OpResult& ending) const;
  std::uint32_t count_lost() const;

  const bool is_dispatch_;
  const bool makes_;  // a routing
  bool planned_ = false;
  bool told_ = false;
  bool sent_ = false;
};

std::string Kernel::run() {
  Operation op = op_;
  op.routing.head = nullptr;
  if (makes_ && op_.routing.head != nullptr) store_release(&op_.routing.head->handle, std::uint64_t{0});
  const Peers peers(op_);
  device::HostPlans none(1);
  device::HostOperation operation(is_dispatch_ ? Kind::kDispatch : Kind::kCombine, op, {peers, none, 0, {}});
  unsigned looks = 1;
  while (!operation.ended()) {
    if (operation.advance()) {
      if (std::string wrong = note(operation); !wrong.empty()) return wrong;
      looks = 1;
      continue;
    }
    OpResult late = ended(OpError::kNone, static_cast<std::int32_t>(operation.awaited(0)));
    late.num_dropped = makes_ ? operation.plan().plan.num_dropped : 0;
    if (must_leave(late)) return {};
    device_.pause(looks++);
  }
  OpResult ending = operation.result();
  ending.ran_ns = ran_ns();
  if (ending.error == OpError::kNoRouting) return "routing.topk names an expert that does not exist";
  if (ending.error == OpError::kNone && makes_) store_head(ending);
  if (op_.routing.record != nullptr) ending.num_dropped = op_.routing.record->num_dropped + count_lost();
  publish(ending);
  return {};
}

// After each step: what the operation has come to.
std::string Kernel::note(device::HostOperation& operation) {
  const HostPlan& plan = operation.plan();
  if (!planned_ && !makes_ && operation.stage() != abi::OpStage::kPlanning) {
    planned_ = true;
    if (std::string wrong = check_rows(plan); !wrong.empty()) return wrong;
  }
  if (!told_ && operation.counted()) {
    told_ = true;
    if (makes_) record_rows(plan);
    tell_counts(plan.placement);
  }
  if (!sent_ && operation.sent()) {
    sent_ = true;
    if (op_.counts.host_sent != nullptr) store_release(op_.counts.host_sent, op_.counts.mark);
  }
  return {};
}

// The row of a choice at its rank, if it is the first of its token to name the target.
std::int32_t Kernel::row_of(const HostPlan& made, std::uint32_t token, std::uint32_t k) const {
  const RoutingPlan& plan = made.plan;
  const std::uint32_t experts = op_.shape.num_experts / op_.shape.num_ranks;
  const auto target_of = [&](std::int32_t expert) {
    const auto e = static_cast<std::uint32_t>(expert);
    return op_.shape.per_expert ? e : e / experts;
  };
  const std::int32_t* const chosen = plan.topk.data() + std::size_t{token} * op_.shape.topk;
  if (chosen[k] < 0) return -1;
  const std::uint32_t target = target_of(chosen[k]);
  for (std::uint32_t lower = 0; lower < k; ++lower) {
    if (chosen[lower] >= 0 && target_of(chosen[lower]) == target) return -1;
  }
  for (std::uint32_t i = plan.begin[token]; i < plan.begin[token + 1]; ++i) {
    const RouteEntry& entry = plan.entries[i];
    if (entry.target == target)
      return made.placement.base()[target] + static_cast<std::int32_t>(entry.position);
  }
  return -1;
}

void Kernel::record_rows(const HostPlan& plan) const {
  for (std::uint32_t token = 0; token < op_.num_tokens; ++token) {
    for (std::uint32_t k = 0; k < op_.shape.topk; ++k)
      op_.routing.rows[std::size_t{token} * op_.shape.topk + k] = row_of(plan, token, k);
  }
}

// The records of an earlier dispatch have to fit together.
std::string Kernel::check_rows(const HostPlan& plan) const {
  for (std::uint32_t token = 0; token < op_.num_tokens; ++token) {
    for (std::uint32_t k = 0; k < op_.shape.topk; ++k) {
      const std::int32_t row = op_.routing.rows[std::size_t{token} * op_.shape.topk + k];
      if (row != row_of(plan, token, k) ||
          (row >= 0 && static_cast<std::uint64_t>(row) >= op_.shape.recv_rows))
        return "routing.rows does not follow from routing.topk and routing.placement";
    }
  }
  return {};
}

void Kernel::tell_counts(const Placement& placement) const {
  if (op_.counts.host_words == nullptr) return;
  std::uint64_t* to = op_.counts.host_words;
  for (const std::int32_t word : placement.words())
    store_release(to++, std::uint64_t{op_.counts.mark} << 32 | static_cast<std::uint32_t>(word));
}

// For a combine: counts selections of ranks that have no rows of the routing.
std::uint32_t Kernel::count_lost() const {
  const std::uint32_t experts = op_.shape.num_experts / op_.shape.num_ranks;
  const std::span topk(op_.routing.topk, is_dispatch_ ? 0 : op_.num_tokens * op_.shape.topk);
  return static_cast<std::uint32_t>(std::count_if(topk.begin(), topk.end(), [&](std::int32_t choice) {
    return choice >= 0 && op_.peers[static_cast<std::uint32_t>(choice) / experts].source.y == nullptr;
  }));
}

void Kernel::store_head(const OpResult& ending) const {
  if (op_.routing.head == nullptr) return;
  abi::RoutingRecord& head = *op_.routing.head;
  head.epoch = op_.routing.epoch;
  head.num_tokens = op_.num_tokens;
  head.num_recv_rows = ending.num_recv_rows;
  head.num_dropped = ending.num_dropped;
  store_release(&head.handle, op_.routing.handle);
}

}  // namespace

std::string run_operation(Task task, const Operation& op, const KernelDevice& device) {
  Kernel kernel(task, op, device);
  std::string wrong = kernel.run();
  kernel.leave();
  return wrong;
}

}  // namespace epd::fake_cuda
