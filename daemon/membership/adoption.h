// Groups of an earlier coordinator, put together from the nodes' reports. A report that no honest node makes
// counts for nothing, not even against other nodes' reports: its node is told that the group ends. Only nodes
// of a group know its epoch key, so no other node can describe it.
#pragma once

#include "membership/group.h"
#include "membership/messages.h"

#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

namespace epd::membership {

class Adoption {
 public:
  // A node that has attached, and what it says of itself.
  struct Reporter {
    std::uint32_t index = 0;   // among all nodes that have attached
    std::uint32_t number = 0;  // from the coordinator of `term`; 0: none
    std::uint64_t term = 0;
    std::size_t num_devices = 0;
  };
  struct Adopted {
    std::vector<Group> groups;
    std::map<std::uint32_t, std::uint32_t> numbers;  // by index: of the nodes that take part in them
  };

  void add(const Reporter& reporter, const GroupReport& report);
  // Returns the groups whose ranks are all reported, in equal reports, by nodes of one term. If two groups
  // give one number to two nodes, or have one id, the group of more nodes is adopted, or that of the later
  // term. Groups of one node alone are left out beyond `most`, and beyond that node's share of it.
  Adopted take(std::size_t most);

 private:
  // Equal reports of one group id.
  struct Reports {
    GroupReport first;
    std::uint64_t term = 0;
    bool sound = true;
    Group group;
    std::map<std::uint32_t, std::uint32_t> numbers;  // by index
  };
  static bool is_sound(const GroupDescription& told);
  // Judges one rank of a sound description. Each membership has a number of its own.
  bool is_sound(const Reporter& reporter, const GroupDescription& told, const RankReport& rank) const;
  static bool is_whole(const Reports& reports);
  Reports& reports_of(const Reporter& reporter, const GroupReport& report);

  std::map<std::uint64_t, std::vector<Reports>> groups_;        // by id: no more than one for each reporter
  std::set<std::pair<std::uint32_t, std::uint64_t>> reported_;  // index and group id
  // Memberships that are reported: index, session, number.
  std::set<std::tuple<std::uint32_t, std::uint64_t, std::uint32_t>> members_;
};

}  // namespace epd::membership
