// What the control plane sees.
#include "node.h"

#include <unistd.h>
#include <algorithm>
#include <optional>

namespace epd {
namespace {

constexpr std::uint64_t kMsNs = 1'000'000;

std::string hexadecimal(const std::array<std::uint8_t, 16>& bytes) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (const std::uint8_t byte : bytes) {
    text += kDigits[byte >> 4];
    text += kDigits[byte & 0xf];
  }
  return text;
}

const char* op_name(abi::Op op) {
  switch (op) {
    case abi::Op::kNoop: return "noop";
    case abi::Op::kDispatch: return "dispatch";
    case abi::Op::kCombine: return "combine";
    case abi::Op::kNone: break;
  }
  return "none";
}

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

// No value: free, or taken by another operation while it was read.
std::optional<OperationView> read_operation(const abi::OpView& op, std::uint64_t now) {
  const std::uint64_t ticket = op.ticket.load(std::memory_order_acquire);
  if (ticket == 0) return std::nullopt;
  OperationView view;
  view.session_id = op.session_id;
  view.group_id = op.group_id;
  view.ticket = ticket;
  view.op_index = op.op_index;
  view.op = op_name(op.op);
  view.stage = stage_name(static_cast<abi::OpStage>(op.stage.load(std::memory_order_relaxed)));
  view.rank = op.rank;
  view.slot = op.slot;
  view.num_tokens = op.num_tokens;
  view.waiting_for = op.waiting_for.load(std::memory_order_relaxed);
  view.age_us = now > op.submit_ns ? (now - op.submit_ns) / 1000 : 0;
  view.epoch = op.epoch;
  const std::uint64_t since = op.waiting_since_ns.load(std::memory_order_relaxed);
  view.waiting_us = since != 0 && now > since ? (now - since) / 1000 : 0;
  view.deadline_in_us = between_us(now, op.deadline_ns);
  const auto add_stage = [&](const char* name, std::uint64_t ns) {
    if (ns == 0) return;
    const std::int64_t after = between_us(op.submit_ns, ns);
    view.stages.push_back({name, static_cast<std::uint64_t>(std::max<std::int64_t>(after, 0))});
  };
  add_stage("seen", op.seen_ns);
  for (std::size_t stage = 1; stage < abi::kNumOpStages; ++stage) {
    add_stage(stage_name(static_cast<abi::OpStage>(stage)),
              op.stage_ns[stage].load(std::memory_order_relaxed));
  }
  std::atomic_thread_fence(std::memory_order_acquire);
  if (op.ticket.load(std::memory_order_relaxed) != ticket) return std::nullopt;
  return view;
}

GroupView view_of(const membership::Group& group, const EngineFleet& fleet, std::uint64_t now) {
  GroupView view;
  view.id = group.id;
  view.name = group.name;
  view.state = membership::group_phase_name(group.phase);
  view.shape = group.shape;
  view.epoch = group.epoch;
  view.age_ms = (now - group.created_ns) / kMsNs;
  if (group.reason.cause != StatusCode::kOk)
    view.cause = std::string(status_name(group.reason.cause)) + ": " + group.reason.text;
  for (const auto& [rank, member] : group.members) {
    view.members.push_back(
        {rank, member.session_id, fleet.name(member.device), member.gone, member.commands});
  }
  if (group.phase != membership::GroupPhase::kForming) return view;
  for (std::uint32_t rank = 0; rank < group.shape.num_ranks; ++rank) {
    if (group.members.count(rank) == 0) view.missing_ranks.push_back(rank);
  }
  return view;
}

}  // namespace

DaemonView Node::daemon_view() const {
  DaemonView view;
  view.version = kDaemonVersion;
  view.boot_id = hexadecimal(boot_id_);
  view.pid = ::getpid();
  view.uptime_ms = (clock_.now_ns() - started_ns_) / kMsNs;
  view.state = phase_ == Phase::kStarting  ? DaemonState::kStarting
               : phase_ == Phase::kServing ? DaemonState::kServing
                                           : DaemonState::kDraining;
  view.socket_path = config_.socket;
  view.control_path = config_.control_socket;
  view.config_generation = config_generation_;
  view.last_reload_error = last_reload_error_;
  view.sessions = sessions_->attached();
  view.groups = registry_.groups().size();
  view.arena_bytes = arenas_.total_bytes();
  view.sessions_total = sessions_->total_attached();
  view.sessions_refused = sessions_->total_refused();
  view.mps_control_error = mps_error_;
  return view;
}

std::vector<DeviceView> Node::device_views() const {
  std::vector<DeviceView> views;
  for (std::uint32_t i = 0; i < fleet_->size(); ++i) {
    views.push_back(fleet_->view(i));
    views.back().sessions = sessions_->attached_on(i);
    views.back().cuda = cuda_view(i);
  }
  return views;
}

std::vector<SessionView> Node::session_views() const {
  std::map<std::uint64_t, std::uint64_t> arena_bytes;
  for (const auto& [id, group] : registry_.groups()) {
    for (const auto& [rank, member] : group.members) {
      const MemberArenas* arenas = arenas_.find(id, rank);
      if (arenas != nullptr) arena_bytes[member.session_id] += arenas->bytes;
    }
  }
  std::vector<SessionView> views;
  const std::uint64_t now = loop_->now_ns();
  for (const auto& [id, session] : sessions_->connections()) {
    if (!session.attached) continue;
    SessionView view;
    view.id = id;
    view.uid = session.peer.uid;
    view.gid = session.peer.gid;
    view.pid = session.peer.pid;
    view.device = fleet_->name(session.device);
    view.library = session.library;
    view.claimed = {session.claimed_pid, session.claimed_host};
    view.age_ms = (now - session.accepted_ns) / kMsNs;
    view.groups = registry_.memberships(id);
    view.arena_bytes = arena_bytes[id];
    views.push_back(std::move(view));
  }
  return views;
}

std::vector<GroupView> Node::group_views() const {
  std::vector<GroupView> views;
  const std::uint64_t now = loop_->now_ns();
  for (const auto& [id, group] : registry_.groups()) {
    views.push_back(view_of(group, *fleet_, now));
    for (const auto& [rank, member] : group.members) {
      const abi::GroupSettings settings = group_settings(group, member.device);
      views.back().sms = std::max(views.back().sms, settings.sms);
      views.back().priority = settings.priority;
    }
  }
  return views;
}

std::vector<OperationView> Node::operation_views() const {
  std::vector<OperationView> views;
  const std::uint64_t now = clock_.now_ns();
  for (std::uint32_t device = 0; device < fleet_->size(); ++device) {
    for (const abi::OpView& op : fleet_->page(device).ops) {
      std::optional<OperationView> view = read_operation(op, now);
      if (!view) continue;
      view->device = fleet_->name(device);
      views.push_back(std::move(*view));
    }
  }
  return views;
}

}  // namespace epd
