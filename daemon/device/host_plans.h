// The plans that a host device keeps of one rank's routings: what combine, and dispatches that reuse a
// routing, need of a past dispatch. Every routing lies in the exchange arena and outlives the engine; a plan
// that has left memory is made of that again.
#pragma once

#include "kernels/routing.h"

#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <unordered_map>
#include <vector>

namespace epd::device {

struct HostPlan {
  std::uint64_t tag = 0;  // abi::op_tag of the dispatch that made the routing
  kernels::RoutingPlan plan;
  kernels::Placement placement;
};

// At most `kept` plans, those that were used last, and one for each operation in flight: an operation holds
// the plan that it uses, and a later dispatch on the same record makes a new one beside it.
class HostPlans {
 public:
  explicit HostPlans(std::size_t kept) : most_(kept) {}

  // A plan to be made anew, whose memory may be that of one that nobody needs; in place of the record's.
  std::shared_ptr<HostPlan> renew(std::uint32_t record);
  // That of the dispatch with this tag, or null.
  std::shared_ptr<HostPlan> find(std::uint32_t record, std::uint64_t tag);
  // It is complete, and the record's.
  void keep(std::uint32_t record, std::shared_ptr<HostPlan> plan);
  // An operation needs it no more.
  void give_back(std::shared_ptr<HostPlan> plan);
  // All that are not held elsewhere, for somebody else to free.
  std::vector<std::shared_ptr<HostPlan>> take_all();

  // Of a dispatch in flight until its routing is complete: nobody else may use that before.
  void begin_making(std::uint64_t tag) { making_.push_back(tag); }
  void end_making(std::uint64_t tag) { std::erase(making_, tag); }
  bool is_making(std::uint64_t tag) const;

 private:
  struct Kept {
    std::uint32_t record;
    std::shared_ptr<HostPlan> plan;
  };
  void forget(std::list<Kept>::iterator kept);

  const std::size_t most_;
  std::list<Kept> kept_;  // used last: first
  std::unordered_map<std::uint32_t, std::list<Kept>::iterator> by_record_;
  std::vector<std::shared_ptr<HostPlan>> spare_;  // nobody's
  std::vector<std::uint64_t> making_;             // tags
};

}  // namespace epd::device
