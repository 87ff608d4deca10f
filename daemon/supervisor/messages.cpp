#include "messages.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <map>
#include <tuple>

namespace epd::supervisor {
namespace {

// control.proto has the same enumerators in the same order, after UNSPECIFIED.
template <typename Enum, typename Ours>
constexpr Enum enumerator(Ours value) {
  return static_cast<Enum>(static_cast<int>(value) + 1);
}
static_assert(enumerator<v1::DeviceState>(DeviceState::kStopped) == v1::DEVICE_STATE_STOPPED);
static_assert(enumerator<v1::NodeState>(cluster::NodeState::kUnknown) == v1::NODE_STATE_UNKNOWN);
static_assert(enumerator<v1::Payload>(abi::Payload::kOpaque) == v1::PAYLOAD_OPAQUE);
static_assert(enumerator<v1::Layout>(abi::Layout::kExpert) == v1::LAYOUT_EXPERT);
static_assert(enumerator<v1::ScaleFormat>(abi::ScaleFormat::kUe8m0) == v1::SCALE_FORMAT_UE8M0);
static_assert(enumerator<v1::IndexType>(abi::IndexType::kInt64) == v1::INDEX_TYPE_INT64);
static_assert(enumerator<v1::Span>(abi::Span::kCluster) == v1::SPAN_CLUSTER);
static_assert(enumerator<v1::LossPolicy>(abi::LossPolicy::kDegrade) == v1::LOSS_POLICY_DEGRADE);
static_assert(enumerator<v1::LossPolicy>(abi::LossPolicy::kDegradeLate) == v1::LOSS_POLICY_DEGRADE_LATE);

// These have the same numbers.
static_assert(static_cast<int>(abi::Op::kCombine) == v1::OPERATION_KIND_COMBINE);
static_assert(static_cast<int>(abi::OpStage::kBreaking) == v1::OPERATION_STAGE_BREAKING);

const char* stage_name(abi::OpStage stage) {
  switch (stage) {
    case abi::OpStage::kPlanning: return "planning";
    case abi::OpStage::kWaitReady: return "wait_ready";
    case abi::OpStage::kMoving: return "moving";
    case abi::OpStage::kWaitArrived: return "wait_arrived";
    case abi::OpStage::kBreaking: return "breaking";
    case abi::OpStage::kNone: break;
  }
  return "none";
}

std::int64_t between_us(std::uint64_t from_ns, std::uint64_t to_ns) {
  return static_cast<std::int64_t>(to_ns - from_ns) / 1000;
}

void add_stage(v1::Operation& message, const char* name, std::uint64_t submit_ns, std::uint64_t ns) {
  if (ns == 0) return;
  v1::StageEntry& entry = *message.add_stages();
  entry.set_stage(name);
  entry.set_after_us(static_cast<std::uint64_t>(std::max<std::int64_t>(between_us(submit_ns, ns), 0)));
}

}  // namespace

std::string hexadecimal(const std::array<std::uint8_t, 16>& bytes) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (const std::uint8_t byte : bytes) {
    text += kDigits[byte >> 4];
    text += kDigits[byte & 0xf];
  }
  return text;
}

v1::ClusterStatus message_of(const cluster::Settings& settings, const cluster::View& view) {
  v1::ClusterStatus message;
  message.set_name(settings.name);
  message.set_node(settings.node);
  message.set_listen(settings.listen);
  message.set_advertise(settings.advertise);
  message.set_coordinator(settings.coordinator);
  message.set_coordinates(view.coordinates);
  message.set_insecure(settings.insecure);
  message.set_term(view.term);
  message.set_problem(view.problem);
  message.set_problem_ms(view.problem_ms);
  message.set_certificate_expires_unix_s(view.certificate_expires_unix_s);
  for (const cluster::NodeView& node : view.nodes) {
    switch (node.state) {
      case cluster::NodeState::kUp: message.set_nodes_up(message.nodes_up() + 1); break;
      case cluster::NodeState::kSilent: message.set_nodes_silent(message.nodes_silent() + 1); break;
      case cluster::NodeState::kLost: message.set_nodes_lost(message.nodes_lost() + 1); break;
      case cluster::NodeState::kDraining: message.set_nodes_draining(message.nodes_draining() + 1); break;
      case cluster::NodeState::kUnknown: message.set_nodes_unknown(message.nodes_unknown() + 1); break;
    }
  }
  for (const auto& [reason, count] : view.refusals) {
    v1::RefusalCount& refusal = *message.add_refusals();
    refusal.set_reason(reason);
    refusal.set_count(count);
  }
  return message;
}

