// Order statistics of timings.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

namespace epd::kit {

// The q-quantile (0..1) with linear interpolation between neighbours; 0 for no samples.
double quantile(std::span<const double> samples, double q);

struct Summary {
  std::size_t count = 0;
  double min = 0, p50 = 0, p90 = 0, p99 = 0, max = 0;
};
Summary summarize(std::span<const double> samples);

// samples: [rows, ranks]. Returns the largest of each row: an operation ends when its last rank has.
std::vector<double> slowest_rank(std::span<const double> samples, std::size_t ranks);
// begins, ends: [rows, ranks], on one clock. Returns for each row the time from the first begin to the last
// end: what ranks do together takes, though fewer cores may run them one after the other.
std::vector<double> first_to_last(std::span<const double> begins, std::span<const double> ends,
                                  std::size_t ranks);

}  // namespace epd::kit
