#include "engine.h"

#include "base/log.h"

#include <poll.h>
#include <sched.h>
#include <unistd.h>
#include <algorithm>
#include <cstring>
#include <utility>

namespace epd::engine {
namespace {

constexpr std::uint64_t kLinkPollNs = 100'000;        // how often a busy loop looks at the link
constexpr std::uint64_t kMaxSleepNs = 1'000'000'000;  // so that the heartbeat advances
constexpr std::uint64_t kLeaveNs = 1'000'000'000;

FarEngines make_far_engines(Engine::Network network, abi::FarTable& table, SupervisorLink& link,
                            const RoundClock& clock) {
  if (!network.proxy.ok()) return {network.proxy.status(), table, link, clock};
  return {std::move(network.proxy).value(), network.options, table, link, clock};
}

}  // namespace

Engine::Engine(SupervisorLink& link, Bell& bell, Page& page, std::unique_ptr<device::Device> device,
               Network network, const Clock& clock)
    : link_(link),
      bell_(bell),
      page_(page),
      clock_(clock),
      device_(std::move(device)),
      watch_(*device_, page),
      sessions_(page, link),
      late_network_(std::move(network.late)),
      far_engines_(make_far_engines(std::move(network), page->far, link, clock_)),
      groups_(*device_, page, link, sessions_, far_engines_, clock_) {
  listen();
}

void Engine::listen() {
  using abi::LinkType;
  link_.on(LinkType::kSettings, *this, &Engine::apply_settings);
  link_.on(LinkType::kRemoveSession, *this, &Engine::remove_session);
  link_.on(LinkType::kAddSession, sessions_, &Sessions::add);
  link_.on(LinkType::kFarEngine, far_engines_, &FarEngines::note);
  link_.on(LinkType::kGroupBegin, groups_, &Groups::begin_group);
  link_.on(LinkType::kGroupRank, groups_, &Groups::add_rank);
  link_.on(LinkType::kGroupMember, groups_, &Groups::add_member);
  link_.on(LinkType::kMapMemory, groups_, &Groups::map_memory);
  link_.on(LinkType::kGroupCommit, groups_, &Groups::commit_group);
  link_.on(LinkType::kGroupSettings, groups_, &Groups::apply_settings);
  link_.on(LinkType::kCloseStreams, groups_, &Groups::close_streams);
  link_.on(LinkType::kStopMember, groups_, &Groups::stop_member);
  link_.on(LinkType::kBreak, groups_, &Groups::break_group);
  link_.on(LinkType::kResume, groups_, &Groups::resume_group);
  link_.on(LinkType::kRelease, groups_, &Groups::release_group);
  link_.on(LinkType::kRemoveGroup, groups_, &Groups::remove_group);
}

Status Engine::apply_settings(const abi::Settings& message) {
  device_->set_num_sms(message.sms);
  page_->sms.store(device_->num_sms(), std::memory_order_relaxed);
  const std::string_view levels(message.log_levels, abi::text_length(message.log_levels));
  log_set_levels(parse_log_levels(levels).value_or(LogLevels()));
  spin_limit_ns_ = std::uint64_t{message.spin_us} * 1000;
  far_engines_.set_spin_ns(spin_limit_ns_);
  groups_.set_defaults(message.default_timeout_ms, message.linger_us);
  return {};
}

Status Engine::remove_session(const abi::SessionRef& message) {
  watch_.note_client_gone(clock_.round_ns());
  return sessions_.remove(message);
}

void Engine::say_ready() {
  const transport::Address& address = far_engines_.address();
  EPD_CHECK(address.size() <= abi::kMaxFarAddressBytes);
  abi::EngineReady ready{::getpid(), device_->max_sms(), static_cast<std::uint32_t>(address.size()), {}};
  std::memcpy(ready.address, address.data(), address.size());
  link_.send(abi::LinkType::kReady, ready);
}

int Engine::run() {
  page_.start(device_->num_sms());
  say_ready();
  while (!link_.exit_code()) {
    clock_.begin_round();
    const std::uint64_t now_ns = clock_.round_ns();
    count(page_->loops);
    page_->heartbeat_ns.store(now_ns, std::memory_order_relaxed);
    if (now_ns - last_link_ns_ >= kLinkPollNs) {
      last_link_ns_ = now_ns;
      link_.receive(clock_, clock_.now_ns() + kShareNs);
      if (late_network_ != nullptr && late_network_->is_there()) link_.end(abi::kExitForNetwork);
      if (link_.exit_code()) break;
    }
    bool progress = far_engines_.receive();
    progress |= device_->run();
    progress |= far_engines_.step();
    progress |= groups_.read_journals();
    watch_.advance();
    groups_.advance();
    progress |= groups_.reclaim();
    watch_.check(now_ns);
    if (progress || spin()) continue;
    sleep();
  }
  return leave();
}

// A device that hangs does not delay the end.
int Engine::leave() {
  groups_.halt();
  const int code = *link_.exit_code();
  const std::uint64_t patience_ns = clock_.now_ns() + kLeaveNs;
  const auto go_on = [&] {
    if (clock_.now_ns() > patience_ns) ::_exit(code);
    ::sched_yield();
  };
  while (!groups_.settled()) {
    device_->advance();
    go_on();
  }
  groups_.clear();
  while (device_->advance()) go_on();
  return code;
}

// Keeps polling for a while when that pays off: a short wait costs less than a sleep. Yields meanwhile,
// because there may be more engines and clients than cores.
bool Engine::spin() {
  if (spin_budget_ns_ == 0) return false;
  const std::uint64_t start = clock_.now_ns();
  while (clock_.now_ns() - start < spin_budget_ns_) {
    if (anything_pending()) {
      grow_spin_budget();
      return true;
    }
    ::sched_yield();
  }
  spin_budget_ns_ = spin_budget_ns_ < spin_limit_ns_ / 16 ? 0 : spin_budget_ns_ / 2;
  return false;
}

void Engine::grow_spin_budget() {
  spin_budget_ns_ = std::min(spin_limit_ns_, spin_budget_ns_ + spin_limit_ns_ / 4);
}

// True if a round of the loop would find work. The same looks as a round, without the work.
bool Engine::anything_pending() const {
  return groups_.pending() || far_engines_.pending() || device_->runnable();
}

void Engine::set_sleeping(bool sleeping) {
  page_->sleep.sleeping.store(sleeping ? 1 : 0, std::memory_order_relaxed);
  sessions_.set_sleeping(sleeping);
}

void Engine::sleep() {
  set_sleeping(true);
  // Pairs with the fence of each ringer: either the ringer sees that this loop sleeps, or the loop sees what
  // it published.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (anything_pending()) {
    set_sleeping(false);
    return;
  }
  const std::uint64_t now = clock_.now_ns();
  const std::uint64_t until = next_look_ns(now);
  const std::uint64_t wait_ns = until <= now ? 0 : std::min(until - now, kMaxSleepNs);
  const timespec wait{static_cast<time_t>(wait_ns / 1'000'000'000),
                      static_cast<long>(wait_ns % 1'000'000'000)};
  pollfd waiting[] = {{bell_.fd(), POLLIN, 0}, {link_.fd(), POLLIN, 0}};
  count(page_->sleeps);
  const int ready = ::ppoll(waiting, 2, &wait, nullptr);
  set_sleeping(false);
  // The sleep was so short that polling would have been better.
  if (ready > 0 && clock_.now_ns() - now < 2 * spin_limit_ns_) grow_spin_budget();
  if (ready <= 0) return;
  if (waiting[0].revents != 0) bell_.take();
  if (waiting[1].revents != 0) {
    clock_.begin_round();
    link_.receive(clock_, clock_.now_ns() + kShareNs);
  }
}

std::uint64_t Engine::next_look_ns(std::uint64_t now) const {
  return std::min({watch_.next_look_ns(now), groups_.next_look_ns(now), far_engines_.next_look_ns()});
}

}  // namespace epd::engine
