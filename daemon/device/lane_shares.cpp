#include "lane_shares.h"

#include "device/launcher.h"
#include "proto/shape.h"
#include "worker_lane.h"

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <utility>

namespace epd::device {
namespace {

// SMs that all lanes together may always use, whatever the others do.
constexpr std::uint32_t kGuaranteedSms = 16;

}  // namespace

std::uint32_t lane_share(std::uint32_t sms, std::span<const std::int32_t> lanes, std::size_t lane) {
  const auto weight = [](std::int32_t priority) {
    return std::uint64_t{1} << (std::clamp(priority, abi::kMinPriority, abi::kMaxPriority) -
                                abi::kMinPriority);
  };
  const std::uint64_t all =
      std::accumulate(lanes.begin(), lanes.end(), std::uint64_t{0},
                      [&](std::uint64_t sum, std::int32_t p) { return sum + weight(p); });
  const std::uint64_t rest = sms > lanes.size() ? sms - lanes.size() : 0;
  return 1 + static_cast<std::uint32_t>(rest * weight(lanes[lane]) / all);
}

void LaneShares::open(std::uint32_t max_sms, CUdeviceptr credits, CUstream control) {
  max_sms_ = sms_ = max_sms;
  credits_ = credits;
  control_ = control;
}

void LaneShares::add(WorkerLane* lane) {
  lanes_.push_back(lane);
  apply();
}

void LaneShares::remove(WorkerLane* lane) {
  if (std::erase(lanes_, lane) != 0) apply();
}

void LaneShares::set_sms(std::uint32_t sms) {
  sms = std::clamp(sms, std::max(1u, size()), max_sms_);
  if (std::exchange(sms_, sms) != sms) apply();
}

std::uint32_t LaneShares::all_guaranteed() const {
  return std::max(size(), std::min(kGuaranteedSms, sms_));
}

std::uint32_t LaneShares::guaranteed(const WorkerLane& lane) const {
  std::vector<std::int32_t> priorities;
  std::size_t at = 0;
  for (const WorkerLane* each : lanes_) {
    if (each == &lane) at = priorities.size();
    priorities.push_back(each->priority());
  }
  return lane_share(all_guaranteed(), priorities, at);
}

// While the number of lanes changes, they may use a few SMs more than `sms_` for a moment. The SMs that the
// device spares (kSpareSms) cover that.
void LaneShares::apply() {
  const std::uint32_t limit = sms_ - std::min(sms_, all_guaranteed());
  cuda_must(driver_, "cuStreamWriteValue32",
            driver_.cuStreamWriteValue32(control_, credits_ + offsetof(kernels::SmCredits, limit), limit, 0));
  for (WorkerLane* lane : lanes_) lane->follow_share();
}

}  // namespace epd::device
