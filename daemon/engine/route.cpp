#include "route.h"

#include <algorithm>
#include <atomic>
#include <iterator>
#include <utility>

namespace epd {

namespace {

constexpr std::size_t kPiece = 8192;  // choices copied at a time: some microseconds, if their pages are new

abi::RoutingRecord* head_of(std::byte* saved) {
  return reinterpret_cast<abi::RoutingRecord*>(saved);
}
const abi::RoutingRecord* head_of(const std::byte* saved) {
  return reinterpret_cast<const abi::RoutingRecord*>(saved);
}

}  // namespace

bool is_of(std::uint64_t handle, std::uint64_t op_index) {
  return handle != 0 && abi::same_index(handle, op_index + 1);
}

RouteTable::RouteTable(const abi::GroupShape& shape) : shape_(shape), layout_(shape) {}

std::shared_ptr<Route> RouteTable::renew(std::uint32_t record) {
  if (const auto found = by_record_.find(record); found != by_record_.end()) forget(found->second);
  return unused();
}

std::shared_ptr<Route> RouteTable::unused() {
  if (spare_.empty() && kept_.size() >= abi::kept_routes(shape_)) {
    const auto unused = std::find_if(kept_.rbegin(), kept_.rend(),
                                     [](const Kept& kept) { return kept.route.use_count() == 1; });
    if (unused != kept_.rend()) forget(std::next(unused).base());
  }
  if (spare_.empty()) return std::make_shared<Route>();
  std::shared_ptr<Route> route = std::move(spare_.back());
  spare_.pop_back();
  route->handle = 0;
  return route;
}

std::shared_ptr<Route> RouteTable::find(std::uint32_t record, std::uint64_t op_index) {
  const auto found = by_record_.find(record);
  if (found == by_record_.end() || !is_of(found->second->route->handle, op_index)) return nullptr;
  kept_.splice(kept_.begin(), kept_, found->second);
  return kept_.front().route;
}

// Those that operations hold come back from them.
void RouteTable::forget(std::list<Kept>::iterator kept) {
  if (kept->route.use_count() == 1) spare_.push_back(std::move(kept->route));
  by_record_.erase(kept->record);
  kept_.erase(kept);
}

void RouteTable::remember(std::uint32_t record, std::shared_ptr<Route> route) {
  if (const auto found = by_record_.find(record); found != by_record_.end()) forget(found->second);
  if (kept_.size() >= abi::kept_routes(shape_)) forget(std::prev(kept_.end()));
  kept_.push_front({record, std::move(route)});
  by_record_[record] = kept_.begin();
}

void RouteTable::give_back(std::shared_ptr<Route> route) {
  if (route != nullptr && route.use_count() == 1) spare_.push_back(std::move(route));
}

std::vector<std::shared_ptr<Route>> RouteTable::take_all() {
  std::vector<std::shared_ptr<Route>> all = std::exchange(spare_, {});
  for (Kept& kept : kept_) all.push_back(std::move(kept.route));
  kept_.clear();
  by_record_.clear();
  return all;
}

std::uint32_t RouteTable::saved_dropped(std::uint32_t record, const std::byte* arena) const {
  const abi::RoutingRecord* head = head_of(arena + layout_.routing_of(record));
  return head->handle != 0 ? head->num_dropped : 0;
}

std::shared_ptr<Route> RouteTable::empty(std::uint64_t op_index) {
  std::shared_ptr<Route> route = unused();
  route->epoch = 0;
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

std::optional<kernels::RoutingInput> RouteTable::saved(std::uint32_t record, std::uint64_t op_index,
                                                       const std::byte* arena) const {
  const std::byte* saved = arena + layout_.routing_of(record);
  if (!is_of(head_of(saved)->handle, op_index)) return std::nullopt;
  kernels::RoutingInput input;
  input.topk_idx = saved + layout_.topk;
  input.per_expert = shape_.per_expert();
  input.num_tokens = head_of(saved)->num_tokens;
  input.topk = shape_.topk;
  input.num_ranks = shape_.num_ranks;
  input.num_experts = shape_.num_experts;
  return input;
}

bool RouteTable::restore(std::uint32_t record, std::uint64_t op_index, const std::byte* arena,
                         const std::shared_ptr<Route>& route) {
  const std::byte* saved = arena + layout_.routing_of(record);
  const abi::RoutingRecord* head = head_of(saved);
  if (!is_of(head->handle, op_index)) return false;
  route->placement.reset(shape_.num_ranks, shape_.num_experts, shape_.per_expert());
  const std::span<std::int32_t> words = route->placement.words();
  std::copy_n(reinterpret_cast<const std::int32_t*>(saved + layout_.placement), words.size(), words.begin());
  route->placement.num_recv_rows = head->num_recv_rows;
  route->plan.num_dropped = head->num_dropped;
  route->epoch = head->epoch;
  route->handle = head->handle;
  remember(record, route);
  return true;
}

void RouteTable::begin_keep(std::uint32_t record, const Route& route, std::byte* arena) const {
  std::byte* saved = arena + layout_.routing_of(record);
  abi::RoutingRecord* head = head_of(saved);
  std::atomic_ref(head->handle).store(0, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  head->epoch = route.epoch;
  head->num_tokens = route.plan.num_tokens();
  head->num_recv_rows = route.placement.num_recv_rows;
  head->num_dropped = route.plan.num_dropped;
  const std::span<const std::int32_t> words = route.placement.words();
  std::copy(words.begin(), words.end(), reinterpret_cast<std::int32_t*>(saved + layout_.placement));
}

bool RouteTable::keep_choices(std::uint32_t record, const Route& route, std::byte* arena,
                              std::size_t& done) const {
  auto* topk = reinterpret_cast<std::int32_t*>(arena + layout_.routing_of(record) + layout_.topk);
  const std::size_t count = std::min(kPiece, route.plan.topk.size() - done);
  std::copy_n(route.plan.topk.data() + done, count, topk + done);
  done += count;
  return done == route.plan.topk.size();
}

void RouteTable::end_keep(std::uint32_t record, std::shared_ptr<Route> route, std::byte* arena) {
  std::atomic_ref(head_of(arena + layout_.routing_of(record))->handle)
      .store(route->handle, std::memory_order_release);
  remember(record, std::move(route));
}

kernels::RowFormat row_format(const abi::GroupShape& s) {
  kernels::RowFormat format;
  format.cast = s.payload == abi::Payload::kFp8Cast;
  format.scales = s.scale_format;
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
