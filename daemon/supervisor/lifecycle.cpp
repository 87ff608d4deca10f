#include "lifecycle.h"

#include "base/event.h"
#include "device_list.h"
#include "fleet.h"
#include "live_config.h"
#include "loop.h"
#include "member_memory_store.h"
#include "membership/deciders.h"

#include <signal.h>
#include <sys/epoll.h>
#include <sys/signalfd.h>
#include <unistd.h>
#include <algorithm>
#include <limits>

namespace epd::supervisor {
namespace {

constexpr std::uint64_t kMsNs = 1'000'000;
constexpr std::uint32_t kStopGraceMs = 2'000;
constexpr std::uint64_t kEndMs = 10'000;  // from the end of a drain to the process's: more than it takes
constexpr std::uint64_t kNever = std::numeric_limits<std::uint64_t>::max();

sigset_t handled_signals() {
  sigset_t set;
  ::sigemptyset(&set);
  for (const int signal : {SIGTERM, SIGINT, SIGHUP}) ::sigaddset(&set, signal);
  return set;
}

// Null: the state is no trouble.
const char* trouble_of(DeviceState state) {
  switch (state) {
    case DeviceState::kFailed: return " has failed";
    case DeviceState::kStopped: return " is stopped";
    case DeviceState::kRestarting: return " restarts";
    case DeviceState::kStarting:
    case DeviceState::kReady: break;
  }
  return nullptr;
}

const char* name_of(DaemonPhase phase) {
  switch (phase) {
    case DaemonPhase::kStarting: return "starting";
    case DaemonPhase::kServing: return "serving";
    case DaemonPhase::kDraining: return "draining";
    case DaemonPhase::kStopping: return "stopping";
  }
  return "";
}

// "limits.max_groups 256 -> 8, log.level info -> debug"
std::string text_of(const std::vector<ConfigChange>& changes) {
  std::string text;
  for (const ConfigChange& change : changes) {
    text.append(text.empty() ? "" : ", ").append(change.key).append(" ");
    text.append(change.before.empty() ? "\"\"" : change.before).append(" -> ");
    text.append(change.after.empty() ? "\"\"" : change.after);
  }
  return text.empty() ? "nothing" : text;
}

void record_refused(const Operator& by, const Status& why) {
  record_event(EventKind::kConfigRefused, LogLevel::kError, "configuration not reloaded",
               {{"reason", why.message()}, {"by_uid", by.uid}, {"by_pid", by.pid}});
}

std::string count_of(std::size_t count, const char* what) {
  return std::to_string(count) + " " + what + (count == 1 ? "" : "s");
}

}  // namespace

void Supervisor::block_signals() {
  const sigset_t set = handled_signals();
  ::pthread_sigmask(SIG_BLOCK, &set, nullptr);
}

Lifecycle::Lifecycle(const Rooms& rooms, const Parts& parts, const SupervisorOptions& options)
    : rooms_(rooms), parts_(parts), options_(options), notifier_(options.notify_socket) {}

Status Lifecycle::watch_signals() {
  const sigset_t set = handled_signals();
  signals_.reset(::signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK));
  if (!signals_.valid()) return errno_status("signalfd");
  return rooms_.loop.add(signals_.get(), EPOLLIN, [this](std::uint32_t) { on_signal(); }).status();
}

void Lifecycle::on_signal() {
  signalfd_siginfo info{};
  while (::read(signals_.get(), &info, sizeof(info)) == static_cast<ssize_t>(sizeof(info))) {
    log_event(LogLevel::kInfo, "signal",
              {{"number", info.ssi_signo}, {"from_pid", info.ssi_pid}, {"from_uid", info.ssi_uid}});
    const Operator by{info.ssi_uid, static_cast<std::int32_t>(info.ssi_pid), {}, {}};
    if (info.ssi_signo == SIGHUP) {
      (void)reload(by);  // the log says why not
    } else if (phase_ == DaemonPhase::kDraining) {
      begin_stopping();  // at the second signal: at once
    } else {
      drain(by, 0);
    }
  }
}

