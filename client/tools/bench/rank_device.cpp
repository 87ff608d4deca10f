#include "rank_device.h"

#include <algorithm>
#include <cstring>

#include <unistd.h>

namespace epd::bench {
namespace {

constexpr std::size_t kMinEvictBytes = std::size_t{8} << 20;

std::size_t evict_bytes() {
  const long l2 = ::sysconf(_SC_LEVEL2_CACHE_SIZE);
  return std::max(kMinEvictBytes, 2 * static_cast<std::size_t>(std::max(l2, 0L)));
}

}  // namespace

HostRank::HostRank(bool flushes) : evict_(flushes ? evict_bytes() : 0, 1) {}

void HostRank::put(void* region, const void* from, std::size_t bytes) {
  if (bytes != 0) std::memcpy(region, from, bytes);
}

void HostRank::get(void* to, const void* region, std::size_t bytes) {
  if (bytes != 0) std::memcpy(to, region, bytes);
}

void HostRank::fill(void* region, int byte, std::size_t bytes) {
  if (bytes != 0) std::memset(region, byte, bytes);
}

void HostRank::flush_cache() {
  constexpr std::size_t kLine = 64;
  volatile char* bytes = evict_.data();
  for (std::size_t i = 0; i < evict_.size(); i += kLine) bytes[i] = static_cast<char>(bytes[i] + 1);
}

}  // namespace epd::bench
