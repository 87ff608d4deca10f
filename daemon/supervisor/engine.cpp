#include "engine.h"

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
constexpr std::uint64_t kNever = std::numeric_limits<std::uint64_t>::max();
constexpr std::uint64_t kLastWordsNs = 1'000 * kMsNs;  // from the end of a link to the end of its engine
constexpr std::uint64_t kSparedNs = 1'000 * kMsNs;     // to answer after it was stopped
constexpr std::uint64_t kReapNs = 2 * kMsNs;
constexpr std::uint64_t kTryAgainNs = 20 * kMsNs;
constexpr std::uint64_t kStartLaterNs = 200 * kMsNs;
constexpr std::uint64_t kSayBusyNs = 5'000 * kMsNs;
constexpr std::uint64_t kMinuteNs = 60'000 * kMsNs;
constexpr std::uint64_t kOomTogetherNs = 1'000 * kMsNs;
constexpr const char* kKilled = "signal 9";
constexpr const char* kOom = ", by the kernel's OOM killer (see dmesg, and memory.events of its cgroup)";
constexpr const char* kPerhapsOom =
    ", not by epd: perhaps by the kernel's OOM killer (see dmesg, and memory.events of its cgroup)";

// Words on the cause of an end, behind those that say how the engine ended; or "".
std::string hint_at_cause(const std::string& how, bool out_of_memory, const abi::EnginePage& page) {
  if (out_of_memory) return kOom;
  if (how == kKilled) return kPerhapsOom;
  const std::string far = connecting_to(page.far);
  return far.empty() ? "" : ", while it connected to " + far;
}

}  // namespace

OomKills::OomKills() : count_(oom_kills()) {}

bool OomKills::grew_lately(std::uint64_t now_ns) {
  const std::uint64_t count = oom_kills();
  if (count > std::exchange(count_, count)) grew_ns_ = now_ns;
  return grew_ns_ != 0 && now_ns - grew_ns_ < kOomTogetherNs;
}

Result<EngineMemory> EngineMemory::make() {
  EngineMemory memory;
  Result<UniqueFd> page = make_sealed_memfd("epd-engine-page", sizeof(abi::EnginePage));
  if (!page.ok()) return page.status();
  Result<Mapping> map = Mapping::map(page->get(), sizeof(abi::EnginePage), Access::kReadWrite);
  if (!map.ok()) return map.status();
  Result<UniqueFd> bell = make_eventfd();
  if (!bell.ok()) return bell.status();
  memory.page_fd_ = std::move(*page);
  memory.page_ = std::move(*map);
  memory.bell_ = std::move(*bell);
  return memory;
}

void EngineMemory::clear() {
  auto* const page = page_.as<abi::EnginePage>();
  page->sleep.sleeping.store(0, std::memory_order_release);
  for (abi::OpView& op : page->ops) op.ticket.store(0, std::memory_order_release);
  for (abi::StatisticsRow& row : page->sessions.rows) row.key.store(0, std::memory_order_release);
  for (abi::StatisticsRow& row : page->members.rows) row.key.store(0, std::memory_order_release);
  for (abi::FarRow& row : page->far.rows)
    row.state.store(static_cast<std::uint32_t>(abi::FarState::kIdle), std::memory_order_relaxed);
}

Result<std::unique_ptr<Engine>> Engine::make(FleetContext& context, std::uint32_t device, std::string name) {
  std::unique_ptr<Engine> engine(new Engine(context, device, std::move(name)));
  Result<EngineMemory> memory = EngineMemory::make();
  if (!memory.ok()) return memory.status();
  engine->memory_ = std::move(*memory);
  return engine;
}

Engine::~Engine() {
  Running* const now = running();
  if (now == nullptr) return;
  stop_watching(now->link_watch, now->process->link_fd());
  stop_watching(now->exit_watch, now->process->pidfd());
}

void Engine::stop_watching(Loop::WatchId& watch, int fd) {
  if (watch != 0) context_.loop.remove(std::exchange(watch, 0), fd);
}

