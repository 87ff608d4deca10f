// The choice of stores for an operation. Results do not depend on it; times do. Internal.
#pragma once

#include "host/row_kernels.h"

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace epd::kernels::host {

// Above kStreamingVolume, streaming was faster wherever it was measured. Below it, the distance of the
// readers decides. Ordinary stores leave rows in a cache, which a near core may share. But lines that a core
// on another socket has read must be fetched back from there first, at a fifth of the speed or less. No
// system call tells who will read, so dispatch learns it. The policy prefers ordinary stores unless streaming
// has been much faster, and tries the other kind now and then. Thread safe; lost updates only delay learning.
class StorePolicy {
 public:
  // Chooses the stores for one call of an operation of `volume` bytes. Sometimes the choice is a trial.
  Stores choose(std::size_t volume);
  // Returns what choose() would choose without trials.
  Stores preferred(std::size_t volume) const;
  // Reports that a call with `stores` stored `bytes` in `ns`.
  void learn(Stores stores, std::size_t volume, std::size_t bytes, std::uint64_t ns);

  static StorePolicy& of_process();

  static constexpr std::uint32_t kEarlyCalls = 512;  // every 16th of these is a trial, later every 256th
  static constexpr std::size_t kLeastBytes = std::size_t{64} << 10;  // shorter calls are not timed

 private:
  std::atomic<std::uint32_t> calls_{0};
  std::atomic<float> ns_per_kib_[2] = {0, 0};  // by Stores; 0: not known
};

}  // namespace epd::kernels::host
