#include "device_watch.h"

#include "base/log.h"
#include "round_clock.h"

#include <algorithm>

namespace epd::engine {
namespace {

constexpr std::uint64_t kCheckNs = 1'000'000'000;
constexpr std::uint64_t kCheckOftenNs = 5'000'000;
constexpr std::uint64_t kAfterClientNs = 2'000'000'000;  // after a client has gone

}  // namespace

void DeviceWatch::advance() {
  busy_ = device_.advance();
  if (device_.times_stuck() != page_->times_stuck.load(std::memory_order_relaxed)) note_stuck();
}

void DeviceWatch::note_stuck() {
  page_->times_stuck.store(device_.times_stuck(), std::memory_order_relaxed);
  log_event(LogLevel::kWarning, "the GPU began no kernel for 100 ms",
            {{"device", device_.name()}, {"times", device_.times_stuck()}});
}

// Under MPS a client that ends inside its own kernel takes along every process on the GPU, and MPS accepts no
// new process until all of them have gone. So an engine must notice that even while it has nothing to do.
void DeviceWatch::check(std::uint64_t now_ns) {
  if (now_ns < next_check_ns_) return;
  device_.check();
  next_check_ns_ = now_ns + (now_ns < check_often_ns_ ? kCheckOftenNs : kCheckNs);
}

void DeviceWatch::note_client_gone(std::uint64_t now_ns) {
  if (!device_.traits().has_streams) return;
  check_often_ns_ = now_ns + kAfterClientNs;
  next_check_ns_ = 0;
}

std::uint64_t DeviceWatch::next_look_ns(std::uint64_t now_ns) const {
  const std::uint64_t next = next_check_ns_ < check_often_ns_ ? next_check_ns_ : kNever;
  return busy_ ? std::min(next, now_ns + kDeviceLookNs) : next;
}

}  // namespace epd::engine
