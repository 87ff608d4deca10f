#include "translate.h"

#include "proto/attach.h"
#include "proto/wire.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <cstdio>
#include <tuple>

namespace epd {
namespace {

// Length of the well-formed UTF-8 sequence that `text` begins with; 0 if there is none.
std::size_t sequence_length(std::string_view text) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned first = byte(0);
  if (first < 0x80) return 1;
  const std::size_t length = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : 2;
  if (first < 0xc2 || first > 0xf4 || text.size() < length) return 0;
  for (std::size_t i = 1; i < length; ++i)
    if ((byte(i) & 0xc0u) != 0x80u) return 0;
  const unsigned second = byte(1);
  const bool overlong = (first == 0xe0 && second < 0xa0) || (first == 0xf0 && second < 0x90);
  const bool outside = (first == 0xed && second > 0x9f) || (first == 0xf4 && second > 0x8f);
  return overlong || outside ? 0 : length;
}

// "wait_ready" names OPERATION_STAGE_WAIT_READY. A name that the schema lacks is UNSPECIFIED.
template <typename Enum>
Enum named(std::string prefix, const std::string& name) {
  for (const char c : name) prefix += static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  const auto* value = google::protobuf::GetEnumDescriptor<Enum>()->FindValueByName(prefix);
  return static_cast<Enum>(value == nullptr ? 0 : value->number());
}

v1::DaemonState translate(DaemonState state) {
  switch (state) {
    case DaemonState::kStarting: return v1::DAEMON_STATE_STARTING;
    case DaemonState::kServing: return v1::DAEMON_STATE_SERVING;
    case DaemonState::kDraining: return v1::DAEMON_STATE_DRAINING;
  }
  return v1::DAEMON_STATE_UNSPECIFIED;
}

v1::DeviceState translate(DeviceState state) {
  switch (state) {
    case DeviceState::kStarting: return v1::DEVICE_STATE_STARTING;
    case DeviceState::kReady: return v1::DEVICE_STATE_READY;
    case DeviceState::kRestarting: return v1::DEVICE_STATE_RESTARTING;
    case DeviceState::kFailed: return v1::DEVICE_STATE_FAILED;
    case DeviceState::kStopped: return v1::DEVICE_STATE_STOPPED;
  }
  return v1::DEVICE_STATE_UNSPECIFIED;
}

void translate(const abi::GroupShape& shape, v1::GroupShape& message) {
  message.set_num_ranks(shape.num_ranks);
  message.set_num_experts(shape.num_experts);
  message.set_max_tokens(shape.max_tokens);
  message.set_hidden(shape.hidden);
  message.set_topk(shape.topk);
  message.set_depth(shape.depth);
  switch (shape.payload) {
    case abi::Payload::kBf16: message.set_payload(v1::PAYLOAD_BF16); break;
    case abi::Payload::kFp8Cast: message.set_payload(v1::PAYLOAD_FP8_CAST); break;
    case abi::Payload::kFp8: message.set_payload(v1::PAYLOAD_FP8); break;
    case abi::Payload::kOpaque: message.set_payload(v1::PAYLOAD_OPAQUE); break;
  }
  switch (shape.layout) {
    case abi::Layout::kCompact: message.set_layout(v1::LAYOUT_COMPACT); break;
    case abi::Layout::kPacked: message.set_layout(v1::LAYOUT_PACKED); break;
    case abi::Layout::kExpert: message.set_layout(v1::LAYOUT_EXPERT); break;
  }
  if (shape.is_fp8()) {
    switch (shape.scale_format) {
      case abi::ScaleFormat::kFloat32: message.set_scale_format(v1::SCALE_FORMAT_FLOAT32); break;
      case abi::ScaleFormat::kFloat32Pow2: message.set_scale_format(v1::SCALE_FORMAT_FLOAT32_POW2); break;
      case abi::ScaleFormat::kUe8m0: message.set_scale_format(v1::SCALE_FORMAT_UE8M0); break;
    }
  }
  message.set_expert_alignment(shape.expert_alignment);
  message.set_opaque_bytes(shape.opaque_bytes);
  message.set_num_biases(shape.num_biases);
  message.set_num_handles(shape.num_handles);
  message.set_max_recv_rows(shape.layout == abi::Layout::kExpert ? shape.expert_capacity()
                                                                 : shape.recv_rows());
  switch (shape.index_type) {
    case abi::IndexType::kInt32: message.set_index_type(v1::INDEX_TYPE_INT32); break;
    case abi::IndexType::kInt64: message.set_index_type(v1::INDEX_TYPE_INT64); break;
  }
  switch (shape.policy) {
    case abi::LossPolicy::kFailFast: message.set_policy(v1::LOSS_POLICY_FAIL_FAST); break;
    case abi::LossPolicy::kDegrade: message.set_policy(v1::LOSS_POLICY_DEGRADE); break;
  }
}

std::string version_text(std::uint32_t major, std::uint32_t minor) {
  return std::to_string(major) + "." + std::to_string(minor);
}

void translate(const CudaView& view, v1::CudaDevice& message) {
  message.set_model(clean_text(view.model));
  message.set_compute_capability(version_text(view.compute / 10, view.compute % 10));
  message.set_cuda_version(version_text(view.driver / 1000, view.driver % 1000 / 10));
  message.set_num_sms(view.num_sms);
  message.set_sm_partition(view.sm_partition);
  message.set_mps(view.mps);
  for (const std::string& name : view.unreachable) message.add_unreachable(clean_text(name));
}

void translate(const DeviceView& view, v1::Device& message) {
  message.set_name(clean_text(view.name));
  message.set_state(translate(view.state));
  message.set_engine_pid(view.engine_pid);
  message.set_restarts(view.restarts);
  message.set_last_exit(clean_text(view.last_exit));
  message.set_sms(view.sms);
  message.set_sessions(view.sessions);
  message.set_heartbeat_age_ms(view.heartbeat_age_ms);
  message.set_sleeping(view.sleeping);
  message.set_ops_submitted(view.ops_submitted);
  message.set_ops_completed(view.ops_completed);
  message.set_ops_failed(view.ops_failed);
  message.set_bytes_dispatched(view.bytes_dispatched);
  message.set_bytes_combined(view.bytes_combined);
  message.set_submissions_refused(view.submissions_refused);
  message.set_times_stuck(view.times_stuck);
  if (view.cuda) translate(*view.cuda, *message.mutable_cuda());
  if (std::any_of(view.kernel_stops.begin(), view.kernel_stops.end(),
                  [](auto count) { return count != 0; })) {
    translate_histogram(view.kernel_stops, *message.mutable_kernel_stops());
    message.set_kernel_stop_max_us(view.kernel_stop_max_us);
  }
}

void translate(const SessionView& view, v1::Session& message) {
  message.set_session_id(view.id);
  message.set_uid(view.uid);
  message.set_gid(view.gid);
  message.set_pid(view.pid);
  message.set_device(clean_text(view.device));
  message.set_library(clean_text(view.library));
  message.set_age_ms(view.age_ms);
  message.set_groups(view.groups);
  message.set_arena_bytes(view.arena_bytes);
  message.set_claimed_pid(view.claimed.pid);
  message.set_claimed_host(clean_text(view.claimed.host));
}

void translate(const GroupView& view, v1::Group& message) {
  message.set_group_id(view.id);
  message.set_name(clean_text(view.name));
  message.set_state(named<v1::GroupState>("GROUP_STATE_", view.state));
  translate(view.shape, *message.mutable_shape());
  message.set_sms(view.sms);
  message.set_epoch(view.epoch);
  message.set_age_ms(view.age_ms);
  message.set_cause(clean_text(view.cause));
  for (const MemberView& member : view.members) {
    v1::GroupMember& out = *message.add_members();
    out.set_rank(member.rank);
    out.set_session_id(member.session_id);
    out.set_device(clean_text(member.device));
    out.set_gone(member.gone);
    out.set_by_stream(member.by_stream);
  }
  for (const std::uint32_t rank : view.missing_ranks) message.add_missing_ranks(rank);
  message.set_priority(view.priority);
}

void translate(const OperationView& view, v1::Operation& message) {
  message.set_device(clean_text(view.device));
  message.set_session_id(view.session_id);
  message.set_group_id(view.group_id);
  message.set_ticket(view.ticket);
  message.set_op_index(view.op_index);
  message.set_op(named<v1::OperationKind>("OPERATION_KIND_", view.op));
  message.set_stage(named<v1::OperationStage>("OPERATION_STAGE_", view.stage));
  message.set_rank(view.rank);
  message.set_slot(view.slot);
  message.set_num_tokens(view.num_tokens);
  message.set_waiting_for(view.waiting_for);
  message.set_age_us(view.age_us);
  message.set_id(std::to_string(view.session_id) + ":" + std::to_string(view.ticket));
  message.set_epoch(view.epoch);
  message.set_waiting_us(view.waiting_us);
  message.set_deadline_in_us(view.deadline_in_us);
  for (const StageView& stage : view.stages) {
    v1::StageEntry& out = *message.add_stages();
    out.set_stage(clean_text(stage.stage));
    out.set_after_us(stage.after_us);
  }
}

void translate(const WaitView& view, v1::Wait& message) {
  message.set_rank(view.rank);
  message.set_session_id(view.session_id);
  message.set_pid(view.pid);
  message.set_device(clean_text(view.device));
  message.set_device_state(translate(view.device_state));
  message.set_engine_pid(view.engine_pid);
  message.set_client_stopped(view.client_stopped);
  message.set_engine_stopped(view.engine_stopped);
  message.set_gone(view.gone);
  message.set_submitted(view.submitted);
  message.set_stage(named<v1::OperationStage>("OPERATION_STAGE_", view.stage));
  message.set_text(clean_text(view.text));
}

void translate(const ConfigEntry& view, v1::ConfigEntry& message) {
  message.set_key(clean_text(view.key));
  message.set_value(clean_text(view.value));
  message.set_origin(named<v1::ConfigOrigin>("CONFIG_ORIGIN_", view.origin));
  message.set_reloadable(view.reloadable);
}

template <typename View, typename Message, typename Key>
void translate_sorted(std::vector<View>& views, google::protobuf::RepeatedPtrField<Message>& messages,
                      Key key) {
  std::sort(views.begin(), views.end(), [&](const View& a, const View& b) { return key(a) < key(b); });
  messages.Reserve(static_cast<int>(views.size()));
  for (const View& view : views) translate(view, *messages.Add());
}

// "host:10" after "host:9".
std::tuple<std::string, std::size_t, std::string> natural(const std::string& name) {
  const std::size_t digits = name.find_last_not_of("0123456789") + 1;
  return {name.substr(0, digits), name.size() - digits, name.substr(digits)};
}

}  // namespace

