// Ranks of one group that each replay a graph of calls.
#pragma once

#include "support/daemon.h"
#include "support/ranks.h"
#include "support/replayed.h"

#include <cstdint>
#include <functional>
#include <set>
#include <string>
#include <vector>

namespace epd::test {

// One that has joined. All throw RankFailure.
struct ReplayingRank {
  const Group& group;
  Replayed& replayed;
  std::uint32_t rank;

  // Rounds first .. last - 1, each checked.
  void play(std::uint64_t first, std::uint64_t last, const std::set<std::uint32_t>& lost = {}) const;
  // Compares the status of epd_group_check; must_become() waits for it.
  void must_be(epd_status_t status) const;
  void must_become(epd_status_t status) const;
  void resume() const;
};
using ReplayingBody = std::function<void(const ReplayingRank&)>;

// Attaches, joins, captures, and then runs the body.
void as_replaying_rank(const Daemon& daemon, const Case& c, const std::string& group, std::uint32_t rank,
                       const ReplayingBody& body);
RankProcess replaying_rank(const Daemon& daemon, const Case& c, const std::string& group, std::uint32_t rank,
                           const ReplayingBody& body);
// All of the case's.
std::vector<RankProcess> replaying_ranks(const Daemon& daemon, const Case& c, const std::string& group,
                                         const ReplayingBody& body);

}  // namespace epd::test