void Engine::start() {
  const EngineOptions& options = context_.options;
  const std::uint64_t now = context_.loop.now_ns();
  ++num_starts_;
  Result<std::unique_ptr<EngineProcess>> process =
      EngineProcess::spawn({options.binary, name_, memory_.page_fd(), memory_.bell_fd(), options.log_levels,
                            options.log_format, options.network});
  if (process.status().code() == StatusCode::kResourceExhausted) {
    last_exit_ = process.status().message();
    // There is no space for another process now, on the machine or within this process's limits.
    if (start_after(std::max<std::uint64_t>(options.backoff_min_ms * kMsNs, kStartLaterNs))) {
      record_event(EventKind::kOther, LogLevel::kError, "engine not started yet",
                   {{"device", name_}, {"reason", last_exit_}});
    }
    return;
  }
  if (!process.ok()) {
    last_exit_ = process.status().message();
    record_event(EventKind::kEngineDied, LogLevel::kError, "engine not started",
                 {{"device", name_}, {"reason", last_exit_}});
    return schedule_restart(now, EngineEnd::kDied);
  }
  Running& started = life_.emplace<Running>();
  started.process = std::move(*process);
  started.started_ns = started.beat_since_ns = now;
  Result<Loop::WatchId> link = context_.loop.add(started.process->link_fd(), EPOLLIN,
                                                 [this](std::uint32_t events) { on_link(events); });
  Result<Loop::WatchId> exit =
      context_.loop.add(started.process->pidfd(), EPOLLIN, [this](std::uint32_t) { on_exit(); });
  EPD_CHECK(link.ok() && exit.ok());
  started.link_watch = *link;
  started.exit_watch = *exit;
  record_event(EventKind::kEngineStarted, LogLevel::kInfo, "engine started",
               {{"device", name_}, {"pid", pid()}});
}

void Engine::send_stop() {
  if (running() != nullptr) (void)running()->process->send_stop();
}

void Engine::on_link(std::uint32_t events) {
  if (running() == nullptr) return;
  if ((events & EPOLLOUT) != 0) after_send(running()->process->flush());
  if ((events & (EPOLLIN | EPOLLHUP | EPOLLERR)) != 0) read_link();
}

void Engine::read_link() {
  Running& now = *running();
  Packet packet;
  Status error;
  while (true) {
    switch (receive_packet(now.process->link_fd(), packet, error)) {
      case ReceiveResult::kNothing: return;
      case ReceiveResult::kClosed:
        // The process is about to end. If it has only closed its link, it is of no use any more.
        stop_watching(now.link_watch, now.process->link_fd());
        now.next = Running::Next::kKill;
        now.next_ns = context_.loop.now_ns() + kLastWordsNs;
        return;
      case ReceiveResult::kMalformed: kill(error.message()); return;
      case ReceiveResult::kPacket: break;
    }
    switch (static_cast<abi::LinkType>(packet.header.type)) {
      case abi::LinkType::kDeviceFailed: on_device_failed(); break;
      case abi::LinkType::kReady: on_ready(packet); break;
      default: context_.host.engine_message(device_, packet);
    }
  }
}

void Engine::on_ready(const Packet& packet) {
  Running& now = *running();
  if (now.stage != Stage::kStarting) return;
  now.stage = Stage::kReady;
  now.ready_ns = context_.clock.now_ns();
  if (Result<abi::EngineReady> ready = packet.read<abi::EngineReady>(); ready.ok()) {
    max_sms_ = ready->max_sms;
    const std::size_t bytes = std::min<std::size_t>(ready->address_bytes, sizeof(ready->address));
    far_address_.assign(reinterpret_cast<const char*>(ready->address), bytes);
  }
  record_event(
      EventKind::kEngineReady, LogLevel::kInfo, "engine ready",
      {{"device", name_}, {"pid", pid()}, {"after_ms", (context_.loop.now_ns() - now.started_ns) / kMsNs}});
  context_.host.engine_ready(device_);
}

// The driver takes a while to end the process. The next engine waits for that, but its groups need not.
void Engine::on_device_failed() {
  if (!is_ready() || context_.stopping) return;
  running()->stage = Stage::kDeviceFailed;
  memory_.clear();
  context_.host.engine_down(
      device_, "the engine of " + name_ + " (pid " + std::to_string(pid()) + ") ended: its device has failed",
      EngineEnd::kDeviceFailed);
}

void Engine::after_send(const Status& status) {
  Running& now = *running();
  if (!status.ok()) {
    // If it has left, its end is about to be read.
    if (!now.process->has_left()) kill("its link failed: " + status.message());
    return;
  }
  const bool want_write = now.process->has_queued();
  if (want_write == now.watching_write || now.link_watch == 0) return;
  now.watching_write = want_write;
  context_.loop.modify(now.link_watch, now.process->link_fd(),
                       want_write ? std::uint32_t{EPOLLIN} | EPOLLOUT : std::uint32_t{EPOLLIN});
}

void Engine::kill(const std::string& why) {
  Running* const now = running();
  if (now == nullptr || is_being_killed()) return;
  now->kill_reason = why;
  if (!context_.stopping && !now->restart_wanted) {
    record_event(EventKind::kEngineDied, LogLevel::kWarning, "engine killed",
                 {{"device", name_}, {"pid", pid()}, {"reason", why}});
  }
  const auto end = [this, killed = pid()] {
    if (pid() == killed) running()->process->kill();
  };
  if (is_ready() && !now->process->has_left()) {
    context_.host.before_kill(device_, end);
  } else {
    end();  // it runs nothing yet, or nothing any more
  }
}