v1::Node message_of(const cluster::NodeView& node) {
  v1::Node message;
  message.set_name(node.name);
  message.set_state(enumerator<v1::NodeState>(node.state));
  message.set_since_ms(node.since_ms);
  message.set_reason(node.reason);
  message.set_address(node.address);
  message.set_version(node.version);
  message.set_boot_id(hexadecimal(node.boot_id));
  message.set_coordinator(node.coordinator);
  message.set_own(node.own);
  if (node.heard_ms) message.set_heartbeat_age_ms(*node.heard_ms);
  return message;
}

v1::DeviceState message_of(DeviceState state) {
  return enumerator<v1::DeviceState>(state);
}

v1::GroupState message_of(membership::GroupPhase phase) {
  using membership::GroupPhase;
  switch (phase) {
    case GroupPhase::kForming: return v1::GROUP_STATE_FORMING;
    case GroupPhase::kStarting: return v1::GROUP_STATE_STARTING;
    case GroupPhase::kActive: return v1::GROUP_STATE_ACTIVE;
    case GroupPhase::kBreaking:
    case GroupPhase::kFailing: return v1::GROUP_STATE_BREAKING;
    case GroupPhase::kLost:
    case GroupPhase::kRemoving: return v1::GROUP_STATE_LOST;
  }
  return v1::GROUP_STATE_UNSPECIFIED;
}

v1::GroupShape message_of(const abi::GroupShape& shape) {
  v1::GroupShape message;
  message.set_num_ranks(shape.num_ranks);
  message.set_num_experts(shape.num_experts);
  message.set_max_tokens(shape.max_tokens);
  message.set_hidden(shape.hidden);
  message.set_topk(shape.topk);
  message.set_depth(shape.depth);
  message.set_payload(enumerator<v1::Payload>(shape.payload));
  message.set_layout(enumerator<v1::Layout>(shape.layout));
  if (shape.is_fp8()) message.set_scale_format(enumerator<v1::ScaleFormat>(shape.scale_format));
  for (std::uint32_t i = 1; i < shape.num_formats(); ++i) {
    v1::RowFormat& format = *message.add_more_formats();
    const abi::GroupShape of = shape.with_format(i);
    format.set_payload(enumerator<v1::Payload>(of.payload));
    if (of.is_fp8()) format.set_scale_format(enumerator<v1::ScaleFormat>(of.scale_format));
  }
  message.set_expert_alignment(shape.expert_alignment);
  message.set_opaque_bytes(shape.opaque_bytes);
  message.set_num_biases(shape.num_biases);
  message.set_num_handles(shape.num_handles);
  message.set_max_recv_rows(shape.layout == abi::Layout::kExpert ? shape.expert_capacity()
                                                                 : shape.recv_rows());
  message.set_sum_ranks(shape.sum_ranks);
  message.set_index_type(enumerator<v1::IndexType>(shape.index_type));
  message.set_policy(enumerator<v1::LossPolicy>(shape.policy));
  message.set_span(enumerator<v1::Span>(shape.span));
  if (shape.has_scales()) message.set_scale_layout(enumerator<v1::ScaleLayout>(shape.scale_layout));
  if (shape.per_expert()) message.set_range_format(enumerator<v1::RangeFormat>(shape.range_format));
  message.set_shared_regions(shape.shared_regions);
  return message;
}

v1::Histogram message_of(const abi::Histogram& histogram) {
  v1::Histogram message;
  std::array<std::uint64_t, abi::kHistogramBuckets> counts{};
  for (std::size_t i = 0; i < counts.size(); ++i) {
    counts[i] = histogram.buckets[i].load(std::memory_order_relaxed);
    if (counts[i] == 0) continue;
    v1::HistogramBucket& bucket = *message.add_buckets();
    bucket.set_from_us(abi::histogram_floor(i));
    bucket.set_count(counts[i]);
    message.set_count(message.count() + counts[i]);
  }
  if (message.buckets().empty()) return message;
  message.set_p50_us(abi::histogram_percentile(counts, 500));
  message.set_p99_us(abi::histogram_percentile(counts, 990));
  return message;
}

