// Text of one operation, of statistics, of one event.
#include "json.h"
#include "render.h"
#include "table.h"
#include "units.h"

#include <ctime>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <map>

namespace epd::ctl {
namespace {

std::string in_us(std::int64_t us) {
  return us >= 0 ? "in " + format_us(static_cast<std::uint64_t>(us))
                 : format_us(static_cast<std::uint64_t>(-us)) + " ago";
}

std::string counts(const google::protobuf::RepeatedPtrField<v1::StatusCount>& list) {
  std::string text;
  for (const v1::StatusCount& entry : list)
    text += (text.empty() ? "" : ", ") + entry.status() + " " + std::to_string(entry.count());
  return text;
}

std::string percentiles(const v1::Histogram& histogram) {
  if (histogram.count() == 0) return "";
  return format_us(histogram.p50_us()) + " / " + format_us(histogram.p99_us());
}

std::vector<Column> statistics_columns(std::vector<Column> first) {
  for (const char* title :
       {"NOOPS", "DISPATCHES", "COMBINES", "OK", "DISPATCHED", "COMBINED", "DONE p50/p99"}) {
    first.push_back({title, Align::kRight});
  }
  first.push_back({"FAILED"});
  first.push_back({"REFUSED"});
  return first;
}

void add(Table& table, std::vector<std::string> first, const v1::Statistics& s) {
  for (std::string& cell :
       std::vector<std::string>{std::to_string(s.noops()), std::to_string(s.dispatches()),
                                std::to_string(s.combines()), std::to_string(s.completed()),
                                format_bytes(s.bytes_dispatched()), format_bytes(s.bytes_combined()),
                                percentiles(s.done()), counts(s.failed()), counts(s.refused())}) {
    first.push_back(cell);
  }
  table.add(std::move(first));
}

std::string owner(std::uint64_t id) {
  return id == 0 ? "others" : std::to_string(id);
}

// As in the log: what stands in the value ends neither it nor the field.
std::string quoted(const std::string& text) {
  std::string result = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') result += '\\';
    result += c;
  }
  return result + "\"";
}

}  // namespace

std::string render(const v1::GetOperationResponse& detail) {
  const v1::Operation& op = detail.operation();
  std::string text = "operation " + printable(op.id()) + "  " + word(op.op()) + " " +
                     std::to_string(op.op_index()) + " of group " + std::to_string(op.group_id()) + " (" +
                     printable(detail.group()) + "), epoch " + std::to_string(op.epoch()) + "\n";
  text += "  rank       " + std::to_string(op.rank()) + ", session " + std::to_string(op.session_id()) +
          ", pid " + std::to_string(detail.pid()) + ", " + printable(op.device()) + " (engine " +
          std::to_string(detail.engine_pid()) + ")\n";
  text += "  stage      " + word(op.stage()) + "\n";
  text += "  seen       " + format_us(op.age_us()) + " ago\n";
  text += "  deadline   " + in_us(op.deadline_in_us()) + "\n";
  text += "  history   ";
  for (const v1::StageEntry& stage : op.stages())
    text += " " + printable(stage.stage()) + " +" + format_us(stage.after_us());
  text += "\n";
  if (!op.far_wait().empty()) text += "  far        waits for " + printable(op.far_wait()) + "\n";
  for (const v1::Wait& wait : detail.waits()) {
    // The last one is the reason, mostly, and is not said twice.
    if (detail.text().find(wait.text()) == std::string::npos)
      text += "  waits for  " + printable(wait.text()) + "\n";
  }
  return text + "  why        " + printable(detail.text()) + "\n";
}

std::string render(const v1::GetStatisticsResponse& statistics, bool ranks,
                   const std::map<std::uint64_t, std::string>& names) {
  Table sessions(statistics_columns({{"SESSION", Align::kRight}, {"DEVICE"}}));
  for (const v1::SessionStatistics& s : statistics.sessions())
    add(sessions, {owner(s.session_id()), s.device()}, s.statistics());
  Table groups(statistics_columns({{"GROUP", Align::kRight}, {"NAME"}}));
  for (const v1::GroupStatistics& g : statistics.groups()) {
    const auto name = names.find(g.group_id());
    add(groups, {owner(g.group_id()), name == names.end() ? "" : name->second}, g.statistics());
  }
  if (sessions.empty() && groups.empty())
    return "there are no sessions and no groups; epctl devices has the sums of engines\n";
  std::string text = sessions.text();
  if (!groups.empty()) text += "\n" + groups.text();
  if (!ranks) return text;
  Table members(statistics_columns(
      {{"GROUP", Align::kRight}, {"RANK", Align::kRight}, {"SESSION", Align::kRight}, {"DEVICE"}}));
  for (const v1::RankStatistics& r : statistics.ranks()) {
    add(members, {owner(r.group_id()), std::to_string(r.rank()), owner(r.session_id()), r.device()},
        r.statistics());
  }
  return members.empty() ? text : text + "\n" + members.text();
}

std::string render(const v1::Event& event) {
  const std::time_t seconds = event.unix_ms() / 1000;
  std::tm local{};
  ::localtime_r(&seconds, &local);
  std::array<char, 64> time{};
  const std::size_t length = std::strftime(time.data(), time.size(), "%F %T", &local);
  const long east = std::labs(local.tm_gmtoff) / 60;
  std::snprintf(time.data() + length, time.size() - length, ".%03d%c%02ld:%02ld",
                static_cast<int>(event.unix_ms() % 1000), local.tm_gmtoff < 0 ? '-' : '+', east / 60,
                east % 60);
  std::string text = std::to_string(event.sequence()) + "  " + time.data() + "  " +
                     (event.level() == "info" ? "" : printable(event.level()) + ": ") +
                     printable(event.text());
  const std::map<std::string, std::string> ordered(event.fields().begin(), event.fields().end());
  for (const auto& [key, value] : ordered) {
    const bool plain = !value.empty() && value.find_first_of(" \"=") == std::string::npos;
    text += "  " + printable(key) + "=" + (plain ? printable(value) : quoted(printable(value)));
  }
  return text + "\n";
}

}  // namespace epd::ctl