void Engine::kill_unless_stopped(const std::string& why) {
  if (running() == nullptr || is_stopped(why)) return;
  if (context_.loop.now_ns() >= running()->spared_until_ns) kill(why);
}

void Engine::restart(const std::string& why) {
  if (context_.stopping) return;
  deaths_.clear();
  backoff_ms_ = 0;
  if (Running* const now = running(); now != nullptr) {
    now->restart_wanted = true;
    return kill(why);
  }
  if (std::holds_alternative<Failed>(life_)) ++restarts_;
  life_ = Down{context_.loop.now_ns()};
}

bool Engine::is_stopped(const std::string& noticed_by) {
  Running& now = *running();
  const bool stopped = supervisor::is_stopped(pid());
  if (stopped == std::exchange(now.looked_stopped, stopped)) return stopped;
  if (stopped) {
    record_event(EventKind::kEngineStopped, LogLevel::kWarning, "engine is stopped",
                 {{"device", name_}, {"pid", pid()}, {"noticed_by", noticed_by}});
  } else {
    now.spared_until_ns = context_.loop.now_ns() + kSparedNs;
    record_event(EventKind::kEngineGoesOn, LogLevel::kInfo, "engine continues",
                 {{"device", name_}, {"pid", pid()}});
  }
  return stopped;
}

void Engine::on_exit() {
  if (running()->link_watch != 0) read_link();  // its last messages
  stop_watching(running()->exit_watch, running()->process->pidfd());
  const std::optional<std::string> how = running()->process->reap();
  if (!how) {
    running()->next = Running::Next::kReap;
    running()->next_ns = context_.loop.now_ns() + kReapNs;
    return;
  }
  stop_watching(running()->link_watch, running()->process->link_fd());
  const Running ended = std::move(*running());
  life_ = Down{0};
  const pid_t pid = ended.process->pid();
  const int code = ended.process->exit_code();
  const bool for_network = code == abi::kExitForNetwork;
  const bool planned = ended.restart_wanted || for_network;
  if (!ended.restart_wanted) last_exit_ = *how;
  const bool out_of_memory = !ended.restart_wanted && *how == kKilled && ended.kill_reason.empty() &&
                             context_.oom.grew_lately(context_.loop.now_ns());
  const std::string hint =
      planned || !ended.kill_reason.empty() ? "" : hint_at_cause(*how, out_of_memory, memory_.page());
  memory_.clear();
  if (context_.stopping) return;
  if (code == abi::kExitDeviceBusy) {
    // After a fault, MPS accepts no process until every process that was part of it has gone.
    if (start_after(kTryAgainNs)) context_.host.engine_waits(device_);
    return;
  }
  // An operator's own restart is no death.
  record_event(ended.restart_wanted ? EventKind::kOther : EventKind::kEngineDied,
               ended.restart_wanted ? LogLevel::kInfo : LogLevel::kError,
               ended.restart_wanted ? "engine ended" : "engine died",
               {{"device", name_}, {"pid", pid}, {"exit", *how + hint}, {"reason", ended.kill_reason}});
  const EngineEnd end = code == abi::kExitDeviceFailed ? EngineEnd::kDeviceFailed
                        : planned                      ? EngineEnd::kPlanned
                        : out_of_memory                ? EngineEnd::kOutOfMemory
                                                       : EngineEnd::kDied;
  if (ended.stage != Stage::kDeviceFailed) {
    std::string text = "the engine of " + name_ + " (pid " + std::to_string(pid) + ") ended: " + *how;
    if (!ended.kill_reason.empty()) text += ", killed because " + ended.kill_reason;
    text += for_network ? ", for a new network to other nodes" : hint;
    context_.host.engine_down(device_, text, end);
  }
  if (end != EngineEnd::kPlanned) return schedule_restart(ended.started_ns, end);
  life_ = Down{context_.loop.now_ns()};
  if (for_network) ++restarts_;
}

// Starts the engine later. That it can't be started now does not count as a death of the engine.
bool Engine::start_after(std::uint64_t delay_ns) {
  const std::uint64_t now = context_.loop.now_ns();
  life_ = Down{now + delay_ns};
  if (now < say_busy_ns_) return false;
  say_busy_ns_ = now + kSayBusyNs;
  return true;
}

