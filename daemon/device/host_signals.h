// Signals of hosts: what they store for each other, and what an operation waits for them.
#pragma once

#include "base/clock.h"
#include "proto/exchange.h"
#include "proto/statistics.h"
#include "proto/waits.h"

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace epd::device {

// atomic_ref wants what it may write.
inline std::uint64_t load_acquire(const std::uint64_t& word) {
  return std::atomic_ref(const_cast<std::uint64_t&>(word)).load(std::memory_order_acquire);
}

inline void store_release(std::uint64_t& word, std::uint64_t value) {
  std::atomic_ref(word).store(value, std::memory_order_release);
}

inline void give_signal(abi::SignalLine& line, std::uint64_t tag, std::uint64_t now_ns) {
  std::atomic_ref(line.at_ns).store(now_ns, std::memory_order_relaxed);
  store_release(line.tag, tag);
}

// When a signal that was seen was given.
inline std::uint64_t given_at(const abi::SignalLine& line) {
  return std::atomic_ref(const_cast<std::uint64_t&>(line.at_ns)).load(std::memory_order_relaxed);
}

// Adds up what one operation waits for the other ranks.
class HostWaits {
 public:
  explicit HostWaits(const abi::RankWaits& counted) : counted_(counted) {}

  // The rank itself has signalled, and waits from now on.
  void begin(std::uint64_t now_ns) {
    since_ns_ = now_ns;
    last_ns_ = 0;
  }
  void ready(std::uint32_t rank, std::uint64_t at_ns) { add(rank, at_ns, &abi::PeerWait::ready_ns); }
  void arrived(std::uint32_t rank, std::uint64_t at_ns) { add(rank, at_ns, &abi::PeerWait::arrived_ns); }
  void all_ready() const {
    if (counted_.counts == nullptr) return;
    abi::count(counted_.counts->operations);
    if (last_ns_ <= since_ns_) abi::count(counted_.counts->last_arrivals);
  }

 private:
  void add(std::uint32_t rank, std::uint64_t at_ns, std::atomic<std::uint64_t> abi::PeerWait::*sum) {
    last_ns_ = std::max(last_ns_, at_ns);
    if (counted_.peers != nullptr && at_ns > since_ns_)
      abi::count(counted_.peers[rank].*sum, at_ns - since_ns_);
  }

  const abi::RankWaits counted_;
  std::uint64_t since_ns_ = 0;
  std::uint64_t last_ns_ = 0;
};

}  // namespace epd::device
