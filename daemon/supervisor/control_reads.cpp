#include "control_reads.h"

#include "base/log.h"
#include "cluster/settings.h"
#include "common/build_info.h"
#include "common/gpu_uuid.h"
#include "device_list.h"
#include "fleet.h"
#include "live_config.h"
#include "loop.h"
#include "member_memory_store.h"
#include "membership/deciders.h"
#include "messages.h"
#include "process_state.h"
#include "session/session_table.h"

#include <unistd.h>
#include <algorithm>
#include <ctime>

namespace epd::supervisor {
namespace {

constexpr std::uint64_t kMsNs = 1'000'000;

std::string version_text(std::uint32_t major, std::uint32_t minor) {
  return std::to_string(major) + "." + std::to_string(minor);
}

void fill_counters(v1::Device& message, const abi::EnginePage& page) {
  const auto read = [](const auto& counter) { return counter.load(std::memory_order_relaxed); };
  message.set_sms(read(page.sms));
  message.set_sleeping(read(page.sleep.sleeping) != 0);
  message.set_ops_submitted(read(page.ops_submitted));
  message.set_ops_completed(read(page.ops_completed));
  message.set_ops_failed(read(page.ops_failed));
  message.set_bytes_dispatched(read(page.bytes_dispatched));
  message.set_bytes_combined(read(page.bytes_combined));
  message.set_submissions_refused(read(page.submissions_refused));
  message.set_times_stuck(read(page.times_stuck));
  message.set_busy_us(read(page.busy_ns) / 1000);
}

void fill(v1::GroupMember& message, const MemberArenas& arenas) {
  std::uint64_t mapped = 0;
  for (const auto& [number, entry] : arenas.mapped) mapped += entry.range.bytes;
  message.set_registered_bytes(mapped);
  for (std::size_t i = 0; i < abi::kNumRowsAre; ++i) {
    if (arenas.rows[i] == 0) continue;
    v1::RowCount& count = *message.add_rows();
    count.set_where(abi::kRowsAreNames[i]);
    count.set_times(arenas.rows[i]);
  }
}

void fill(v1::Group& message, const membership::Group& group, const Rooms& rooms, std::uint64_t now) {
  message.set_group_id(group.id);
  message.set_name(group.name);
  message.set_uid(group.uid);
  message.set_state(message_of(group.phase()));
  *message.mutable_shape() = message_of(group.shape);
  message.set_epoch(group.epoch);
  message.set_age_ms((now - group.created_ns) / kMsNs);
  if (group.reason.cause != StatusCode::kOk)
    message.set_cause(std::string(status_name(group.reason.cause)) + ": " + group.reason.text);
  for (const auto& [rank, member] : group.members) {
    v1::GroupMember& out = *message.add_members();
    out.set_rank(rank);
    out.set_session_id(member.session.number);
    out.set_device(rooms.fleet[member.engine.device].name());
    out.set_gone(member.gone());
    out.set_pid(member.pid);
    if (const MemberArenas* arenas = rooms.memory.find(group.id, rank); arenas != nullptr) fill(out, *arenas);
  }
  for (const std::uint32_t rank : rooms.deciders.missing_ranks(group)) message.add_missing_ranks(rank);
}

Status in_no_cluster() {
  return {StatusCode::kUnsupported, "this daemon is in no cluster: cluster.name is not set"};
}

void add_far(v1::Group& message, const std::vector<membership::Deciders::FarRank>& ranks) {
  if (ranks.empty()) return;
  for (const membership::Deciders::FarRank& rank : ranks) {
    v1::GroupMember& member = *message.add_members();
    member.set_rank(rank.rank);
    member.set_device("host:" + std::to_string(rank.device));
    member.set_node(rank.node);
  }
  sort_by(*message.mutable_members(), [](const v1::GroupMember& member) { return member.rank(); });
}

}  // namespace

ControlReads::ControlReads(const Rooms& rooms, const Parts& parts) : rooms_(rooms), parts_(parts) {}

std::vector<ConfigEntry> ControlReads::config_entries() const {
  return rooms_.config->entries;
}

std::string ControlReads::boot_id() const {
  return hexadecimal(rooms_.life.boot_id);
}

HealthFacts ControlReads::health() const {
  HealthFacts facts;
  facts.serving = parts_.lifecycle.phase() == DaemonPhase::kServing;
  facts.socket_problem = parts_.lifecycle.socket_problem();
  if (parts_.cluster != nullptr) facts.cluster_problem = parts_.cluster->view().problem;
  for (std::uint32_t i = 0; i < rooms_.fleet.size(); ++i)
    facts.devices[rooms_.fleet[i].name()] = rooms_.fleet[i].state_now() == DeviceState::kReady;
  return facts;
}

v1::DaemonStatus ControlReads::daemon_status() const {
  const DaemonPhase phase = parts_.lifecycle.phase();
  v1::DaemonStatus message;
  message.set_version(build_info().version);
  message.set_boot_id(boot_id());
  message.set_pid(::getpid());
  message.set_uptime_ms((rooms_.clock.now_ns() - rooms_.life.started_ns) / kMsNs);
  message.set_state(phase == DaemonPhase::kStarting  ? v1::DAEMON_STATE_STARTING
                    : phase == DaemonPhase::kServing ? v1::DAEMON_STATE_SERVING
                                                     : v1::DAEMON_STATE_DRAINING);
  if (phase == DaemonPhase::kDraining) {
    const std::uint64_t due = parts_.lifecycle.drain_due_ns();
    const std::uint64_t now = rooms_.loop.now_ns();
    message.set_drain_left_ms(due > now ? (due - now) / kMsNs : 0);
  } else if (phase == DaemonPhase::kStopping) {
    message.set_drain_left_ms(0);
  }
  message.set_socket_path(rooms_.config->socket);
  message.set_control_path(rooms_.config->control_socket);
  message.set_config_generation(rooms_.config.generation());
  message.set_last_reload_error(rooms_.config.last_error());
  message.set_sessions(rooms_.sessions.attached());
  message.set_groups(rooms_.deciders.num_groups());
  message.set_arena_bytes(rooms_.memory.total_bytes());
  message.set_sessions_total(rooms_.sessions.total_attached());
  message.set_sessions_refused(rooms_.sessions.total_refused());
  message.set_mps_control_error(parts_.gpu_work.error());
  message.set_log_lines_lost(log_lines_lost());
  message.set_log_problem(log_problem());
  message.set_socket_problem(parts_.lifecycle.socket_problem());
  const auto add_limit = [&message](const char* key, std::uint64_t used, std::uint64_t allowed) {
    v1::LimitUse& limit = *message.add_limits();
    limit.set_key(key);
    limit.set_used(used);
    limit.set_allowed(allowed);
  };
  const auto& config = rooms_.config;
  add_limit("limits.max_sessions", rooms_.sessions.attached(), config->max_sessions);
  add_limit("limits.max_groups", rooms_.deciders.num_groups(), config->max_groups);
  add_limit("limits.max_arena_bytes", rooms_.memory.total_bytes(), config->effective_arena_bytes());
  add_limit("limits.max_routing_bytes", rooms_.memory.total_routing_bytes(),
            config->effective_routing_bytes());
  if (parts_.cluster != nullptr)
    *message.mutable_cluster() = message_of(parts_.cluster->settings(), parts_.cluster->view());
  return message;
}

Result<v1::ListNodesResponse> ControlReads::list_nodes() const {
  if (parts_.cluster == nullptr) return in_no_cluster();
  const cluster::View view = parts_.cluster->view();
  v1::ListNodesResponse list;
  *list.mutable_cluster() = message_of(parts_.cluster->settings(), view);
  for (const cluster::NodeView& node : view.nodes) *list.add_nodes() = message_of(node);
  return list;
}

// An engine's counts are lost with it. So an engine that is down shows no others.
Result<v1::ListFarEnginesResponse> ControlReads::list_far_engines() const {
  if (parts_.cluster == nullptr) return in_no_cluster();
  v1::ListFarEnginesResponse list;
  for (std::uint32_t i = 0; i < rooms_.fleet.size(); ++i) {
    const DeviceState state = rooms_.fleet[i].state_now();
    v1::NetworkEngine& engine = *list.add_engines();
    engine.set_device(rooms_.fleet[i].name());
    engine.set_state(message_of(state));
    if (state == DeviceState::kReady || state == DeviceState::kStopped)
      add_far_engines(list, engine, rooms_.fleet[i].memory().page().far, rooms_.clock.now_ns());
    if (std::string problem = parts_.network.problem(i); !problem.empty())
      engine.set_problem(std::move(problem));
  }
  sort(list);
  return list;
}

void ControlReads::add_certificate(v1::ListNodesResponse& nodes) const {
  if (!parts_.cluster_settings || parts_.cluster_settings->insecure) return;
  const cluster::Settings& settings = *parts_.cluster_settings;
  cluster::CertificateFacts facts;
  const Status status = cluster::check_certificates(settings, &facts);
  v1::CertificateStatus& message = *nodes.mutable_certificate();
  message.set_file(settings.tls_cert);
  for (std::string& name : facts.names) message.add_names(std::move(name));
  if (facts.expires_unix_s != 0) message.set_seconds_left(facts.expires_unix_s - std::time(nullptr));
  message.set_error(status.message());
}

// In the order of names and numbers, as they were found.
v1::ListDevicesResponse ControlReads::list_devices() const {
  v1::ListDevicesResponse list;
  for (std::uint32_t i = 0; i < rooms_.fleet.size(); ++i) {
    v1::Device& message = *list.add_devices();
    message.set_name(rooms_.fleet[i].name());
    message.set_state(message_of(rooms_.fleet[i].state_now()));
    message.set_engine_pid(rooms_.fleet[i].pid());
    message.set_restarts(rooms_.fleet[i].restarts());
    message.set_last_exit(rooms_.fleet[i].last_exit());
    message.set_sessions(rooms_.sessions.attached_on(i));
    message.set_heartbeat_age_ms(rooms_.fleet[i].heartbeat_age_ms());
    message.set_sms_set(parts_.settings.sms_set(i));
    fill_counters(message, rooms_.fleet[i].memory().page());
    if (rooms_.devices[i].name.kind == abi::DeviceKind::kCuda) fill_cuda(*message.mutable_cuda(), i);
  }
  return list;
}

void ControlReads::fill_cuda(v1::CudaDevice& message, std::uint32_t index) const {
  const DeviceList::Device& device = rooms_.devices[index];
  const device::DeviceFacts& facts = device.facts;
  message.set_model(facts.model);
  message.set_compute_capability(version_text(facts.compute / 10, facts.compute % 10));
  message.set_cuda_version(version_text(facts.driver / 1000, facts.driver % 1000 / 10));
  message.set_num_sms(facts.num_sms);
  message.set_mps(facts.mps);
  message.set_uuid(uuid_text(facts.uuid));
  for (const std::uint32_t other : device.unreachable)
    message.add_unreachable(rooms_.devices[other].name.text());
}

v1::ListSessionsResponse ControlReads::list_sessions() const {
  std::map<std::uint64_t, std::uint64_t> arena_bytes;
  rooms_.deciders.each([&](const membership::Group& group) {
    for (const auto& [rank, member] : group.members) {
      const MemberArenas* arenas = rooms_.memory.find(group.id, rank);
      if (arenas != nullptr) arena_bytes[member.session.number] += arenas->bytes;
    }
  });
  v1::ListSessionsResponse list;
  const std::uint64_t now = rooms_.loop.now_ns();
  for (const auto& [id, session] : rooms_.sessions.connections()) {
    if (!session.attached) continue;
    v1::Session& message = *list.add_sessions();
    message.set_session_id(id);
    message.set_uid(session.peer.uid);
    message.set_gid(session.peer.gid);
    message.set_pid(session.peer.pid);
    message.set_device(rooms_.fleet[session.device].name());
    message.set_library(session.library);
    message.set_program(session.peer.program);
    message.set_cgroup(session.peer.cgroup);
    message.set_claimed_pid(session.claimed_pid);
    message.set_claimed_host(session.claimed_host);
    message.set_age_ms((now - session.accepted_ns) / kMsNs);
    message.set_groups(rooms_.deciders.memberships(id));
    message.set_arena_bytes(arena_bytes[id]);
  }
  add_users(list);
  return list;
}

void ControlReads::mark_stopped_clients(v1::ListGroupsResponse& groups) {
  for (v1::Group& group : *groups.mutable_groups()) {
    for (v1::GroupMember& member : *group.mutable_members())
      member.set_client_stopped(!member.gone() && member.pid() != 0 && is_stopped(member.pid()));
  }
}

v1::ListGroupsResponse ControlReads::list_groups() const {
  v1::ListGroupsResponse list;
  const std::uint64_t now = rooms_.loop.now_ns();
  rooms_.deciders.each([&](const membership::Group& group) {
    v1::Group& message = *list.add_groups();
    fill(message, group, rooms_, now);
    for (const auto& [rank, member] : group.members) {
      if (const MemberArenas* arenas = rooms_.memory.find(group.id, rank); arenas != nullptr)
        message.set_arena_bytes(message.arena_bytes() + arenas->bytes);
      const abi::GroupSettings settings = parts_.settings.of_group(group.settings_on(member.engine));
      message.set_sms(std::max(message.sms(), settings.sms));
      message.set_priority(settings.priority);
      message.set_linger_us(settings.linger_us);
    }
    const GroupSettingsChange set = parts_.settings.set_for_group(group.id);
    message.set_sms_set(set.sms.has_value());
    message.set_priority_set(set.priority.has_value());
    message.set_linger_us_set(set.linger_us.has_value());
    message.set_coordinator_away_ms(rooms_.deciders.coordinator_away_ms(group.id));
    add_far(message, rooms_.deciders.far_ranks(group.id));
  });
  return list;
}

std::vector<WaitingGroup> ControlReads::waiting_groups(std::optional<std::uint64_t> group_id) const {
  std::vector<WaitingGroup> groups;
  rooms_.deciders.each([&](const membership::Group& group) {
    if (group_id && *group_id != group.id) return;
    WaitingGroup waiting{group.id, group.name, group.shape, {}, rooms_.memory.gone_waits(group.id)};
    for (const auto& [rank, member] : group.members) {
      if (const MemberArenas* arenas = rooms_.memory.find(group.id, rank); arenas != nullptr)
        waiting.ranks.push_back({rank, rooms_.fleet[member.engine.device].name(), arenas->board_map});
    }
    groups.push_back(std::move(waiting));
  });
  std::sort(groups.begin(), groups.end(), [](const auto& a, const auto& b) { return a.id < b.id; });
  return groups;
}

std::vector<bool> ControlReads::stopped_engines() const {
  std::vector<bool> stopped(rooms_.fleet.size());
  for (std::uint32_t i = 0; i < rooms_.fleet.size(); ++i)
    stopped[i] = rooms_.fleet[i].state_now() == DeviceState::kStopped;
  return stopped;
}

v1::ListOperationsResponse ControlReads::list_operations(const std::vector<bool>& stopped) const {
  v1::ListOperationsResponse list;
  const std::uint64_t now = rooms_.clock.now_ns();
  for (std::uint32_t device = 0; device < rooms_.fleet.size(); ++device) {
    const int before = list.operations_size();
    for (const abi::OpView& op : rooms_.fleet[device].memory().page().ops)
      add_operation(list, op, rooms_.fleet[device].name(), now);
    for (int i = before; stopped[device] && i < list.operations_size(); ++i)
      mark_stopped(*list.mutable_operations(i));
  }
  return list;
}

v1::GetStatisticsResponse ControlReads::statistics() const {
  std::vector<DevicePage> pages;
  for (std::uint32_t i = 0; i < rooms_.fleet.size(); ++i)
    pages.push_back({rooms_.fleet[i].name(), rooms_.fleet[i].memory().page()});
  return message_of(pages);
}

}  // namespace epd::supervisor
