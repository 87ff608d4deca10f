#pragma once

#include "kit/team.h"

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

namespace epd::kit {

// The words of the command line and of --json for a value.
template <typename Value>
struct Word {
  const char* word;
  Value value;
};
template <typename Value, std::size_t n>
const char* word_of(const Word<Value> (&words)[n], Value value) {
  for (const auto& [word, its] : words) {
    if (its == value) return word;
  }
  return "";
}

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

// A report is a JSON object: --json prints it, and the tables for people show some of its fields. Each
// benchmark makes its own kind.

using Json = nlohmann::ordered_json;
using Reports = std::vector<Json>;

// Formats like printf; at most 511 characters.
std::string format(const char* pattern, auto... values) {
  char text[512];
  std::snprintf(text, sizeof(text), pattern, values...);
  return text;
}

// Result of one rank's comparisons with the reference. Lives in shared memory.
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
// Adds the results of all ranks' checks: "checks", "correct" and "first_difference". May be called again with
// more verdicts.
void add_verdicts(Json& report, std::span<const Verdict> verdicts);

bool all_correct(const Reports& reports);
// "WRONG", "unchecked", "bit-exact (16)", "bit-exact (16, 1024 columns)"
std::string verdict_of(const Json& report);
// A line for each report with a first difference.
std::string differences_of(const Reports& reports);

struct Column {
  std::string title;
  std::function<std::string(const Json& report)> cell;  // "" is shown as "-"
};
// A column that shows one field of each report. `pattern` is printf's, for a number.
Column column(const std::string& title, const char* field, const char* pattern = "%.0f");
std::string number(const Json& value, const char* pattern);  // "" if it is null

enum class Style { kPlain, kMarkdown };
// Text is aligned to the left, numbers to the right.
std::string table(const Reports& reports, const std::vector<Column>& columns, Style style = Style::kPlain);

}  // namespace epd::kit
