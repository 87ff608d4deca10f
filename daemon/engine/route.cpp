#include "route.h"

#include <algorithm>
#include <atomic>

namespace epd {

bool is_of(std::uint64_t handle, std::uint64_t op_index) {
  return handle != 0 && abi::same_index(handle, op_index + 1);
}

RouteTable::RouteTable(const abi::GroupShape& shape)
    : shape_(shape), layout_(shape), routes_(shape.num_routes()) {}

std::shared_ptr<Route> RouteTable::renew(std::uint32_t record) {
  std::shared_ptr<Route>& route = routes_[record];
  if (route == nullptr || route.use_count() > 1) route = std::make_shared<Route>();
  route->handle = 0;
  return route;
}

std::shared_ptr<Route> RouteTable::find(std::uint32_t record, std::uint64_t op_index,
                                        const std::byte* arena) {
  std::shared_ptr<Route>& route = routes_[record];
  if (route != nullptr && is_of(route->handle, op_index)) return route;
  std::shared_ptr<Route> saved = restore(arena + layout_.routing_of(record), op_index);
  if (saved != nullptr) route = saved;
  return saved;
}

std::uint32_t RouteTable::saved_dropped(std::uint32_t record, const std::byte* arena) const {
  const auto* saved = reinterpret_cast<const abi::RoutingRecord*>(arena + layout_.routing_of(record));
  return saved->handle != 0 ? saved->num_dropped : 0;
}

std::shared_ptr<Route> RouteTable::empty(std::uint64_t op_index) const {
  auto route = std::make_shared<Route>();
  kernels::RoutingInput input;
  input.per_expert = shape_.per_expert();
  input.topk = shape_.topk;
  input.num_ranks = shape_.num_ranks;
  input.num_experts = shape_.num_experts;
  kernels::build_routing_plan(input, route->plan);
  route->placement.reset(shape_.num_ranks, shape_.num_experts, shape_.per_expert());
  route->handle = op_index + 1;
  return route;
}

std::shared_ptr<Route> RouteTable::restore(const std::byte* saved, std::uint64_t op_index) const {
  const auto* record = reinterpret_cast<const abi::RoutingRecord*>(saved);
  if (!is_of(record->handle, op_index)) return nullptr;
  auto route = std::make_shared<Route>();
  kernels::RoutingInput input;
  input.topk_idx = saved + layout_.topk;
  input.per_expert = shape_.per_expert();
  input.num_tokens = record->num_tokens;
  input.topk = shape_.topk;
  input.num_ranks = shape_.num_ranks;
  input.num_experts = shape_.num_experts;
  if (kernels::build_routing_plan(input, route->plan).bad) return nullptr;
  route->placement.reset(shape_.num_ranks, shape_.num_experts, shape_.per_expert());
  const std::span<std::int32_t> words = route->placement.words();
  std::copy_n(reinterpret_cast<const std::int32_t*>(saved + layout_.placement), words.size(), words.begin());
  route->placement.num_recv_rows = record->num_recv_rows;
  route->plan.num_dropped = record->num_dropped;
  route->epoch = record->epoch;
  route->handle = record->handle;
  return route;
}

void RouteTable::keep(std::uint32_t record, std::shared_ptr<Route> kept, std::byte* arena) {
  const Route& route = *kept;
  std::byte* saved = arena + layout_.routing_of(record);
  auto* head = reinterpret_cast<abi::RoutingRecord*>(saved);
  std::atomic_ref(head->handle).store(0, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  head->epoch = route.epoch;
  head->num_tokens = route.plan.num_tokens();
  head->num_recv_rows = route.placement.num_recv_rows;
  head->num_dropped = route.plan.num_dropped;
  const std::span<const std::int32_t> words = route.placement.words();
  std::copy(words.begin(), words.end(), reinterpret_cast<std::int32_t*>(saved + layout_.placement));
  std::copy(route.plan.topk.begin(), route.plan.topk.end(),
            reinterpret_cast<std::int32_t*>(saved + layout_.topk));
  std::atomic_ref(head->handle).store(route.handle, std::memory_order_release);
  routes_[record] = std::move(kept);
}

kernels::RowFormat row_format(const abi::GroupShape& s) {
  kernels::RowFormat format;
  format.cast = s.payload == abi::Payload::kFp8Cast;
  switch (s.scale_format) {
    case abi::ScaleFormat::kFloat32: format.scales = kernels::ScaleFormat::kFloat32; break;
    case abi::ScaleFormat::kFloat32Pow2: format.scales = kernels::ScaleFormat::kFloat32Pow2; break;
    case abi::ScaleFormat::kUe8m0: format.scales = kernels::ScaleFormat::kUe8m0; break;
  }
  format.hidden = s.hidden;
  format.x_bytes = s.x_bytes();
  format.row_bytes = s.row_bytes();
  format.scale_bytes = s.scale_bytes();
  return format;
}

kernels::PlacementRules placement_rules(const abi::GroupShape& shape) {
  kernels::PlacementRules rules;
  rules.num_ranks = shape.num_ranks;
  rules.num_experts = shape.num_experts;
  rules.per_expert = shape.per_expert();
  rules.expert_blocks = shape.layout == abi::Layout::kExpert;
  rules.expert_capacity = shape.expert_capacity();
  rules.alignment = shape.expert_alignment;
  rules.recv_rows = shape.recv_rows();
  return rules;
}

}  // namespace epd
