#include "host/store_policy.h"

#include <algorithm>

namespace epd::kernels::host {
namespace {

constexpr float kMuchFaster = 0.6f;  // relative to the time of ordinary stores

std::size_t index(Stores stores) {
  return stores == Stores::kCached ? 0 : 1;
}

}  // namespace

Stores StorePolicy::preferred(std::size_t volume) const {
  if (volume > kStreamingVolume) return Stores::kStreaming;
  const float cached = ns_per_kib_[index(Stores::kCached)].load(std::memory_order_relaxed);
  const float streaming = ns_per_kib_[index(Stores::kStreaming)].load(std::memory_order_relaxed);
  return streaming != 0 && streaming < kMuchFaster * cached ? Stores::kStreaming : Stores::kCached;
}

Stores StorePolicy::choose(std::size_t volume) {
  const Stores best = preferred(volume);
  if (volume > kStreamingVolume) return best;
  const std::uint32_t call = calls_.fetch_add(1, std::memory_order_relaxed);
  const std::uint32_t period = call < kEarlyCalls ? 16 : 256;
  if (call % period != period - 1) return best;
  return best == Stores::kCached ? Stores::kStreaming : Stores::kCached;
}

void StorePolicy::learn(Stores stores, std::size_t volume, std::size_t bytes, std::uint64_t ns) {
  if (volume > kStreamingVolume || bytes < kLeastBytes || ns == 0) return;
  std::atomic<float>& known = ns_per_kib_[index(stores)];
  const float before = known.load(std::memory_order_relaxed);
  const float now = static_cast<float>(ns) * 1024 / static_cast<float>(bytes);
  if (before == 0) {
    known.store(now, std::memory_order_relaxed);
    return;
  }
  // The clock also runs while the thread does not. So one long call says little, and one short call says
  // much.
  const float step = now > before ? (std::min(now, 4 * before) - before) / 16 : (now - before) / 2;
  known.store(before + step, std::memory_order_relaxed);
}

StorePolicy& StorePolicy::of_process() {
  static StorePolicy policy;
  return policy;
}

}  // namespace epd::kernels::host
