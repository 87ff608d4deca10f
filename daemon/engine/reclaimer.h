// Frees memory that is no longer used. A page takes some ten nanoseconds, and there may be many GiB. So
// memory is freed in pieces, between other work of the loop.
#pragma once

#include "base/clock.h"
#include "common/memory.h"
#include "device/launcher.h"

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>

namespace epd::engine {

struct GroupRankMemory;
class Member;

class Reclaimer {
 public:
  explicit Reclaimer(const Clock& clock) : clock_(clock) {}

  // Takes their memory: a rank's arenas, a lane's plans, or everything of a member. They are empty
  // afterwards.
  void take(GroupRankMemory& rank);
  void take(device::Lane& lane);
  void take(Member& member);
  // `call` runs when everything that was taken before is freed.
  void then(std::function<void()> call) { things_.push_back({{}, {}, std::move(call)}); }

  bool empty() const { return things_.empty(); }
  // Frees one piece, which takes some ten microseconds. Must not be empty().
  void step();

 private:
  struct Thing {
    std::shared_ptr<device::Arena> arena;
    std::shared_ptr<kernels::RoutingPlan> plan;
    std::function<void()> call;
  };
  bool give_back(Thing& thing);
  bool give_back(kernels::RoutingPlan& plan);

  const Clock& clock_;
  std::deque<Thing> things_;
  std::uint64_t piece_bytes_ = std::uint64_t{4} << 20;  // takes some ten microseconds
  std::uint64_t done_bytes_ = 0;                        // of the plan at the head
};

}  // namespace epd::engine
