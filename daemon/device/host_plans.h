// The plans that a host device keeps of one rank's routings. Combine needs the plan of its dispatch. So does
// a dispatch that reuses a routing. Every routing lies in the exchange arena and outlives the engine: a plan
// that was dropped is made again from there.
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

// Keeps at most `kept` plans, those used last, and one more for each operation in flight. An operation holds
// the plan that it uses. A later dispatch on the same record makes a new plan beside it.
class HostPlans {
 public:
  explicit HostPlans(std::size_t kept) : most_(kept) {}

  // A plan to be filled in, in place of the record's. It may reuse the memory of an unused plan.
  std::shared_ptr<HostPlan> renew(std::uint32_t record);
  // The plan of the dispatch with this tag, or null.
  std::shared_ptr<HostPlan> find(std::uint32_t record, std::uint64_t tag);
  // The plan is complete. It becomes that of the record.
  void keep(std::uint32_t record, std::shared_ptr<HostPlan> plan);
  // An operation no longer needs the plan.
  void give_back(std::shared_ptr<HostPlan> plan);
  // All plans that no operation holds. The caller frees them.
  std::vector<std::shared_ptr<HostPlan>> take_all();

 private:
  struct Kept {
    std::uint32_t record;
    std::shared_ptr<HostPlan> plan;
  };
  void forget(std::list<Kept>::iterator kept);

  const std::size_t most_;
  std::list<Kept> kept_;  // in order of last use, the latest first
  std::unordered_map<std::uint32_t, std::list<Kept>::iterator> by_record_;
  std::vector<std::shared_ptr<HostPlan>> spare_;  // not used
};

}  // namespace epd::device
