// Groups that are to begin, or to go on, once the kernels of their ranks know of it and their far engines
// have said hello.
#pragma once

#include "far_engines.h"
#include "journals.h"
#include "operations.h"

#include <cstdint>
#include <string>
#include <vector>

namespace epd::engine {

class Starts {
 public:
  // `device`: its name.
  Starts(std::string device, SupervisorLink& link, Operations& operations, const Journals& journals,
         FarEngines& far_engines, const RoundClock& clock)
      : device_(std::move(device)),
        link_(link),
        operations_(operations),
        journals_(journals),
        far_engines_(far_engines),
        clock_(clock) {}

  // The group begins as soon as its kernels are ready, which may be at once.
  void owe(Group& group);
  // In each round: those that are ready begin; of others the supervisor is told what they wait for.
  void finish();
  // Ready or not: nobody has enqueued anything yet.
  void begin(Group& group);
  // One that will not begin any more.
  void forget(const Group& group);

 private:
  struct Owed {
    Group* group;
    std::uint64_t since_ns;
    std::uint64_t say_waits_ns;  // when the supervisor is told what it waits for
    bool waits_logged = false;
    bool difference_told = false;
  };
  void activate(Group& group);
  bool refuse(Owed& owed);
  std::string awaited(const Group& group) const;
  std::string awaited(const Group& group, const Member& late) const;
  void say_waits(Owed& owed, const std::string& text);
  std::string holder_of_sms(const Group& group) const;

  const std::string device_;
  SupervisorLink& link_;
  Operations& operations_;
  const Journals& journals_;
  FarEngines& far_engines_;
  const RoundClock& clock_;
  std::vector<Owed> owed_;
};

}  // namespace epd::engine
