// The well-behaved ones beside an attack: a rank on each of two devices, a group of both, and noop, dispatch
// and combine one after another throughout. Every result is compared with the specification, every operation
// has a deadline, none may fail. How long each took is recorded, before and during the attack, and printed:
// never judged.
#pragma once

#include "fault.h"

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

namespace epd::test {

class Bystander {
 public:
  // Starts the ranks and waits until they have run undisturbed for a while.
  explicit Bystander(const Daemon& daemon);
  // From here on latencies count as "during".
  void attack_begins() const { log_->phase.store(1); }
  // Lets `rounds` more rounds happen, then ends the ranks; a test failure if one did not get there or saw
  // anything but exact results. Prints the latencies.
  void finish(std::uint64_t rounds = 20);

 private:
  static constexpr std::uint32_t kRanks = 2;
  static constexpr std::size_t kOps = 3;
  static constexpr std::size_t kSamples = 1 << 15;  // of each kind; later ones overwrite the first
  struct Samples {
    std::atomic<std::uint64_t> count;
    float us[kSamples];
  };
  struct Log {
    std::atomic<std::uint32_t> phase;
    std::atomic<std::uint64_t> rounds[kRanks];
    LastRound last;
    Samples samples[2][kOps];  // phase, kind
  };

  class Rank;
  void print() const;
  std::uint64_t rounds_of_all() const;

  Shared<Log> log_;
  std::vector<RankProcess> ranks_;
};

}  // namespace epd::test