// A death for want of memory says nothing of the device. It is not counted, and memory may come back.
void Engine::schedule_restart(std::uint64_t started_ns, EngineEnd end) {
  const EngineOptions& options = context_.options;
  const std::uint64_t now = context_.loop.now_ns();
  if (now - started_ns > kMinuteNs) backoff_ms_ = 0;
  if (end != EngineEnd::kOutOfMemory) deaths_.push_back(now);
  while (!deaths_.empty() && now - deaths_.front() > kMinuteNs) deaths_.pop_front();
  if (deaths_.size() > options.max_restarts_per_minute) {
    life_ = Failed{};
    const std::string text = name_ + " has failed: its engine died " + std::to_string(deaths_.size()) +
                             " times within a minute (last: " + last_exit_ +
                             "); allowed: " + std::to_string(options.max_restarts_per_minute) +
                             " (engine.max_restarts_per_minute)";
    record_event(EventKind::kDeviceFailed, LogLevel::kError, "device failed",
                 {{"device", name_}, {"reason", text}});
    context_.host.engine_failed(device_, text);
    return;
  }
  backoff_ms_ = std::clamp<std::uint64_t>(backoff_ms_ * 2, options.backoff_min_ms, options.backoff_max_ms);
  life_ = Down{now + backoff_ms_ * kMsNs};
  ++restarts_;
}

// The loop's clock measures the age of a heartbeat from look to look, because after a pause of the whole
// machine every heartbeat is old.
void Engine::check_alive() {
  Running* const now = running();
  if (now == nullptr || now->next == Running::Next::kReap) return;
  const bool stopped = is_stopped("a regular look");
  const std::uint64_t beat = is_ready() ? memory_.page().heartbeat_ns.load(std::memory_order_relaxed) : 0;
  // An engine that continues after a stop has its whole time again.
  if (std::exchange(now->beat, beat) != beat || stopped) now->beat_since_ns = context_.loop.now_ns();
  const std::uint64_t age_ms = (context_.loop.now_ns() - now->beat_since_ns) / kMsNs;
  if (age_ms <= context_.options.watchdog_ms) return;
  const std::string age = std::to_string(age_ms) + " ms";
  kill_unless_stopped(is_ready() ? "its loop hung for " + age : "it was not ready after " + age);
}

void Engine::reap_if_due(std::uint64_t now_ns) {
  const Running* const now = running();
  if (now != nullptr && now->next == Running::Next::kReap && now->next_ns <= now_ns) on_exit();
}

void Engine::start_or_kill_if_due(std::uint64_t now_ns) {
  if (next_due_ns() > now_ns) return;
  if (std::holds_alternative<Down>(life_)) {
    start();
  } else if (Running& now = *running(); now.next == Running::Next::kKill) {
    now.next = Running::Next::kNothing;
    kill("it closed its link");
  }
}

std::uint64_t Engine::next_due_ns() const {
  if (const Running* const now = running(); now != nullptr) {
    const bool due =
        now->next == Running::Next::kReap || (now->next == Running::Next::kKill && !context_.stopping);
    return due ? now->next_ns : kNever;
  }
  const Down* const down = std::get_if<Down>(&life_);
  return down == nullptr || down->start_at_ns == 0 || context_.stopping ? kNever : down->start_at_ns;
}

DeviceState Engine::state() const {
  if (std::holds_alternative<Failed>(life_)) return DeviceState::kFailed;
  if (is_ready()) return DeviceState::kReady;
  const bool first = running() != nullptr && running()->stage == Stage::kStarting && num_starts_ == 1;
  return first ? DeviceState::kStarting : DeviceState::kRestarting;
}

DeviceState Engine::seen_state() const {
  if (!is_ready()) return state();
  const std::uint64_t sign = last_sign_ns();
  const std::uint64_t now = context_.clock.now_ns();
  const bool silent = now > sign && now - sign > abi::kStandsStillNs;
  return silent || running()->looked_stopped ? DeviceState::kStopped : DeviceState::kReady;
}

DeviceState Engine::state_now() const {
  const DeviceState seen = seen_state();
  return seen == DeviceState::kReady && supervisor::is_stopped(pid()) ? DeviceState::kStopped : seen;
}

// Until the engine's first heartbeat the page shows that of the former engine.
std::uint64_t Engine::last_sign_ns() const {
  const std::uint64_t beat = memory_.page().heartbeat_ns.load(std::memory_order_relaxed);
  return is_ready() ? std::max(running()->ready_ns, beat) : beat;
}

std::uint64_t Engine::heartbeat_age_ms() const {
  const std::uint64_t now = context_.clock.now_ns();
  const std::uint64_t sign = last_sign_ns();
  return sign == 0 || sign > now ? 0 : (now - sign) / kMsNs;
}

bool Engine::loop_advanced() {
  const std::uint64_t loops = memory_.page().loops.load(std::memory_order_relaxed);
  return std::exchange(loops_seen_, loops) != loops || !is_ready();
}

}  // namespace epd::supervisor