std::string clean_text(std::string_view text) {
  std::string clean;
  clean.reserve(text.size());
  while (!text.empty()) {
    const std::size_t length = sequence_length(text);
    if (length == 0) {
      clean += "\xef\xbf\xbd";
    } else {
      clean += text.substr(0, length);
    }
    text.remove_prefix(length == 0 ? 1 : length);
  }
  return clean;
}

std::string refusal_text(std::string_view text) {
  constexpr std::size_t kEachEnd = 400;
  if (text.size() <= 2 * kEachEnd) return clean_text(text);
  return clean_text(text.substr(0, kEachEnd)) + " ... (" + std::to_string(text.size()) + " bytes) ... " +
         clean_text(text.substr(text.size() - kEachEnd));
}

void translate(const DaemonView& view, v1::DaemonStatus& message) {
  message.set_version(clean_text(view.version));
  message.set_boot_id(clean_text(view.boot_id));
  message.set_pid(view.pid);
  message.set_uptime_ms(view.uptime_ms);
  message.set_state(translate(view.state));
  message.set_socket_path(clean_text(view.socket_path));
  message.set_control_path(clean_text(view.control_path));
  message.set_config_generation(view.config_generation);
  message.set_last_reload_error(clean_text(view.last_reload_error));
  message.set_sessions(view.sessions);
  message.set_groups(view.groups);
  message.set_arena_bytes(view.arena_bytes);
  message.set_sessions_total(view.sessions_total);
  message.set_sessions_refused(view.sessions_refused);
  message.set_mps_control_error(clean_text(view.mps_control_error));
}

