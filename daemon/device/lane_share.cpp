#include "device/launcher.h"

#include "proto/shape.h"

#include <algorithm>
#include <numeric>

namespace epd::device {

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

}  // namespace epd::device
