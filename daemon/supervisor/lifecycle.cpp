// Start, reload, drain and stop.
#include "base/event.h"
#include "node.h"

#include <signal.h>
#include <sys/epoll.h>
#include <sys/signalfd.h>
#include <unistd.h>
#include <algorithm>
#include <limits>

namespace epd {
namespace {

constexpr std::uint64_t kMsNs = 1'000'000;
constexpr std::uint32_t kStopGraceMs = 2'000;
constexpr std::uint64_t kNever = std::numeric_limits<std::uint64_t>::max();

sigset_t handled_signals() {
  sigset_t set;
  ::sigemptyset(&set);
  for (const int signal : {SIGTERM, SIGINT, SIGHUP}) ::sigaddset(&set, signal);
  return set;
}

// Null: none.
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

std::string count_of(std::size_t count, const char* what) {
  return std::to_string(count) + " " + what + (count == 1 ? "" : "s");
}

}  // namespace

void Supervisor::block_signals() {
  const sigset_t set = handled_signals();
  ::pthread_sigmask(SIG_BLOCK, &set, nullptr);
}

Status Node::watch_signals() {
  const sigset_t set = handled_signals();
  signals_.reset(::signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK));
  if (!signals_.valid()) return errno_status("signalfd");
  return loop_->add(signals_.get(), EPOLLIN, [this](std::uint32_t) { on_signal(); }).status();
}

void Node::on_signal() {
  signalfd_siginfo info{};
  while (::read(signals_.get(), &info, sizeof(info)) == static_cast<ssize_t>(sizeof(info))) {
    log_event(LogLevel::kInfo, "signal",
              {{"number", info.ssi_signo}, {"from_pid", info.ssi_pid}, {"from_uid", info.ssi_uid}});
    const Operator by{info.ssi_uid, static_cast<std::int32_t>(info.ssi_pid), {}, {}};
    if (info.ssi_signo == SIGHUP) {
      reload(by);
    } else if (phase_ == Phase::kDraining) {
      begin_stopping();  // the second one: at once
    } else {
      drain(by, 0);
    }
  }
}

void Node::reload(const Operator& by) {
  if (phase_ != Phase::kStarting && phase_ != Phase::kServing) return;
  notifier_.send("RELOADING=1\nMONOTONIC_USEC=" + std::to_string(clock_.now_ns() / 1000));
  Result<Config> loaded = reload_config(config_, options_.sources);
  if (loaded.ok()) {
    // What was set by hand stays until the file says something new.
    if (loaded->device_sms != config_.device_sms) device_sms_.assign(device_sms_.size(), std::nullopt);
    config_ = std::move(*loaded);
    publish_access();
    log_set_level(config_.level());
    apply_limits();
    ++config_generation_;
    last_reload_error_.clear();
    record_event(EventKind::kConfigReloaded, LogLevel::kInfo, "configuration reloaded",
                 {{"generation", config_generation_}, {"by_uid", by.uid}, {"by_pid", by.pid}});
  } else {
    last_reload_error_ = loaded.status().message();
    record_event(EventKind::kConfigRefused, LogLevel::kError, "configuration not reloaded",
                 {{"reason", last_reload_error_}, {"by_uid", by.uid}, {"by_pid", by.pid}});
  }
  if (phase_ == Phase::kServing) notifier_.send("READY=1");
}

// The policy that other threads ask.
void Node::publish_access() {
  auto access = std::make_shared<const AccessPolicy>(config_.access);
  const std::lock_guard lock(access_mutex_);
  access_ = std::move(access);
}

void Node::drain(const Operator& by, std::uint32_t timeout_ms) {
  if (phase_ == Phase::kStopping) return;
  const std::uint64_t allowed_ms = timeout_ms != 0 ? timeout_ms : config_.drain_ms;
  const std::uint64_t due_ns = loop_->now_ns() + allowed_ms * kMsNs;
  if (phase_ == Phase::kDraining) {
    if (due_ns >= drain_due_ns_) return;  // sooner than asked for is never too late
    record_event(EventKind::kDaemonState, LogLevel::kInfo, "draining sooner",
                 {{"timeout_ms", allowed_ms}, {"by_uid", by.uid}, {"by_pid", by.pid}});
    drain_due_ns_ = due_ns;
    return;
  }
  phase_ = Phase::kDraining;
  drain_due_ns_ = due_ns;
  record_event(EventKind::kDaemonState, LogLevel::kInfo, "draining",
               {{"sessions", sessions_->attached()},
                {"timeout_ms", allowed_ms},
                {"by_uid", by.uid},
                {"by_pid", by.pid}});
  registry_.refuse_conflicts(admitting());
  if (on_serving_) on_serving_(false);
  notifier_.send("STOPPING=1");
}

void Node::begin_stopping() {
  phase_ = Phase::kStopping;
  sessions_->stop_listening();
  sessions_->end_all({StatusCode::kAborted, "the daemon is stopping"});
  fleet_->stop(kStopGraceMs);
}

void Node::advance_phase() {
  const std::uint64_t now = clock_.now_ns();
  if (phase_ == Phase::kStarting && fleet_->all_settled()) {
    phase_ = Phase::kServing;
    record_event(
        EventKind::kDaemonState, LogLevel::kInfo, "serving",
        {{"devices", fleet_->size()}, {"socket", config_.socket}, {"after_ms", (now - started_ns_) / kMsNs}});
    probe_mps_control();
    if (on_serving_) on_serving_(true);
    notifier_.send("READY=1");
  }
  if (phase_ == Phase::kDraining && (sessions_->attached() == 0 || loop_->now_ns() >= drain_due_ns_))
    begin_stopping();
  if (phase_ == Phase::kStopping && fleet_->all_stopped()) {
    record_event(EventKind::kDaemonState, LogLevel::kInfo, "stopped");
    loop_->stop();
  }
  if (!notifier_.enabled()) return;
  notify_status(phase_ == Phase::kStarting ? "starting" : phase_ == Phase::kServing ? "serving" : "draining");
  if (options_.watchdog_us != 0 && next_ping_ns_ <= now) {
    next_ping_ns_ = now + std::max<std::uint64_t>(options_.watchdog_us * 1000 / 2, 1000 * kMsNs);
    if (fleet_->all_loops_advanced() || phase_ != Phase::kServing) notifier_.send("WATCHDOG=1");
  }
}

void Node::notify_status(const std::string& prefix) {
  std::string bad;
  for (std::uint32_t i = 0; i < fleet_->size(); ++i) {
    const char* word = trouble_of(fleet_->seen_state(i));
    if (word != nullptr) bad += (bad.empty() ? " (" : ", ") + fleet_->name(i) + word;
  }
  if (!bad.empty()) bad += ")";
  std::string status = "STATUS=" + prefix + ": " + count_of(fleet_->size(), "device") + bad + ", " +
                       count_of(sessions_->attached(), "session") + ", " +
                       count_of(registry_.groups().size(), "group");
  if (status == last_status_) return;
  last_status_ = std::move(status);
  notifier_.send(last_status_);
}

std::uint64_t Node::next_lifecycle_due_ns() const {
  std::uint64_t due = kNever;
  if (phase_ == Phase::kDraining) due = drain_due_ns_;
  if (notifier_.enabled() && options_.watchdog_us != 0) {
    const std::uint64_t now = clock_.now_ns();
    due = std::min(due, loop_->now_ns() + (next_ping_ns_ > now ? next_ping_ns_ - now : 0));
  }
  return due;
}

}  // namespace epd
