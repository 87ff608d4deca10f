// A summary of samples as JSON.
#pragma once

#include "kit/statistics.h"

#include <nlohmann/json.hpp>

namespace epd::bench {

inline nlohmann::ordered_json summary_json(const kit::Summary& summary) {
  return {{"p50", summary.p50}, {"p90", summary.p90}, {"p99", summary.p99}, {"max", summary.max}};
}

}  // namespace epd::bench
