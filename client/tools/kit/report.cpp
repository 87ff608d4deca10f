#include "kit/report.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstring>
#include <numeric>

namespace epd::kit {

// ---- statistics

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

// ---- report

void Verdict::add(const std::string& what, const std::string& difference) {
  ++checks;
  if (!difference.empty() && failures++ == 0)
    std::strncpy(first, (what + ": " + difference).c_str(), sizeof(first) - 1);
}

Json summary_json(const Summary& summary) {
  return {{"p50", summary.p50}, {"p90", summary.p90}, {"p99", summary.p99}, {"max", summary.max}};
}

void add_times(Json& report, const Summary& time) {
  report.update({{"samples", time.count},
                 {"min_us", time.min},
                 {"p50_us", time.p50},
                 {"p90_us", time.p90},
                 {"p99_us", time.p99},
                 {"max_us", time.max}});
}

void add_verdicts(Json& report, std::span<const Verdict> verdicts) {
  std::uint32_t checks = report.value("checks", 0u);
  bool correct = report.value("correct", true);
  for (const Verdict& verdict : verdicts) {
    checks += verdict.checks;
    if (verdict.failures == 0) continue;
    if (correct) report["first_difference"] = verdict.first;
    correct = false;
  }
  report["checks"] = checks;
  report["correct"] = correct;
}

bool all_correct(const Reports& reports) {
  return std::all_of(reports.begin(), reports.end(), [](const Json& report) { return report.at("correct"); });
}

std::string verdict_of(const Json& report) {
  if (!report.at("correct")) return "WRONG";
  if (!report.contains("checks")) return "ok";
  const std::uint32_t checks = report.at("checks");
  if (checks == 0) return "unchecked";
  const std::uint32_t hidden = report.value("hidden", 0u);
  const std::uint32_t columns = report.value("checked_columns", hidden);
  return format("bit-exact (%u%s)", checks, columns == hidden ? "" : format(", %u columns", columns).c_str());
}

std::string differences_of(const Reports& reports) {
  std::string text;
  for (const Json& report : reports) {
    if (report.contains("first_difference"))
      text += "first difference: " + report.at("first_difference").get<std::string>() + "\n";
  }
  return text;
}

std::string number(const Json& value, const char* pattern) {
  return value.is_number() ? format(pattern, value.get<double>()) : "";
}

Column column(const std::string& title, const char* field, const char* pattern) {
  return {title, [=](const Json& report) {
            const Json value = report.value(field, Json());
            return value.is_string() ? value.get<std::string>() : number(value, pattern);
          }};
}

std::string table(const Reports& reports, const std::vector<Column>& columns, Style style) {
  std::vector<std::vector<std::string>> lines(1 + reports.size());
  std::vector<std::size_t> widths;
  std::vector<bool> left;
  for (const Column& column : columns) {
    lines[0].push_back(column.title);
    std::size_t width = column.title.size();
    bool words = false;
    for (std::size_t i = 0; i < reports.size(); ++i) {
      std::string cell = column.cell(reports[i]);
      if (cell.empty()) cell = "-";
      words = words || std::isalpha(static_cast<unsigned char>(cell[0])) != 0;
      width = std::max(width, cell.size());
      lines[i + 1].push_back(std::move(cell));
    }
    widths.push_back(width);
    left.push_back(words);
  }
  std::string text;
  for (std::size_t i = 0; i < lines.size(); ++i) {
    std::string line;
    for (std::size_t c = 0; c < columns.size(); ++c) {
      const std::string padding(widths[c] - lines[i][c].size(), ' ');
      if (style == Style::kMarkdown) {
        line += "| " + lines[i][c] + " ";
      } else {
        line += (left[c] ? lines[i][c] + padding : padding + lines[i][c]) + "  ";
      }
    }
    if (style == Style::kMarkdown) line += "|";
    text += line.substr(0, line.find_last_not_of(' ') + 1) + "\n";
    if (i != 0 || style != Style::kMarkdown) continue;
    for (const bool of_words : left) text += of_words ? "|---" : "|---:";
    text += "|\n";
  }
  return text;
}

}  // namespace epd::kit
