// Which stores an operation uses. Results do not depend on it, times do. Internal.
#pragma once

#include "host/row_kernels.h"

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace epd::kernels::host {

// Above kStreamingVolume streaming is faster wherever it was measured. Below, it depends on how far the
// readers are: ordinary stores leave rows in a cache that a near core may share, but the lines that a core on
// another socket has read must be fetched back from there first, at a fifth of the speed or less. No system
// call tells who will read, so dispatch learns it: it prefers ordinary stores unless streaming has been much
// faster, and tries the other kind now and then. Thread safe; lost updates only delay learning.
class StorePolicy {
 public:
  // For one call of an operation of `volume` bytes; sometimes a trial.
  Stores choose(std::size_t volume);
  // What choose would say, never a trial.
  Stores preferred(std::size_t volume) const;
  // A call with `stores` that stored `bytes` took `ns`.
  void learn(Stores stores, std::size_t volume, std::size_t bytes, std::uint64_t ns);

  static StorePolicy& of_process();

  static constexpr std::uint32_t kEarlyCalls = 512;  // among them every 16th is a trial, later every 256th
  static constexpr std::size_t kLeastBytes = std::size_t{64} << 10;  // less is not worth a look at the clock

 private:
  std::atomic<std::uint32_t> calls_{0};
  std::atomic<float> ns_per_kib_[2] = {0, 0};  // by Stores; 0: not known
};

}  // namespace epd::kernels::host
