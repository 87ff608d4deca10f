#include "node.h"

#include "base/event.h"

#include <sys/epoll.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <algorithm>
#include <limits>

namespace epd {
namespace {

constexpr std::uint64_t kMsNs = 1'000'000;

Caller caller_of(const PeerIdentity& peer) {
  return {peer.uid, peer.gids};
}

SessionLimits session_limits(const Config& config) {
  return {config.max_sessions, config.attach_ms};
}

// A process that ends and one that takes its place are heard of by different threads.
constexpr std::uint32_t kJoinConflictMs = 250;

membership::MembershipLimits membership_limits(const Config& config) {
  return {config.max_groups,   config.join_ms,  config.engine_ack_ms, config.engine_watchdog_ms,
          config.operation_ms, abi::kLastEpoch, kJoinConflictMs};
}

ArenaStore::Limits arena_limits(const Config& config) {
  return {config.effective_arena_bytes(), config.effective_routing_bytes(),
          MappingLimit::of_kernel(config.max_sessions)};
}

}  // namespace

std::uint64_t descriptor_limit() {
  rlimit limit{};
  return ::getrlimit(RLIMIT_NOFILE, &limit) == 0 ? limit.rlim_cur : 1024;
}

Node::Node(SupervisorOptions options)
    : options_(std::move(options)),
      config_(options_.config),
      notifier_(options_.notify_socket),
      descriptors_(descriptor_limit()),
      arenas_(arena_limits(config_), closer_, descriptors_),
      registry_(loop_clock_, *this, membership_limits(config_)) {
  event_log_.install();
  publish_access();
}

Status Node::start() {
  started_ns_ = clock_.now_ns();
  if (::getrandom(boot_id_.data(), boot_id_.size(), 0) != static_cast<ssize_t>(boot_id_.size()))
    return errno_status("getrandom");
  Result<std::unique_ptr<Loop>> loop = Loop::create(loop_clock_);
  if (!loop.ok()) return loop.status();
  loop_ = std::move(*loop);
  if (Status status = watch_signals(); !status.ok()) return status;

  if (Status status = find_devices(); !status.ok()) return status;
  std::vector<EngineFleet::DeviceToServe> devices;
  for (const NodeDevice& device : devices_) devices.push_back({device.name.text(), device.mode});
  Result<Listener> listener = Listener::open({config_.socket, config_.socket_mode, config_.socket_gid});
  if (!listener.ok()) return listener.status();
  SessionTable::Options table;
  table.daemon = std::string("epd ") + kDaemonVersion;
  table.boot_id = boot_id_;
  for (const NodeDevice& device : devices_)
    table.devices.push_back({device.name.text(), device.name.kind, device.facts.uuid});
  table.limits = session_limits(config_);
  Result<std::unique_ptr<SessionTable>> sessions = SessionTable::create(
      std::move(table), std::move(*listener), loop_clock_, *this, {closer_, descriptors_});
  if (!sessions.ok()) return sessions.status();
  sessions_ = std::move(*sessions);
  Result<Loop::WatchId> watch =
      loop_->add(sessions_->poll_fd(), EPOLLIN, [this](std::uint32_t) { sessions_->process(); });
  if (!watch.ok()) return watch.status();

  removals_.resize(devices.size());
  open_streams_.resize(devices.size());
  device_sms_.resize(devices.size());
  fleet_ = std::make_unique<EngineFleet>(*loop_, clock_, *this, fleet_options());
  if (Status status = start_mps_control(); !status.ok()) return status;
  return fleet_->start(devices);
}

int Node::run() {
  loop_->run([this] { return turn(); });
  return 0;
}

// Once per turn of the loop: what the events have led to, and what is due.
std::uint64_t Node::turn() {
  carry_out_actions();
  sessions_->tick();
  registry_.tick();
  check_removals();
  fleet_->tick();
  carry_out_actions();
  advance_phase();
  carry_out_actions();
  LogLimiter::tell_suppressed();
  std::uint64_t due = std::min(
      {sessions_->next_due_ns(), registry_.next_due_ns(), fleet_->next_due_ns(), next_lifecycle_due_ns()});
  for (const auto& pending : removals_) {
    for (const auto& [session, removal] : pending) due = std::min(due, removal.due_ns);
  }
  return due;
}

EngineFleet::Options Node::fleet_options() const {
  return {options_.engine_binary,
          config_.level(),
          config_.format(),
          config_.engine_watchdog_ms,
          config_.restart_backoff_min_ms,
          config_.restart_backoff_max_ms,
          config_.max_restarts_per_minute};
}

abi::Settings Node::settings(std::uint32_t device) const {
  return {device_sms_[device].value_or(config_.effective_sms(devices_[device].name.kind)),
          config_.operation_ms, config_.spin_us, config_.log_level};
}

void Node::apply_limits() {
  arenas_.set_limits(arena_limits(config_));
  sessions_->set_limits(session_limits(config_));
  registry_.set_limits(membership_limits(config_));
  fleet_->set_options(fleet_options());
  for (std::uint32_t i = 0; i < fleet_->size(); ++i) send(i, abi::LinkType::kSettings, settings(i));
}

// ---- sessions

Status Node::admitting() const {
  if (phase_ == Phase::kStarting || phase_ == Phase::kServing) return {};
  return {StatusCode::kAborted, "draining: this daemon takes no more sessions"};
}

Status Node::may_attach(const PeerIdentity& peer) {
  Status status = admitting();
  return status.ok() ? config_.access.may_attach(caller_of(peer)) : status;
}

Quota Node::max_sessions_of(const PeerIdentity& peer) {
  return config_.max_sessions_of(caller_of(peer));
}

Status Node::may_use_device(const PeerIdentity& peer, std::uint32_t device) {
  if (Status status = config_.access.may_use_device(caller_of(peer), fleet_->name(device)); !status.ok())
    return status;
  if (fleet_->state(device) != DeviceState::kFailed) return {};
  return internal_error(fleet_->name(device) +
                        " has failed: its engine died too often; see the daemon's log. An operator "
                        "starts it again with: epctl restart device " +
                        fleet_->name(device));
}

std::uint64_t Node::ending_sessions(std::uint32_t uid) const {
  std::uint64_t count = 0;
  for (const auto& pending : removals_) {
    for (const auto& [session, removal] : pending) count += removal.uid == uid ? 1 : 0;
  }
  return count;
}

void Node::session_opened(const Session& session) {
  tell_session(session);
}

void Node::tell_session(const Session& session) {
  send(session.device, abi::LinkType::kAddSession,
       abi::AddSession{session.id, session.peer.uid, session.peer.pid},
       {session.segments.a.get(), session.segments.b.get(), session.segments.ring_client.get()});
}

void Node::session_closed(Session session, const std::string& how) {
  stop_expelling(session.id);
  record_losses(session.id, std::nullopt, how);
  registry_.session_closed(session.id, how);
  carry_out_actions();
  if (!fleet_->is_ready(session.device)) return;
  send(session.device, abi::LinkType::kRemoveSession, abi::SessionRef{session.id});
  // Its operations may run to their end first, and its groups' breaks have two deadlines of their own.
  const std::uint64_t patience_ms =
      std::uint64_t{config_.operation_ms} + 3 * std::uint64_t{config_.engine_ack_ms};
  removals_[session.device][session.id] = {loop_->now_ns() + patience_ms * kMsNs, session.peer.uid,
                                           std::move(session.descriptors)};
}

void Node::check_removals() {
  const std::uint64_t now = loop_->now_ns();
  for (std::uint32_t device = 0; device < removals_.size(); ++device) {
    for (auto& [session, removal] : removals_[device]) {
      if (removal.due_ns > now) continue;
      removal.due_ns =
          now + std::uint64_t{config_.engine_ack_ms} * kMsNs;  // for one that is stopped, or dying
      fleet_->kill_unless_stopped(device, "session " + std::to_string(session) + " was not removed in time");
    }
  }
}

void Node::join_requested(const Session& session, std::uint32_t request_id, const abi::Join& join,
                          std::vector<UniqueFd> memory) {
  const Caller caller = caller_of(session.peer);
  Status status = admitting();
  if (status.ok()) {
    const std::string group = printable(join.group, abi::text_length(join.group));
    status = config_.access.may_join(caller, group);
    // Above every limit: not allowed to anybody, which the registry says.
    if (status.ok() && join.priority <= abi::kMaxPriority)
      status = config_.access.may_take_priority(caller, join.priority);
  }
  membership::ClientMemory kept;
  if (status.ok()) status = keep_memory(caller.uid, std::move(memory), kept);
  if (!status.ok()) {
    for (UniqueFd& fd : memory) closer_.close(std::move(fd), caller.uid);
    carry_out(membership::ReplyRefused{session.id, request_id, status});
    return;
  }
  registry_.join({session.id,
                  request_id,
                  session.peer.uid,
                  session.peer.pid,
                  session.device,
                  devices_[session.device].name.kind,
                  join,
                  {config_.max_groups_of(caller), config_.max_arena_bytes_of(caller),
                   config_.max_routing_bytes_of(caller)},
                  std::move(kept)});
  carry_out_actions();  // what waits in links by then counts for the next join
}

// Counted from now on: a join may wait for long before it has arenas. Whoever lets go of the memory last, the
// closer closes it.
Status Node::keep_memory(std::uint32_t uid, std::vector<UniqueFd> memory, membership::ClientMemory& out) {
  struct Kept {
    Kept(std::vector<UniqueFd> fds, std::uint32_t user, Closer& slowly)
        : memory(std::move(fds)), uid(user), closer(slowly) {}
    ~Kept() {
      for (UniqueFd& fd : memory) closer.close(std::move(fd), uid);
    }
    DescriptorShare share;
    std::vector<UniqueFd> memory;
    std::uint32_t uid;
    Closer& closer;
  };
  const auto kept = std::make_shared<Kept>(std::move(memory), uid, closer_);
  Result<DescriptorShare> share = descriptors_.take(uid, kept->memory.size());
  if (!share.ok()) return share.status();
  kept->share = std::move(*share);
  out = membership::ClientMemory(kept, &kept->memory);
  return {};
}

void Node::leave_requested(const Session& session, std::uint32_t request_id, const abi::Leave& leave) {
  record_losses(session.id, leave.member, "left");
  registry_.leave(session.id, request_id, leave.member);
}

// ---- engines

void Node::engine_ready(std::uint32_t device) {
  send(device, abi::LinkType::kSettings, settings(device));
  for (const auto& [id, session] : sessions_->connections()) {
    if (session.attached && session.device == device) tell_session(session);
  }
  for (const OpenStreams& open : std::exchange(open_streams_[device], {}))
    send(device, abi::LinkType::kCloseStreams, open.message, {open.user.get()});
  registry_.engine_up(device);
  send(device, abi::LinkType::kAllTold, abi::AllTold{});
}

void Node::engine_down(std::uint32_t device, const std::string& text, bool device_failed) {
  removals_[device].clear();
  if (device_failed) end_dying_sessions(device);
  for (const auto& [id, session] : sessions_->connections()) {
    if (session.attached && session.device == device) unserve_segments(session.segments);
  }
  registry_.engine_down(device, text);
}

void Node::engine_failed(std::uint32_t device, const std::string& text) {
  open_streams_[device].clear();
  std::vector<std::uint64_t> ids;
  for (const auto& [id, session] : sessions_->connections()) {
    if (session.attached && session.device == device) ids.push_back(id);
  }
  for (const std::uint64_t id : ids) sessions_->end(id, internal_error(text));
}

// Its process keeps what it has on the GPU: nothing of ours depends on that. Its streams are let go, and all
// that its kernels can write is memory that it has mapped itself.
void Node::session_failed(const abi::SessionFailed& message) {
  const std::string text(message.text, abi::text_length(message.text));
  const Session* session = sessions_->find(message.session_id);
  const EventOwner owner = session == nullptr ? kDaemonOwner : EventOwner{session->peer.uid};
  static LogLimiter limiter;
  limiter.record(EventKind::kRefused, LogLevel::kWarning, "session ended for an illegal submission",
                 {{"session", message.session_id}, {"reason", text}}, owner);
  sessions_->end(message.session_id, Status(message.status, text));
}

void Node::engine_message(std::uint32_t device, const Packet& packet) {
  const auto on = [&]<typename T>(auto&& handler, const T*) {
    Result<T> message = packet.read<T>();
    if (message.ok()) {
      handler(*message);
    } else {
      fleet_->kill(device, message.status().message());
    }
  };
  switch (static_cast<abi::LinkType>(packet.header.type)) {
    case abi::LinkType::kSessionFailed:
      return on([&](const auto& m) { session_failed(m); }, static_cast<abi::SessionFailed*>(nullptr));
    case abi::LinkType::kSessionRemoved:
      return on([&](const auto& m) { removals_[device].erase(m.session_id); },
                static_cast<abi::SessionRef*>(nullptr));
    case abi::LinkType::kGroupReady:
      return on([&](const auto& m) { registry_.group_ready(device, m); },
                static_cast<abi::GroupReady*>(nullptr));
    case abi::LinkType::kGroupWaits:
      return on([&](const auto& m) { registry_.group_waits(device, m); },
                static_cast<abi::GroupWaits*>(nullptr));
    case abi::LinkType::kMemberStopped:
      return on([&](const auto& m) { registry_.member_stopped(device, m); },
                static_cast<abi::MemberRef*>(nullptr));
    case abi::LinkType::kBreakRequest:
      return on([&](const auto& m) { registry_.break_requested(device, m); },
                static_cast<abi::Break*>(nullptr));
    case abi::LinkType::kBroken:
      return on([&](const auto& m) { registry_.broken(device, m); }, static_cast<abi::Broken*>(nullptr));
    case abi::LinkType::kResumed:
      return on([&](const auto& m) { registry_.resumed(device, m); }, static_cast<abi::Resumed*>(nullptr));
    case abi::LinkType::kRankRefused:
      return on([&](const auto& m) { registry_.rank_refused(device, m); },
                static_cast<abi::RankRefused*>(nullptr));
    case abi::LinkType::kGroupRemoved:
      return on([&](const auto& m) { registry_.group_removed(device, m); },
                static_cast<abi::GroupRef*>(nullptr));
    default: fleet_->kill(device, "it sent message type " + std::to_string(packet.header.type));
  }
}

// ---- memory of members

Status Node::acquire(const membership::MemoryOwner& owner, const UserQuotas& quotas,
                     const abi::GroupShape& shape, const abi::Bindings& bindings,
                     const membership::ClientMemory& memory) {
  // An engine that does not read its link: what is sent meanwhile waits there, with descriptors of its own.
  const std::uint64_t waiting = fleet_->queued_descriptors();
  if (waiting > descriptors_.allowed() / 4) {
    return resource_exhausted("messages to engines that do not read them hold " + std::to_string(waiting) +
                              " descriptors; allowed for another join: " +
                              std::to_string(descriptors_.allowed() / 4) + " (a quarter of RLIMIT_NOFILE)");
  }
  return arenas_.acquire({owner.group_id, owner.rank}, owner.uid, quotas, devices_[owner.device].name,
                         {shape, bindings, memory});
}

void Node::release(std::uint64_t group_id, std::uint32_t rank) {
  arenas_.release(group_id, rank);
}

// If no descriptor is left, the streams wait until their client leaves.
void Node::close_streams_later(std::uint32_t device, std::uint64_t group_id, std::uint32_t rank) {
  const MemberArenas* arenas = arenas_.find(group_id, rank);
  Result<UniqueFd> user = duplicate(arenas->user.get());
  if (user.ok()) open_streams_[device].push_back({arenas->streams(), std::move(*user)});
}

std::uint64_t Node::next_index(std::uint64_t group_id, std::uint32_t rank) {
  return arenas_.next_index(group_id, rank);
}

void Node::mark_lost(std::uint64_t group_id, std::uint32_t rank, const std::string& text, StatusCode cause,
                     std::int32_t culprit_rank) {
  arenas_.mark_lost(group_id, rank, text, cause, culprit_rank);
}

}  // namespace epd