void translate(std::vector<DeviceView> views, google::protobuf::RepeatedPtrField<v1::Device>& messages) {
  translate_sorted(views, messages, [](const DeviceView& v) { return natural(v.name); });
}
void translate(std::vector<SessionView> views, google::protobuf::RepeatedPtrField<v1::Session>& messages) {
  translate_sorted(views, messages, [](const SessionView& v) { return v.id; });
}
void translate(std::vector<GroupView> views, google::protobuf::RepeatedPtrField<v1::Group>& messages) {
  for (GroupView& view : views) {
    std::sort(view.members.begin(), view.members.end(),
              [](const MemberView& a, const MemberView& b) { return a.rank < b.rank; });
    std::sort(view.missing_ranks.begin(), view.missing_ranks.end());
  }
  translate_sorted(views, messages, [](const GroupView& v) { return v.id; });
}
void translate(std::vector<OperationView> views,
               google::protobuf::RepeatedPtrField<v1::Operation>& messages) {
  translate_sorted(views, messages, [](const OperationView& v) {
    return std::tuple(v.group_id, v.op_index, v.rank, v.ticket);
  });
}
void translate(std::vector<ConfigEntry> views,
               google::protobuf::RepeatedPtrField<v1::ConfigEntry>& messages) {
  translate_sorted(views, messages, [](const ConfigEntry& v) { return v.key; });
}

