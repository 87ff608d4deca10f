#include "fleet.h"

#include <algorithm>
#include <limits>

namespace epd::supervisor {
namespace {

constexpr std::uint64_t kMsNs = 1'000'000;

}  // namespace

Status EngineFleet::start(const std::vector<std::string>& devices) {
  for (const std::string& name : devices) {
    Result<std::unique_ptr<Engine>> engine = Engine::make(context_, size(), name);
    if (!engine.ok()) return engine.status();
    engines_.push_back(std::move(*engine));
  }
  for (const auto& engine : engines_) engine->start();
  next_check_ns_ = context_.loop.now_ns() + check_period_ns();
  return {};
}

std::uint64_t EngineFleet::check_period_ns() const {
  return std::clamp<std::uint64_t>(context_.options.watchdog_ms / 4, 1'000, 2'500) * kMsNs;
}

void EngineFleet::tick() {
  const std::uint64_t now = context_.loop.now_ns();
  for (const auto& engine : engines_) engine->reap_if_due(now);
  if (context_.stopping) {
    if (kill_all_ns_ > now) return;
    for (const auto& engine : engines_) engine->kill("it did not stop");
    return;
  }
  for (const auto& engine : engines_) engine->start_or_kill_if_due(now);
  if (next_check_ns_ > now) return;
  next_check_ns_ = now + check_period_ns();
  for (const auto& engine : engines_) engine->check_alive();
}

std::uint64_t EngineFleet::next_due_ns() const {
  std::uint64_t due = next_check_ns_;
  if (context_.stopping) {
    const bool killed = std::all_of(engines_.begin(), engines_.end(), [](const auto& engine) {
      return engine->process() == nullptr || engine->is_being_killed();
    });
    due = killed ? std::numeric_limits<std::uint64_t>::max() : kill_all_ns_;
  }
  for (const auto& engine : engines_) due = std::min(due, engine->next_due_ns());
  return due;
}

void EngineFleet::stop(std::uint32_t grace_ms) {
  if (std::exchange(context_.stopping, true)) return;
  kill_all_ns_ = context_.loop.now_ns() + grace_ms * kMsNs;
  for (const auto& engine : engines_) engine->send_stop();
}

bool EngineFleet::all_stopped() const {
  return std::none_of(engines_.begin(), engines_.end(),
                      [](const auto& engine) { return engine->process() != nullptr; });
}

bool EngineFleet::all_settled() const {
  return std::all_of(engines_.begin(), engines_.end(), [](const auto& engine) {
    return engine->is_ready() || engine->state() == DeviceState::kFailed;
  });
}

bool EngineFleet::all_loops_advanced() {
  return std::count_if(engines_.begin(), engines_.end(),
                       [](const auto& engine) { return !engine->loop_advanced(); }) == 0;
}

std::uint64_t EngineFleet::queued_descriptors() const {
  std::uint64_t count = 0;
  for (const auto& engine : engines_)
    count += engine->process() != nullptr ? engine->process()->queued_descriptors() : 0;
  return count;
}

}  // namespace epd::supervisor
