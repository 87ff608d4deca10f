// Series of single ranks: what the others have waited for them, how often they were last, what they received.
//
// A group may have 1024 ranks, and series are bounded. So of a group with more than `max_ranks` those are
// told for which the others have waited most of late, and the rest together, as rank "other". Which ranks
// these are changes, and a counter must not fall. So each scrape adds what is new since the one before: to
// the rank's own series if it is told now, else to "other". That needs the numbers of the scrape before,
// which are kept here.
#pragma once

#include "base/clock.h"
#include "family_list.h"

#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

namespace epd::v1 {
class GetWaitsResponse;
class GroupWaits;
}  // namespace epd::v1

namespace epd::metrics {

class RankSeries {
 public:
  // The clock outlives it.
  RankSeries(std::size_t max_ranks, const Clock& clock) : max_ranks_(max_ranks), clock_(clock) {}

  // Of the first `max_groups` groups, by id.
  void tell(Families& out, const v1::GetWaitsResponse& waits, std::size_t max_groups);

 private:
  struct Counts {
    std::uint64_t ready_us = 0;
    std::uint64_t arrived_us = 0;
    std::uint64_t last_arrivals = 0;
    std::uint64_t rows = 0;
  };
  struct Rank {
    Counts seen;  // at the scrape before
    Counts told;
    // Of the last minutes; what is older counts less and less.
    double waited_us = 0;
    double rows = 0;
    bool here = false;
  };
  struct Group {
    std::uint64_t looked_ns = 0;
    std::vector<Rank> ranks;
    Counts other;
  };

  static Counts counts_of(const v1::GroupWaits& waits, int rank);
  static void add_news(Counts& sum, const Counts& before, const Counts& now);
  void take(Group& group, const v1::GroupWaits& waits) const;
  std::vector<std::size_t> told_ranks(const Group& group) const;
  static void tell_counts(Families& out, const Labels& labels, const Counts& counts);
  static void tell_pairs(Families& out, const Labels& labels, const v1::GroupWaits& waits);
  static void tell_ratio(Families& out, const Labels& labels, const Group& group);

  const std::size_t max_ranks_;
  const Clock& clock_;
  std::map<std::uint64_t, Group> groups_;
};

}  // namespace epd::metrics