void translate(const OperationDetail& detail, v1::GetOperationResponse& message) {
  translate(detail.operation, *message.mutable_operation());
  message.set_group(clean_text(detail.group_name));
  message.set_pid(detail.pid);
  message.set_engine_pid(detail.engine_pid);
  message.set_engine_stopped(detail.engine_stopped);
  for (const WaitView& wait : detail.waits) translate(wait, *message.add_waits());
  message.set_text(clean_text(detail.text));
}

void translate_abi(v1::GetVersionResponse& message) {
  message.set_abi_version_min(abi::kAbiVersionMin);
  message.set_abi_version_max(abi::kAbiVersion);
  std::array<char, 20> hash{};
  std::snprintf(hash.data(), hash.size(), "%016llx", static_cast<unsigned long long>(abi::layout_hash()));
  message.set_layout_hash(hash.data());
}

int grpc_code(StatusCode code) {
  switch (code) {
    case StatusCode::kOk: return 0;
    case StatusCode::kInvalidArgument: return 3;
    case StatusCode::kDeadlineExceeded: return 4;
    case StatusCode::kNotFound: return 5;
    case StatusCode::kPermissionDenied: return 7;
    case StatusCode::kResourceExhausted: return 8;
    case StatusCode::kVersionMismatch: return 9;
    case StatusCode::kRankLost:
    case StatusCode::kEngineRestarted:
    case StatusCode::kAborted: return 10;
    case StatusCode::kUnsupported: return 12;
    case StatusCode::kInternal: return 13;
    case StatusCode::kWouldBlock:
    case StatusCode::kDaemonLost: return 14;
  }
  return 13;
}

std::string error_details(const Status& status) {
  v1::ErrorInfo info;
  info.set_status(status_name(status.code()));
  v1::ErrorStatus error;
  error.set_code(grpc_code(status.code()));
  error.set_message(refusal_text(status.message()));
  error.add_details()->PackFrom(info);
  return error.SerializeAsString();
}

}  // namespace epd