v1::GetConfigResponse message_of(std::vector<ConfigEntry> entries) {
  const std::map<std::string, v1::ConfigOrigin> origins{{"default", v1::CONFIG_ORIGIN_DEFAULT},
                                                        {"file", v1::CONFIG_ORIGIN_FILE},
                                                        {"flag", v1::CONFIG_ORIGIN_FLAG},
                                                        {"environment", v1::CONFIG_ORIGIN_ENVIRONMENT},
                                                        {"operator", v1::CONFIG_ORIGIN_OPERATOR}};
  v1::GetConfigResponse message;
  for (ConfigEntry& entry : entries) {
    v1::ConfigEntry& out = *message.add_entries();
    out.set_key(std::move(entry.key));
    out.set_value(std::move(entry.value));
    out.set_origin(origins.at(entry.origin));
    out.set_reloadable(entry.reloadable);
  }
  sort_by(*message.mutable_entries(), [](const v1::ConfigEntry& entry) { return entry.key(); });
  return message;
}

google::protobuf::RepeatedPtrField<v1::OptionChange> messages_of(const std::vector<ConfigChange>& changes) {
  google::protobuf::RepeatedPtrField<v1::OptionChange> list;
  for (const ConfigChange& change : changes) {
    v1::OptionChange& message = *list.Add();
    message.set_key(change.key);
    message.set_before(change.before);
    message.set_after(change.after);
  }
  sort_by(list, [](const v1::OptionChange& change) { return change.key(); });
  return list;
}

void add_operation(v1::ListOperationsResponse& list, const abi::OpView& op, const std::string& device,
                   std::uint64_t now) {
  const std::uint64_t ticket = op.ticket.load(std::memory_order_acquire);
  if (ticket == 0) return;
  v1::Operation& message = *list.add_operations();
  message.set_device(device);
  message.set_session_id(op.session_id);
  message.set_group_id(op.group_id);
  message.set_ticket(ticket);
  message.set_op_index(op.op_index);
  if (const int kind = static_cast<int>(op.op); v1::OperationKind_IsValid(kind))
    message.set_op(static_cast<v1::OperationKind>(kind));
  if (const auto stage = static_cast<int>(op.stage.load(std::memory_order_relaxed));
      v1::OperationStage_IsValid(stage))
    message.set_stage(static_cast<v1::OperationStage>(stage));
  message.set_rank(op.rank);
  message.set_slot(op.slot);
  message.set_num_tokens(op.num_tokens);
  message.set_waiting_for(op.waiting_for.load(std::memory_order_relaxed));
  message.set_age_us(now > op.submit_ns ? (now - op.submit_ns) / 1000 : 0);
  message.set_id(std::to_string(message.session_id()) + ":" + std::to_string(ticket));
  message.set_epoch(op.epoch);
  const std::uint64_t since = op.waiting_since_ns.load(std::memory_order_relaxed);
  message.set_waiting_us(since != 0 && now > since ? (now - since) / 1000 : 0);
  message.set_deadline_in_us(between_us(now, op.deadline_ns));
  add_stage(message, "seen", op.submit_ns, op.seen_ns);
  for (std::size_t stage = 1; stage < abi::kNumOpStages; ++stage) {
    add_stage(message, stage_name(static_cast<abi::OpStage>(stage)), op.submit_ns,
              op.stage_ns[stage].load(std::memory_order_relaxed));
  }
  message.set_far_wait(op.far_wait.load());
  std::atomic_thread_fence(std::memory_order_acquire);
  if (op.ticket.load(std::memory_order_relaxed) != ticket) list.mutable_operations()->RemoveLast();
}

void mark_stopped(v1::Operation& operation) {
  operation.set_engine_stopped(true);
  operation.set_waiting_for(-1);
  operation.set_waiting_us(0);
  operation.clear_far_wait();
}

void sort(v1::ListOperationsResponse& list) {
  sort_by(*list.mutable_operations(), [](const v1::Operation& operation) {
    return std::tuple(operation.group_id(), operation.op_index(), operation.rank(), operation.ticket());
  });
}

}  // namespace epd::supervisor
