// Groups that are to begin, or to go on, once the kernels of their ranks know of it.
#pragma once

#include "journals.h"
#include "operations.h"

#include <cstdint>
#include <string>
#include <vector>

namespace epd {

class Starts {
 public:
  // `device`: its name.
  Starts(std::string device, SupervisorLink& link, Operations& operations, const Journals& journals,
         const RoundClock& clock)
      : device_(std::move(device)),
        link_(link),
        operations_(operations),
        journals_(journals),
        clock_(clock) {}

  // The group begins as soon as its kernels are ready, which may be at once.
  void owe(Group& group);
  // In each round: those whose kernels are ready begin; of others the supervisor is told what they wait for.
  void finish();
  // Kernels or not: nobody has enqueued anything yet.
  void begin(Group& group);
  // One that will not begin any more.
  void forget(const Group& group);

 private:
  struct Owed {
    Group* group;
    std::uint64_t since_ns;
    std::uint64_t say_waits_ns;  // when the supervisor is told what it waits for
    bool waits_logged = false;
  };
  void activate(Group& group);
  void say_waits(Owed& owed, const Member& late);
  std::string holder_of_sms(const Group& group) const;

  const std::string device_;
  SupervisorLink& link_;
  Operations& operations_;
  const Journals& journals_;
  const RoundClock& clock_;
  std::vector<Owed> owed_;
};

}  // namespace epd
