#include "kit/statistics.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace epd::kit {
namespace {

double sorted_quantile(const std::vector<double>& sorted, double q) {
  if (sorted.empty()) return 0;
  const double place = std::clamp(q, 0.0, 1.0) * static_cast<double>(sorted.size() - 1);
  const auto below = static_cast<std::size_t>(std::floor(place));
  const std::size_t above = std::min(below + 1, sorted.size() - 1);
  return sorted[below] + (sorted[above] - sorted[below]) * (place - static_cast<double>(below));
}

std::vector<double> sorted_copy(std::span<const double> samples) {
  std::vector<double> sorted(samples.begin(), samples.end());
  std::sort(sorted.begin(), sorted.end());
  return sorted;
}

}  // namespace

double quantile(std::span<const double> samples, double q) {
  return sorted_quantile(sorted_copy(samples), q);
}

Summary summarize(std::span<const double> samples) {
  const std::vector<double> sorted = sorted_copy(samples);
  if (sorted.empty()) return {};
  return {sorted.size(),
          sorted.front(),
          sorted_quantile(sorted, 0.50),
          sorted_quantile(sorted, 0.90),
          sorted_quantile(sorted, 0.99),
          sorted.back()};
}

std::vector<double> slowest_rank(std::span<const double> samples, std::size_t ranks) {
  std::vector<double> slowest;
  for (std::size_t row = 0; ranks != 0 && row < samples.size() / ranks; ++row) {
    const auto values = samples.subspan(row * ranks, ranks);
    slowest.push_back(*std::max_element(values.begin(), values.end()));
  }
  return slowest;
}

std::vector<double> first_to_last(std::span<const double> begins, std::span<const double> ends,
                                  std::size_t ranks) {
  std::vector<double> times = slowest_rank(ends, ranks);
  for (std::size_t row = 0; row < times.size(); ++row) {
    const auto values = begins.subspan(row * ranks, ranks);
    times[row] -= *std::min_element(values.begin(), values.end());
  }
  return times;
}

}  // namespace epd::kit
