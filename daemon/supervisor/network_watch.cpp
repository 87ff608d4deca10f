#include "network_watch.h"

#include "base/log.h"
#include "fleet.h"
#include "lifecycle.h"
#include "live_config.h"
#include "loop.h"
#include "membership/deciders.h"

#include <algorithm>
#include <atomic>
#include <limits>
#include <new>
#include <system_error>
#include <thread>
#include <utility>

namespace epd::supervisor {
namespace {

constexpr std::uint64_t kSoonNs = 1'000'000'000;
constexpr std::uint64_t kLaterNs = 3'000'000'000;  // names are asked for each time

}  // namespace

struct NetworkWatch::Look {
  const cluster::Settings settings;
  const std::string devices;
  NetworkChoice seen;  // written before `done`
  std::atomic<bool> done{false};
};

void NetworkWatch::tick() {
  if (!rooms_.config->cluster) return;
  note_engines();
  if (rooms_.loop.now_ns() < next_look_ns_) return;
  next_look_ns_ = rooms_.loop.now_ns() + kSoonNs;
  if (look_ == nullptr) return start_look();
  if (!look_->done.load(std::memory_order_acquire)) return;
  const bool settled = take(std::exchange(look_, nullptr)->seen);
  restart_idle();
  if (!settled || rooms_.config.network().devices.empty()) return start_look();
  next_look_ns_ = rooms_.loop.now_ns() + kLaterNs;
}

std::uint64_t NetworkWatch::next_due_ns() const {
  return rooms_.config->cluster ? next_look_ns_ : std::numeric_limits<std::uint64_t>::max();
}

void NetworkWatch::note_engines() {
  engines_.resize(rooms_.fleet.size());
  for (std::uint32_t i = 0; i < rooms_.fleet.size(); ++i) {
    const std::int32_t pid = rooms_.fleet[i].pid();
    if (engines_[i].pid != pid) engines_[i] = {pid, rooms_.config.network()};
  }
}

// A choice counts when two polls in a row have seen it: addresses and routes come one after the other.
// Returns whether this poll was like the one before.
bool NetworkWatch::take(const NetworkChoice& seen) {
  const bool again = seen_ == seen;
  seen_ = seen;
  const NetworkChoice& known = rooms_.config.network();
  if (!again || lacks(seen, known)) return again;
  if (seen != known) {
    log_event(LogLevel::kInfo, "the network of engines has changed",
              {{"before", in_words(known)}, {"now", in_words(seen)}, {"problem", seen.problem}});
  }
  rooms_.config.set_network(seen);
  rooms_.fleet.set_network(rooms_.config.network_options());
  return true;
}

// The resolver may load code that needs much stack: not start_detached_thread().
void NetworkWatch::start_look() {
  auto look = std::make_shared<Look>(*rooms_.config->cluster, rooms_.config->network_devices);
  try {
    std::thread([look] {
      try {
        look->seen = choose_network(look->settings, look->devices);
      } catch (const std::bad_alloc&) {
        // It has found nothing.
      }
      look->done.store(true, std::memory_order_release);
    }).detach();
    look_ = std::move(look);
  } catch (const std::system_error&) {
    return;  // no thread can be started now: the next look is due soon
  }
}

bool NetworkWatch::is_outdated(std::uint32_t device) const {
  if (device >= engines_.size() || engines_[device].pid == 0) return false;
  return supervisor::is_outdated(engines_[device].given, rooms_.config.network()) &&
         rooms_.fleet[device].name().starts_with("host:");
}

bool NetworkWatch::is_idle(std::uint32_t device) const {
  bool used = false;
  rooms_.deciders.each([&](const membership::Group& group) {
    used = used ||
           std::any_of(group.engines.begin(), group.engines.end(),
                       [&](const auto& entry) { return entry.first.device == device; }) ||
           std::any_of(group.members.begin(), group.members.end(),
                       [&](const auto& entry) { return entry.second.engine.device == device; });
  });
  return !used;
}

void NetworkWatch::restart_idle() {
  if (parts_.lifecycle.phase() != DaemonPhase::kServing) return;
  for (std::uint32_t i = 0; i < rooms_.fleet.size(); ++i) {
    if (!is_outdated(i) || !is_idle(i) || rooms_.fleet[i].seen_state() != DeviceState::kReady) continue;
    rooms_.fleet[i].restart("its network was " + in_words(engines_[i].given) + " and is now " +
                            in_words(rooms_.config.network()));
  }
}

std::string NetworkWatch::problem(std::uint32_t device) const {
  if (device >= engines_.size() || !rooms_.fleet[device].name().starts_with("host:")) return "";
  const NetworkChoice& given = engines_[device].given;
  if (!is_outdated(device)) return given.devices.empty() ? rooms_.config.network().problem : "";
  return "it was started with the network " + in_words(given) + ", and now it would be " +
         in_words(rooms_.config.network()) +
         "; it starts again when no group uses it, or by: epctl restart device " +
         rooms_.fleet[device].name();
}

}  // namespace epd::supervisor
