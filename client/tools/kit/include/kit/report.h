// A report is a JSON object: --json prints it, and the tables for people show some of its fields. Every
// benchmark makes its own.
#pragma once

#include "kit/shared_array.h"
#include "kit/statistics.h"

#include <cstdint>
#include <cstdio>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

namespace epd::kit {

using Json = nlohmann::ordered_json;
using Reports = std::vector<Json>;

// As printf; at most 511 characters.
std::string format(const char* pattern, auto... values) {
  char text[512];
  std::snprintf(text, sizeof(text), pattern, values...);
  return text;
}

// Of one rank: what its comparisons with the reference have found. In shared memory.
struct Verdict {
  std::uint32_t checks;
  std::uint32_t failures;
  char first[256];  // the first difference

  // `difference`: "" if there is none.
  void add(const std::string& what, const std::string& difference);
};

// "p50", "p90", "p99", "max"
Json summary_json(const Summary& summary);
// "samples", "min_us", "p50_us", ..
void add_times(Json& report, const Summary& time);
// "checks", "correct" and "first_difference": what the checks of all ranks have found. May be called again,
// with more.
void add_verdicts(Json& report, std::span<const Verdict> verdicts);

bool all_correct(const Reports& reports);
// "WRONG", "unchecked", "bit-exact (16)", "bit-exact (16, 1024 columns)"
std::string verdict_of(const Json& report);
// A line for each report with a first difference.
std::string differences_of(const Reports& reports);

struct Column {
  std::string title;
  std::function<std::string(const Json& report)> cell;  // "": "-"
};
// A field of each report. `pattern`: of printf, for a number.
Column column(const std::string& title, const char* field, const char* pattern = "%.0f");
std::string number(const Json& value, const char* pattern);  // "" if it is null

enum class Style { kPlain, kMarkdown };
// Text lies left, numbers right.
std::string table(const Reports& reports, const std::vector<Column>& columns, Style style = Style::kPlain);

}  // namespace epd::kit