Result<std::vector<ConfigChange>> Lifecycle::reload(const Operator& by) {
  if (!admitting().ok()) {
    const Status status(StatusCode::kAborted, "the daemon is draining: its configuration stays");
    record_refused(by, status);
    return status;
  }
  notifier_.send("RELOADING=1\nMONOTONIC_USEC=" + std::to_string(rooms_.clock.now_ns() / 1000));
  const std::uint32_t sms = rooms_.config->device_sms;
  Result<std::vector<ConfigChange>> changes = rooms_.config.reload();
  if (changes.ok()) {
    // An operator's setting stays until the file changes.
    if (rooms_.config->device_sms != sms) parts_.settings.forget_sms();
    apply_config();
    record_event(EventKind::kConfigReloaded, LogLevel::kInfo, "configuration reloaded",
                 {{"generation", rooms_.config.generation()},
                  {"changed", text_of(*changes)},
                  {"by_uid", by.uid},
                  {"by_pid", by.pid}});
  } else {
    record_refused(by, changes.status());
  }
  if (phase_ == DaemonPhase::kServing) notifier_.send("READY=1");
  return changes;
}

Result<std::vector<ConfigChange>> Lifecycle::set_options(const Operator& by, const OptionSettings& options) {
  Result<std::vector<ConfigChange>> changes = rooms_.config.set(options);
  if (!changes.ok()) return changes;
  apply_config();
  record_event(EventKind::kSettingChanged, LogLevel::kInfo, "options set by the operator",
               {{"changed", text_of(*changes)}, {"by_uid", by.uid}, {"by_pid", by.pid}});
  return changes;
}

void Lifecycle::apply_config() {
  const LiveConfig& config = rooms_.config;
  log_set_levels(config->log_levels());
  rooms_.memory.set_limits(config.arena_limits());
  rooms_.sessions.set_limits(config.session_limits());
  rooms_.deciders.set_limits(config.membership_limits());
  rooms_.fleet.set_options(config.fleet_options(options_.engine_binary));
  for (std::uint32_t i = 0; i < rooms_.fleet.size(); ++i)
    parts_.orders.send(i, abi::LinkType::kSettings, parts_.settings.of_device(i));
}

Status Lifecycle::admitting() const {
  if (phase_ == DaemonPhase::kStarting || phase_ == DaemonPhase::kServing) return {};
  return {StatusCode::kAborted, "draining: this daemon takes no more sessions"};
}

void Lifecycle::drain(const Operator& by, std::uint32_t timeout_ms) {
  if (phase_ == DaemonPhase::kStopping) return;
  const std::uint64_t allowed_ms = timeout_ms != 0 ? timeout_ms : rooms_.config->drain_ms;
  const std::uint64_t due_ns = rooms_.loop.now_ns() + allowed_ms * kMsNs;
  if (phase_ == DaemonPhase::kDraining) {
    if (due_ns >= drain_due_ns_) return;  // the deadline can only come sooner
    record_event(EventKind::kDaemonState, LogLevel::kInfo, "draining sooner",
                 {{"timeout_ms", allowed_ms}, {"by_uid", by.uid}, {"by_pid", by.pid}});
    drain_due_ns_ = due_ns;
    return;
  }
  phase_ = DaemonPhase::kDraining;
  drain_due_ns_ = due_ns;
  record_event(EventKind::kDaemonState, LogLevel::kInfo, "draining",
               {{"sessions", rooms_.sessions.attached()},
                {"timeout_ms", allowed_ms},
                {"by_uid", by.uid},
                {"by_pid", by.pid}});
  rooms_.deciders.handle(membership::NodeDrains{membership::kLocalNode, admitting()});
  if (on_serving_) on_serving_(false);
  notify_stopping(allowed_ms);
}

