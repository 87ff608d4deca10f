#include "retired_memory.h"

#include "worker_lane.h"

#include <algorithm>
#include <utility>

namespace epd::device {
namespace {

// A device that has had no call for so long counts as idle.
constexpr std::uint64_t kIdleNs = 20'000'000;
// How long a call of one lane may have to wait for the others. A try may take longer after one that was given
// up: beside a client's kernels, those that are enqueued ahead need more time.
constexpr std::uint64_t kFirstTryNs = 5'000'000;
constexpr std::uint64_t kLongestTryNs = 40'000'000;
constexpr std::uint64_t kFirstPauseNs = 50'000'000;
constexpr std::uint64_t kLongestPauseNs = 1'000'000'000;
constexpr std::uint64_t kMostDoublings = 5;
constexpr std::size_t kMostAtOnce = 8;  // closing one takes up to a millisecond

std::uint64_t doubled(std::uint64_t ns, std::uint64_t times, std::uint64_t longest) {
  return std::min(ns << std::min(times, kMostDoublings), longest);
}

}  // namespace

bool RetiredMemory::note_opened(CUdeviceptr base, std::uint64_t id, std::uint64_t bytes) {
  Opened& known = opened_[base];
  if (known.times == 0) known = {id, bytes, 0};
  ++known.times;
  return known.id == id;
}

void RetiredMemory::add_opened(CUdeviceptr base) {
  waiting_bytes_ += opened_.at(base).bytes;
  to_close_.push_back(base);
}

void RetiredMemory::add(std::unique_ptr<Arena> memory, std::uint64_t bytes) {
  waiting_bytes_ += bytes;
  arena_bytes_ += bytes;
  arenas_.push_back(std::move(memory));
}

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
  arenas_.clear();
  waiting_bytes_ -= std::exchange(arena_bytes_, 0);
  for (std::size_t i = 0; i < kMostAtOnce && !to_close_.empty(); ++i) {
    const CUdeviceptr base = to_close_.back();
    to_close_.pop_back();
    cuda_must(driver_, "cuIpcCloseMemHandle", driver_.cuIpcCloseMemHandle(base));
    const auto known = opened_.find(base);
    waiting_bytes_ -= known->second.bytes;
    if (--known->second.times == 0) opened_.erase(known);
  }
}

bool RetiredMemory::advance(std::span<WorkerLane* const> lanes, std::uint64_t now_ns,
                            const std::function<bool()>& rest_is_idle) {
  if (draining_since_ns_ == 0) {
    if ((arenas_.empty() && to_close_.empty()) || now_ns < next_try_ns_) return false;
    if (!has_called(lanes, now_ns - std::min(now_ns, kIdleNs))) begin(lanes, now_ns);
    return true;
  }
  const bool drained =
      std::all_of(lanes.begin(), lanes.end(), [](const WorkerLane* lane) { return lane->is_drained(); });
  if (drained && rest_is_idle()) {
    close();
    tries_ = 0;
    end(lanes, now_ns);
  } else if (now_ns - draining_since_ns_ > doubled(kFirstTryNs, tries_, kLongestTryNs) ||
             has_called(lanes, draining_since_ns_)) {
    end(lanes, now_ns + doubled(kFirstPauseNs, tries_, kLongestPauseNs));
    ++tries_;
  }
  return draining_since_ns_ != 0;
}

}  // namespace epd::device
