// The reports of operations, layers and nodes share these parts.
#pragma once

#include "kit/format.h"
#include "kit/statistics.h"
#include "samples.h"

#include <cstdint>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

namespace epd::bench {

using Json = nlohmann::ordered_json;
using kit::format;

inline Json summary_json(const kit::Summary& summary) {
  return {{"p50", summary.p50}, {"p90", summary.p90}, {"p99", summary.p99}, {"max", summary.max}};
}

// Returns the verdict on results that were compared with the reference.
inline std::string verdict_of(bool correct, std::uint32_t checks) {
  if (!correct) return "WRONG";
  return checks == 0 ? "unchecked" : "bit-exact";
}

// Adds what the checks of all ranks have found. `report.correct` is true before the first call.
template <typename AnyReport>
void add_verdicts(const OperationSamples& samples, AnyReport& report) {
  for (const Verdict& verdict : samples.verdicts.span()) {
    report.checks += verdict.checks;
    if (verdict.failures == 0) continue;
    if (report.correct) report.first_difference = verdict.first;
    report.correct = false;
  }
}

template <typename AnyReport>
void append_difference(const AnyReport& report, Json& json) {
  if (!report.first_difference.empty()) json["first_difference"] = report.first_difference;
}

template <typename AnyReport>
void append_differences(const std::vector<AnyReport>& reports, std::string& text) {
  for (const AnyReport& report : reports) {
    if (!report.first_difference.empty()) text += "first difference: " + report.first_difference + "\n";
  }
}

}  // namespace epd::bench