// From now on TimeoutStopSec runs, and systemd kills what it finds afterwards. A drain may take longer.
void Lifecycle::notify_stopping(std::uint64_t drain_ms) {
  notifier_.send("STOPPING=1\nEXTEND_TIMEOUT_USEC=" + std::to_string((drain_ms + kEndMs) * 1000));
}

void Lifecycle::begin_stopping() {
  phase_ = DaemonPhase::kStopping;
  rooms_.sessions.stop_listening();
  rooms_.sessions.end_all({StatusCode::kDaemonLost, "the daemon has stopped; detach and attach again"});
  rooms_.fleet.stop(kStopGraceMs);
}

void Lifecycle::tick() {
  const std::uint64_t now = rooms_.clock.now_ns();
  if (phase_ == DaemonPhase::kStarting && rooms_.fleet.all_settled()) {
    phase_ = DaemonPhase::kServing;
    record_event(EventKind::kDaemonState, LogLevel::kInfo, "serving",
                 {{"devices", rooms_.fleet.size()},
                  {"socket", rooms_.config->socket},
                  {"after_ms", (now - rooms_.life.started_ns) / kMsNs}});
    parts_.gpu_work.probe();
    sockets_.begin(rooms_.config->socket, rooms_.config->control_socket);
    if (on_serving_) on_serving_(true);
    notifier_.send("READY=1");
  }
  if (phase_ == DaemonPhase::kServing) sockets_.tick(now);
  if (phase_ == DaemonPhase::kDraining &&
      (rooms_.sessions.attached() == 0 || rooms_.loop.now_ns() >= drain_due_ns_))
    begin_stopping();
  if (phase_ == DaemonPhase::kStopping && rooms_.fleet.all_stopped()) {
    record_event(EventKind::kDaemonState, LogLevel::kInfo, "stopped");
    rooms_.loop.stop();
  }
  if (!notifier_.enabled()) return;
  notify_status();
  if (options_.watchdog_us != 0 && next_ping_ns_ <= now) {
    next_ping_ns_ = now + std::max<std::uint64_t>(options_.watchdog_us * 1000 / 2, 1000 * kMsNs);
    if (rooms_.fleet.all_loops_advanced() || phase_ != DaemonPhase::kServing) notifier_.send("WATCHDOG=1");
  }
}

void Lifecycle::notify_status() {
  std::string bad;
  const bool stopping = phase_ == DaemonPhase::kStopping;  // engines that end now are in no trouble
  for (std::uint32_t i = 0; i < rooms_.fleet.size() && !stopping; ++i) {
    const char* word = trouble_of(rooms_.fleet[i].seen_state());
    if (word != nullptr) bad += (bad.empty() ? " (" : ", ") + rooms_.fleet[i].name() + word;
  }
  if (!bad.empty()) bad += ")";
  std::string status = std::string("STATUS=") + name_of(phase_) + ": " +
                       count_of(rooms_.fleet.size(), "device") + bad + ", " +
                       count_of(rooms_.sessions.attached(), "session") + ", " +
                       count_of(rooms_.deciders.num_groups(), "group");
  if (!rooms_.config.last_error().empty()) status += "; the last reload was refused, the log says why";
  if (!socket_problem().empty()) status += "; " + socket_problem();
  if (status == last_status_) return;
  last_status_ = std::move(status);
  notifier_.send(last_status_);
}

std::uint64_t Lifecycle::next_due_ns() const {
  std::uint64_t due = kNever;
  if (phase_ == DaemonPhase::kDraining) due = drain_due_ns_;
  if (notifier_.enabled() && options_.watchdog_us != 0) {
    const std::uint64_t now = rooms_.clock.now_ns();
    due = std::min(due, rooms_.loop.now_ns() + (next_ping_ns_ > now ? next_ping_ns_ - now : 0));
  }
  return due;
}

}  // namespace epd::supervisor
