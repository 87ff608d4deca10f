// Groups that are to begin, or to resume, once the device of their ranks has taken the epoch and the
// greetings of their far engines have come.
#pragma once

#include "far_engines.h"
#include "journals.h"

#include <cstdint>
#include <string>
#include <vector>

namespace epd::engine {

class Starts {
 public:
  // `device` is the device's name.
  Starts(std::string device, SupervisorLink& link, const Journals& journals, FarEngines& far_engines,
         const RoundClock& clock)
      : device_(std::move(device)),
        link_(link),
        journals_(journals),
        far_engines_(far_engines),
        clock_(clock) {}

  // The group begins as soon as the device is ready, which may be at once.
  void owe(Group& group);
  // Called in each round: begins the groups that are ready, and tells the supervisor what the others wait
  // for.
  void finish();
  // Begins a group without waiting for the device, because nothing can have been enqueued yet.
  void begin(Group& group);
  // Forgets a group that will not begin any more.
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
  void say_waits(Owed& owed, const std::string& text);

  const std::string device_;
  SupervisorLink& link_;
  const Journals& journals_;
  FarEngines& far_engines_;
  const RoundClock& clock_;
  std::vector<Owed> owed_;
};

}  // namespace epd::engine
