#include "retired_memory.h"

#include "worker_lane.h"

#include <algorithm>

namespace epd::device {
namespace {

// A device that has had no call for so long counts as idle.
constexpr std::uint64_t kIdleNs = 20'000'000;
// How long calls may have to wait.
constexpr std::uint64_t kMostDrainNs = 5'000'000;
constexpr std::uint64_t kFirstPauseNs = 50'000'000;
constexpr std::uint64_t kMostPauseNs = 1'000'000'000;
constexpr std::size_t kMostAtOnce = 8;  // closing one takes up to a millisecond

}  // namespace

bool RetiredMemory::has_called(std::span<WorkerLane* const> lanes, std::uint64_t since_ns) {
  return std::any_of(lanes.begin(), lanes.end(),
                     [since_ns](const WorkerLane* lane) { return lane->last_call_ns() > since_ns; });
}

void RetiredMemory::begin(std::span<WorkerLane* const> lanes, std::uint64_t now_ns) {
  draining_since_ns_ = now_ns;
  for (WorkerLane* lane : lanes) lane->drain(true);
}

void RetiredMemory::end(std::span<WorkerLane* const> lanes, std::uint64_t next_ns) {
  for (WorkerLane* lane : lanes) lane->drain(false);
  draining_since_ns_ = 0;
  next_try_ns_ = next_ns;
}

void RetiredMemory::close() {
  for (std::size_t i = 0; i < kMostAtOnce && !opened_.empty(); ++i) {
    cuda_must(driver_, "cuIpcCloseMemHandle", driver_.cuIpcCloseMemHandle(opened_.back()));
    opened_.pop_back();
  }
}

bool RetiredMemory::advance(std::span<WorkerLane* const> lanes, std::uint64_t now_ns,
                            const std::function<bool()>& rest_is_idle) {
  if (draining_since_ns_ == 0) {
    if (empty() || now_ns < next_try_ns_) return false;
    if (!has_called(lanes, now_ns - std::min(now_ns, kIdleNs))) begin(lanes, now_ns);
    return true;
  }
  const bool drained =
      std::all_of(lanes.begin(), lanes.end(), [](const WorkerLane* lane) { return lane->is_drained(); });
  if (drained && rest_is_idle()) {
    arenas_.clear();  // which may add to those that are to be closed
    close();
    pause_ns_ = 0;
    end(lanes, now_ns);
  } else if (now_ns - draining_since_ns_ > kMostDrainNs || has_called(lanes, draining_since_ns_)) {
    pause_ns_ = std::clamp(pause_ns_ * 2, kFirstPauseNs, kMostPauseNs);
    end(lanes, now_ns + pause_ns_);
  }
  return draining_since_ns_ != 0;
}

}  // namespace epd::device
