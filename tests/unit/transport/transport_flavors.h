// The transports that the conformance suite runs over.
#pragma once

#include "support/faulty_transport.h"
#include "support/in_process_transport.h"
#include "transport/ucx.h"
#include "transport_end.h"

#include <memory>
#include <string>

namespace epd::transport {

// UCX over TCP on loopback, all messages eager; by rendezvous where they are larger than a few KiB; over
// shared memory.
enum class Carrier { kInProcess, kUcx, kUcxRendezvous, kUcxShared };

struct Flavor {
  Carrier carrier = Carrier::kInProcess;
  bool faults = false;
};
std::string name_of(const Flavor& flavor);

inline constexpr std::uint64_t kTestRendezvousBytes = 16 << 10;
UcxOptions ucx_options(Carrier carrier, const Limits& limits = {});
inline UcxOptions loopback(const Limits& limits = {}) {
  return ucx_options(Carrier::kUcx, limits);
}

class World {
 public:
  World(const Flavor& flavor, std::uint64_t seed) : flavor_(flavor), seed_(seed) {}
  // Each with faults of its own, from the world's seed.
  std::unique_ptr<Transport> open(const Limits& limits = {});
  std::unique_ptr<End> end(std::uint64_t name, const Limits& limits = {}) {
    return std::make_unique<End>(open(limits), name);
  }

 private:
  Flavor flavor_;
  std::uint64_t seed_;
  Network network_;
};

class Conformance : public ::testing::TestWithParam<Flavor> {
 protected:
  Conformance() : seed(test_seed()), random(seed), world(GetParam(), seed) {}
  const std::uint64_t seed;
  std::mt19937_64 random;
  World world;
};

}  // namespace epd::transport
