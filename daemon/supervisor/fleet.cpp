#include "fleet.h"

#include "base/event.h"
#include "far_statistics.h"
#include "memory_limit.h"
#include "process_state.h"

#include <sys/epoll.h>
#include <algorithm>
#include <limits>

namespace epd::supervisor {
namespace {

constexpr std::uint64_t kMsNs = 1'000'000;
constexpr std::uint64_t kLastWordsMs = 1'000;  // from the end of a link to the end of its engine
constexpr std::uint64_t kSparedMs = 1'000;     // to answer after it was stopped
constexpr std::uint64_t kReapNs = 2'000'000;
constexpr std::uint64_t kTryAgainNs = 20'000'000;
constexpr std::uint64_t kStartLaterNs = 200'000'000;
constexpr std::uint64_t kSayBusyNs = 5'000'000'000;
constexpr std::uint64_t kMinuteNs = 60'000 * kMsNs;
constexpr const char* kKilled = "signal 9";
constexpr std::uint64_t kOomTogetherNs = 1'000'000'000;  // the OOM killer often ends several engines
constexpr const char* kOom = ", by the kernel's OOM killer (see dmesg, and memory.events of its cgroup)";
constexpr const char* kPerhapsOom =
    ", not by epd: perhaps by the kernel's OOM killer (see dmesg, and memory.events of its cgroup)";

}  // namespace

EngineFleet::~EngineFleet() {
  for (Device& device : devices_) {
    if (device.process == nullptr) continue;
    stop_watching(device.link_watch, device.process->link_fd());
    stop_watching(device.exit_watch, device.process->pidfd());
  }
}

void EngineFleet::stop_watching(Loop::WatchId& watch, int fd) {
  if (watch != 0) loop_.remove(std::exchange(watch, 0), fd);
}

Status EngineFleet::start(const std::vector<std::string>& devices) {
  devices_.reserve(devices.size());  // references to pages are handed out
  for (const std::string& name : devices) {
    if (Status status = make_device(name); !status.ok()) return status;
  }
  oom_kills_ = oom_kills();
  for (std::uint32_t i = 0; i < size(); ++i) spawn(i);
  next_check_ns_ = loop_.now_ns() + check_period_ns();
  return {};
}

Status EngineFleet::make_device(const std::string& name) {
  Device device;
  device.name = name;
  Result<UniqueFd> page = make_sealed_memfd("epd-engine-page", sizeof(abi::EnginePage));
  if (!page.ok()) return page.status();
  Result<Mapping> map = Mapping::map(page->get(), sizeof(abi::EnginePage), Access::kReadWrite);
  if (!map.ok()) return map.status();
  Result<UniqueFd> bell = make_eventfd();
  if (!bell.ok()) return bell.status();
  device.page_fd = std::move(*page);
  device.page = std::move(*map);
  device.bell = std::move(*bell);
  devices_.push_back(std::move(device));
  return {};
}

void EngineFleet::spawn(std::uint32_t index) {
  Device& device = devices_[index];
  device.start_at_ns = 0;
  device.started_ns = loop_.now_ns();
  device.beat = 0;
  device.beat_since_ns = device.started_ns;
  device.looked_stopped = false;
  device.spared_until_ns = 0;
  Result<std::unique_ptr<EngineProcess>> process =
      EngineProcess::spawn({options_.binary, device.name, device.page_fd.get(), device.bell.get(),
                            options_.log_levels, options_.log_format, options_.network});
  if (process.status().code() == StatusCode::kResourceExhausted) return start_later(index, process.status());
  if (!process.ok()) {
    device.last_exit = process.status().message();
    record_event(EventKind::kEngineDied, LogLevel::kError, "engine not started",
                 {{"device", device.name}, {"reason", device.last_exit}});
    schedule_restart(index, EngineEnd::kDied);
    return;
  }
  device.process = std::move(*process);
  Result<Loop::WatchId> link = loop_.add(device.process->link_fd(), EPOLLIN,
                                         [this, index](std::uint32_t events) { on_link(index, events); });
  Result<Loop::WatchId> exit =
      loop_.add(device.process->pidfd(), EPOLLIN, [this, index](std::uint32_t) { on_exit(index); });
  device.link_watch = link.ok() ? *link : 0;
  device.exit_watch = exit.ok() ? *exit : 0;
  EPD_CHECK(link.ok() && exit.ok());
  device.watching_write = false;
  record_event(EventKind::kEngineStarted, LogLevel::kInfo, "engine started",
               {{"device", device.name}, {"pid", device.process->pid()}});
}

void EngineFleet::on_link(std::uint32_t index, std::uint32_t events) {
  Device& device = devices_[index];
  if (device.process == nullptr) return;
  if ((events & EPOLLOUT) != 0) after_send(index, device.process->flush());
  if ((events & (EPOLLIN | EPOLLHUP | EPOLLERR)) != 0) read_link(index);
}

void EngineFleet::read_link(std::uint32_t index) {
  Device& device = devices_[index];
  Packet packet;
  Status error;
  while (device.process != nullptr) {
    switch (receive_packet(device.process->link_fd(), packet, error)) {
      case ReceiveResult::kNothing: return;
      case ReceiveResult::kClosed:
        // The process is about to end. If it has only closed its link, it is of no use any more.
        stop_watching(device.link_watch, device.process->link_fd());
        device.kill_at_ns = loop_.now_ns() + kLastWordsMs * kMsNs;
        return;
      case ReceiveResult::kMalformed: kill(index, error.message()); return;
      case ReceiveResult::kPacket: break;
    }
    if (static_cast<abi::LinkType>(packet.header.type) == abi::LinkType::kDeviceFailed) {
      on_device_failed(index);
    } else if (static_cast<abi::LinkType>(packet.header.type) != abi::LinkType::kReady) {
      host_.engine_message(index, packet);
    } else if (device.state != DeviceState::kReady) {
      device.state = DeviceState::kReady;
      device.ready_ns = clock_.now_ns();
      if (Result<abi::EngineReady> ready = packet.read<abi::EngineReady>(); ready.ok()) {
        device.max_sms = ready->max_sms;
        const std::size_t bytes = std::min<std::size_t>(ready->address_bytes, sizeof(ready->address));
        device.far_address.assign(reinterpret_cast<const char*>(ready->address), bytes);
      }
      record_event(EventKind::kEngineReady, LogLevel::kInfo, "engine ready",
                   {{"device", device.name},
                    {"pid", device.process->pid()},
                    {"after_ms", (loop_.now_ns() - device.started_ns) / kMsNs}});
      host_.engine_ready(index);
    }
  }
}

// The driver takes a while to end the process. The next engine waits for that, but its groups need not.
void EngineFleet::on_device_failed(std::uint32_t index) {
  Device& device = devices_[index];
  if (!is_ready(index) || stopping_) return;
  device.state = DeviceState::kRestarting;
  device.down_told = true;
  clear_page(device);
  host_.engine_down(index,
                    "the engine of " + device.name + " (pid " + std::to_string(device.process->pid()) +
                        ") ended: its device has failed",
                    EngineEnd::kDeviceFailed);
}

void EngineFleet::after_send(std::uint32_t index, const Status& status) {
  Device& device = devices_[index];
  if (!status.ok() && device.process->has_left()) return;  // its end is about to be read
  if (!status.ok()) {
    kill(index, "its link failed: " + status.message());
    return;
  }
  const bool want_write = device.process->has_queued();
  if (want_write == device.watching_write || device.link_watch == 0) return;
  device.watching_write = want_write;
  loop_.modify(device.link_watch, device.process->link_fd(),
               want_write ? std::uint32_t{EPOLLIN} | EPOLLOUT : std::uint32_t{EPOLLIN});
}

void EngineFleet::kill(std::uint32_t index, const std::string& why) {
  Device& device = devices_[index];
  if (device.process == nullptr || !device.kill_reason.empty()) return;
  device.kill_reason = why;
  if (!stopping_ && !device.restart_wanted) {
    record_event(EventKind::kEngineDied, LogLevel::kWarning, "engine killed",
                 {{"device", device.name}, {"pid", device.process->pid()}, {"reason", why}});
  }
  const auto now = [this, index, pid = device.process->pid()] {
    const Device& d = devices_[index];
    if (d.process != nullptr && d.process->pid() == pid) d.process->kill();
  };
  if (is_ready(index) && !device.process->has_left()) {
    host_.before_kill(index, now);
  } else {
    now();  // it runs nothing yet, or nothing any more
  }
}

void EngineFleet::kill_unless_stopped(std::uint32_t index, const std::string& why) {
  if (devices_[index].process == nullptr || is_stopped(index, why)) return;
  if (loop_.now_ns() >= devices_[index].spared_until_ns) kill(index, why);
}

void EngineFleet::restart(std::uint32_t index, const std::string& why) {
  Device& device = devices_[index];
  if (stopping_) return;
  device.deaths.clear();
  device.backoff_ms = 0;
  if (device.process != nullptr) {
    device.restart_wanted = true;
    kill(index, why);
    return;
  }
  if (device.state == DeviceState::kFailed) ++device.restarts;
  device.state = DeviceState::kRestarting;
  device.start_at_ns = loop_.now_ns();
}

bool EngineFleet::is_stopped(std::uint32_t index, const std::string& noticed_by) {
  Device& device = devices_[index];
  const bool stopped = supervisor::is_stopped(device.process->pid());
  if (stopped == std::exchange(device.looked_stopped, stopped)) return stopped;
  if (stopped) {
    record_event(EventKind::kEngineStopped, LogLevel::kWarning, "engine is stopped",
                 {{"device", device.name}, {"pid", device.process->pid()}, {"noticed_by", noticed_by}});
  } else {
    device.spared_until_ns = loop_.now_ns() + kSparedMs * kMsNs;
    record_event(EventKind::kEngineGoesOn, LogLevel::kInfo, "engine goes on",
                 {{"device", device.name}, {"pid", device.process->pid()}});
  }
  return stopped;
}

void EngineFleet::on_exit(std::uint32_t index) {
  Device& device = devices_[index];
  if (device.link_watch != 0) read_link(index);  // its last messages
  stop_watching(device.exit_watch, device.process->pidfd());
  std::optional<std::string> how = device.process->reap();
  if (!how) {
    device.reap_at_ns = loop_.now_ns() + kReapNs;
    return;
  }
  device.reap_at_ns = 0;
  stop_watching(device.link_watch, device.process->link_fd());
  const pid_t pid = device.process->pid();
  const bool busy = device.process->exit_code() == abi::kExitDeviceBusy;
  const bool failed = device.process->exit_code() == abi::kExitDeviceFailed;
  const bool for_network = device.process->exit_code() == abi::kExitForNetwork;
  const bool wanted = std::exchange(device.restart_wanted, false);
  if (!wanted) device.last_exit = *how;
  device.process.reset();
  device.kill_at_ns = 0;
  device.state = DeviceState::kRestarting;
  const bool out_of_memory = !wanted && is_out_of_memory(device);
  const std::string hint = for_network || wanted ? "" : hint_at_cause(device, out_of_memory);
  clear_page(device);
  std::string text = "the engine of " + device.name + " (pid " + std::to_string(pid) + ") ended: " + *how;
  const std::string reason = std::exchange(device.kill_reason, "");
  if (!reason.empty()) text += ", killed because " + reason;
  text += hint;
  if (for_network) text += ", for a new network to other nodes";
  if (stopping_) return;
  if (busy) {
    try_again(index);
    return;
  }
  // An operator's own restart is no death.
  record_event(wanted ? EventKind::kOther : EventKind::kEngineDied,
               wanted ? LogLevel::kInfo : LogLevel::kError, wanted ? "engine ended" : "engine died",
               {{"device", device.name}, {"pid", pid}, {"exit", *how + hint}, {"reason", reason}});
  const EngineEnd end = failed                  ? EngineEnd::kDeviceFailed
                        : wanted || for_network ? EngineEnd::kPlanned
                        : out_of_memory         ? EngineEnd::kOutOfMemory
                                                : EngineEnd::kDied;
  if (!std::exchange(device.down_told, false)) host_.engine_down(index, text, end);
  if (end == EngineEnd::kPlanned) {
    device.start_at_ns = loop_.now_ns();
    if (for_network) ++device.restarts;
  } else {
    schedule_restart(index, end);
  }
}

// The count may have grown for an engine whose end was read before.
bool EngineFleet::is_out_of_memory(const Device& device) {
  if (device.last_exit != kKilled || !device.kill_reason.empty()) return false;
  const std::uint64_t kills = oom_kills();
  if (kills > std::exchange(oom_kills_, kills)) oom_grew_ns_ = loop_.now_ns();
  return oom_grew_ns_ != 0 && loop_.now_ns() - oom_grew_ns_ < kOomTogetherNs;
}

std::string EngineFleet::hint_at_cause(const Device& device, bool out_of_memory) {
  if (!device.kill_reason.empty()) return "";
  if (out_of_memory) return kOom;
  if (device.last_exit == kKilled) return kPerhapsOom;
  const std::string far = connecting_to(device.page.as<abi::EnginePage>()->far);
  return far.empty() ? "" : ", while it connected to " + far;
}

// Clears what peers read in the page, so that it does not mislead them while nobody writes it.
void EngineFleet::clear_page(Device& device) const {
  auto* page = device.page.as<abi::EnginePage>();
  page->sleep.sleeping.store(0, std::memory_order_release);
  for (abi::OpView& op : page->ops) op.ticket.store(0, std::memory_order_release);
  for (abi::StatisticsRow& row : page->sessions.rows) row.key.store(0, std::memory_order_release);
  for (abi::StatisticsRow& row : page->members.rows) row.key.store(0, std::memory_order_release);
  for (abi::FarRow& row : page->far.rows)
    row.state.store(static_cast<std::uint32_t>(abi::FarState::kIdle), std::memory_order_relaxed);
}

// There is no room for another process now, on the machine or within this process's limits. That does not
// count as a death of the engine.
void EngineFleet::start_later(std::uint32_t index, const Status& status) {
  Device& device = devices_[index];
  const std::uint64_t now = loop_.now_ns();
  device.state = DeviceState::kRestarting;
  device.last_exit = status.message();
  device.start_at_ns = now + std::max<std::uint64_t>(options_.backoff_min_ms * kMsNs, kStartLaterNs);
  if (now < device.say_busy_ns) return;
  device.say_busy_ns = now + kSayBusyNs;
  record_event(EventKind::kOther, LogLevel::kError, "engine not started yet",
               {{"device", device.name}, {"reason", device.last_exit}});
}

// After a fault, MPS accepts no process until every process that was part of it has gone. That does not count
// as a death of the engine, which never ran.
void EngineFleet::try_again(std::uint32_t index) {
  Device& device = devices_[index];
  const std::uint64_t now = loop_.now_ns();
  device.start_at_ns = now + kTryAgainNs;
  if (now < device.say_busy_ns) return;
  device.say_busy_ns = now + kSayBusyNs;
  host_.engine_waits(index);
}

// A death for want of memory says nothing of the device. It is not counted, and memory may come back.
void EngineFleet::schedule_restart(std::uint32_t index, EngineEnd end) {
  Device& device = devices_[index];
  const std::uint64_t now = loop_.now_ns();
  if (now - device.started_ns > kMinuteNs) device.backoff_ms = 0;
  if (end != EngineEnd::kOutOfMemory) device.deaths.push_back(now);
  while (!device.deaths.empty() && now - device.deaths.front() > kMinuteNs) device.deaths.pop_front();
  if (device.deaths.size() > options_.max_restarts_per_minute) {
    device.state = DeviceState::kFailed;
    const std::string text = device.name + " has failed: its engine died " +
                             std::to_string(device.deaths.size()) +
                             " times within a minute (last: " + device.last_exit +
                             "); allowed: " + std::to_string(options_.max_restarts_per_minute) +
                             " (engine.max_restarts_per_minute)";
    record_event(EventKind::kDeviceFailed, LogLevel::kError, "device failed",
                 {{"device", device.name}, {"reason", text}});
    host_.engine_failed(index, text);
    return;
  }
  device.state = DeviceState::kRestarting;
  device.backoff_ms =
      std::clamp<std::uint64_t>(device.backoff_ms * 2, options_.backoff_min_ms, options_.backoff_max_ms);
  device.start_at_ns = now + device.backoff_ms * kMsNs;
  ++device.restarts;
}

std::uint64_t EngineFleet::check_period_ns() const {
  return std::clamp<std::uint64_t>(options_.watchdog_ms / 4, 1'000, 2'500) * kMsNs;
}

// Its heartbeat has not changed for too long. The loop's clock measures that from look to look, because after
// a pause of the whole machine every heartbeat is old.
void EngineFleet::check_alive(std::uint32_t index) {
  Device& device = devices_[index];
  if (device.process == nullptr || device.reap_at_ns != 0) return;
  const bool stopped = is_stopped(index, "a regular look");
  const std::uint64_t beat = is_ready(index) ? page(index).heartbeat_ns.load(std::memory_order_relaxed) : 0;
  // An engine that continues after a stop has its whole time again.
  if (std::exchange(device.beat, beat) != beat || stopped) device.beat_since_ns = loop_.now_ns();
  const std::uint64_t age_ms = (loop_.now_ns() - device.beat_since_ns) / kMsNs;
  if (age_ms <= options_.watchdog_ms) return;
  const std::string age = std::to_string(age_ms) + " ms";
  kill_unless_stopped(index,
                      is_ready(index) ? "its loop stood still for " + age : "it was not ready after " + age);
}

void EngineFleet::tick() {
  const std::uint64_t now = loop_.now_ns();
  for (std::uint32_t i = 0; i < size(); ++i) {
    if (devices_[i].reap_at_ns != 0 && devices_[i].reap_at_ns <= now) on_exit(i);
  }
  if (stopping_) {
    if (kill_all_ns_ > now) return;
    for (std::uint32_t i = 0; i < size(); ++i) kill(i, "it did not stop");
    return;
  }
  for (std::uint32_t i = 0; i < size(); ++i) {
    Device& device = devices_[i];
    if (device.start_at_ns != 0 && device.start_at_ns <= now) spawn(i);
    if (device.kill_at_ns != 0 && device.kill_at_ns <= now) {
      device.kill_at_ns = 0;
      if (device.reap_at_ns == 0) kill(i, "it closed its link");
    }
  }
  if (next_check_ns_ > now) return;
  next_check_ns_ = now + check_period_ns();
  for (std::uint32_t i = 0; i < size(); ++i) check_alive(i);
}

std::uint64_t EngineFleet::next_due_ns() const {
  std::uint64_t due = next_check_ns_;
  if (stopping_) {
    const bool killed = std::all_of(devices_.begin(), devices_.end(), [](const Device& d) {
      return d.process == nullptr || !d.kill_reason.empty();
    });
    due = killed ? std::numeric_limits<std::uint64_t>::max() : kill_all_ns_;
  }
  for (const Device& device : devices_) {
    if (device.reap_at_ns != 0) due = std::min(due, device.reap_at_ns);
    if (stopping_) continue;
    if (device.start_at_ns != 0) due = std::min(due, device.start_at_ns);
    if (device.kill_at_ns != 0) due = std::min(due, device.kill_at_ns);
  }
  return due;
}

void EngineFleet::stop(std::uint32_t grace_ms) {
  if (std::exchange(stopping_, true)) return;
  kill_all_ns_ = loop_.now_ns() + grace_ms * kMsNs;
  for (Device& device : devices_) {
    device.start_at_ns = 0;
    if (device.process != nullptr) (void)device.process->send_stop();
  }
}

bool EngineFleet::all_stopped() const {
  return std::all_of(devices_.begin(), devices_.end(), [](const Device& d) { return d.process == nullptr; });
}

bool EngineFleet::all_settled() const {
  return std::all_of(devices_.begin(), devices_.end(), [](const Device& d) {
    return d.state == DeviceState::kReady || d.state == DeviceState::kFailed;
  });
}

std::uint64_t EngineFleet::queued_descriptors() const {
  std::uint64_t count = 0;
  for (const Device& device : devices_)
    count += device.process == nullptr ? 0 : device.process->queued_descriptors();
  return count;
}

bool EngineFleet::all_loops_advanced() {
  bool all = true;
  for (std::uint32_t i = 0; i < size(); ++i) {
    if (devices_[i].state == DeviceState::kFailed) continue;
    const std::uint64_t loops = page(i).loops.load(std::memory_order_relaxed);
    // an engine that is being restarted is not stuck
    if (is_ready(i) && loops == devices_[i].loops_seen) all = false;
    devices_[i].loops_seen = loops;
  }
  return all;
}

// Until the engine's first heartbeat the page shows that of the former engine.
std::uint64_t EngineFleet::last_sign_ns(std::uint32_t index) const {
  const std::uint64_t beat = page(index).heartbeat_ns.load(std::memory_order_relaxed);
  return is_ready(index) ? std::max(devices_[index].ready_ns, beat) : beat;
}

DeviceState EngineFleet::seen_state(std::uint32_t index) const {
  const Device& device = devices_[index];
  if (device.state != DeviceState::kReady || device.process == nullptr) return device.state;
  const std::uint64_t sign = last_sign_ns(index);
  const std::uint64_t now = clock_.now_ns();
  const bool silent = now > sign && now - sign > abi::kStandsStillNs;
  return silent || device.looked_stopped ? DeviceState::kStopped : DeviceState::kReady;
}

DeviceState EngineFleet::state_now(std::uint32_t index) const {
  const DeviceState seen = seen_state(index);
  const EngineProcess* process = devices_[index].process.get();
  const bool stopped =
      seen == DeviceState::kReady && process != nullptr && supervisor::is_stopped(process->pid());
  return stopped ? DeviceState::kStopped : seen;
}

std::int32_t EngineFleet::engine_pid(std::uint32_t index) const {
  return devices_[index].process == nullptr ? 0 : devices_[index].process->pid();
}

std::uint64_t EngineFleet::heartbeat_age_ms(std::uint32_t index) const {
  const std::uint64_t now = clock_.now_ns();
  const std::uint64_t sign = last_sign_ns(index);
  return sign == 0 || sign > now ? 0 : (now - sign) / kMsNs;
}

}  // namespace epd::supervisor
