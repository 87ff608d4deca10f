// Text of one operation, of statistics, waits, the network and one event.
#include "format.h"
#include "render.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <map>

namespace epd::ctl {
namespace {

constexpr Align kLeft = Align::kLeft;
constexpr Align kRight = Align::kRight;
constexpr int kMatrixRanks = 16;         // more do not fit in a line
constexpr std::size_t kPairsShown = 20;  // of a larger group

std::string in_us(std::int64_t us) {
  return us >= 0 ? "in " + format_us(static_cast<std::uint64_t>(us))
                 : format_us(static_cast<std::uint64_t>(-us)) + " ago";
}

// "RANK_LOST 3, ABORTED 1"
template <typename Counts>
std::string counts(const Counts& list, const std::string& (Counts::value_type::*word)() const) {
  std::string text;
  for (const auto& entry : list)
    append(text, printable((entry.*word)()) + " " + std::to_string(entry.count()));
  return text;
}

std::string percentiles(const v1::Histogram& histogram) {
  if (histogram.count() == 0) return "";
  return format_us(histogram.p50_us()) + " / " + format_us(histogram.p99_us());
}

std::string owner(std::uint64_t id) {
  return id == 0 ? "others" : std::to_string(id);
}

// The columns that tell whose statistics they are, then the statistics.
template <typename Owners>
Table statistics_table(const Owners& owners, FieldColumns<typename Owners::value_type> columns) {
  using Owner = typename Owners::value_type;
  for (const auto& [title, path] : {std::pair("NOOPS", "statistics.noops"),
                                    {"DISPATCHES", "statistics.dispatches"},
                                    {"COMBINES", "statistics.combines"},
                                    {"OK", "statistics.completed"},
                                    {"DISPATCHED", "statistics.bytes_dispatched"},
                                    {"COMBINED", "statistics.bytes_combined"}})
    columns.emplace_back(title, path);
  const auto counted = [](const auto& list) { return counts(list, &v1::StatusCount::status); };
  columns.emplace_back(
      "DONE p50/p99", [](const Owner& o) { return percentiles(o.statistics().done()); }, kRight);
  columns.emplace_back(
      "FAILED", [=](const Owner& o) { return counted(o.statistics().failed()); }, kLeft);
  columns.emplace_back(
      "REFUSED", [=](const Owner& o) { return counted(o.statistics().refused()); }, kLeft);
  return table_of(owners, columns);
}

// Quotes a value as the log does, so that its text ends neither the value nor the field.
std::string quoted(const std::string& text) {
  std::string result = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') result += '\\';
    result += c;
  }
  return result + "\"";
}

std::string name_of(const v1::FarEngine& far) {
  return printable(far.device() + " and " + far.far_device() + " on " + far.node()) + ": ";
}

std::string carrier(const v1::FarEngine& far) {
  return far.carrier() + (far.carrier() == far.far_carrier() ? "" : " / " + far.far_carrier());
}

std::string amount(std::uint64_t number, const std::string& details) {
  return number == 0 ? "" : std::to_string(number) + ", " + details;
}

std::string sent(const v1::FarEngine& far) {
  return amount(far.rows().batches_sent() + far.asks().batches_sent() + far.sums().batches_sent(),
                format_bytes(far.rows().bytes_sent() + far.asks().bytes_sent() + far.sums().bytes_sent()));
}

std::string received(const v1::FarEngine& far) {
  return amount(
      far.rows().batches_received() + far.asks().batches_received() + far.sums().batches_received(),
      format_bytes(far.rows().bytes_received() + far.asks().bytes_received() + far.sums().bytes_received()));
}

std::string stalls(const v1::FarEngine& far) {
  return amount(far.credit_stalls(), format_us(far.credit_stall_us()));
}

std::string drops(const v1::FarEngine& far) {
  std::uint64_t sum = 0;
  for (const v1::DropCount& drop : far.dropped()) sum += drop.count();
  return std::to_string(sum);
}

std::string notes_of(const v1::FarEngine& far) {
  std::string notes;
  if (!far.reason().empty()) notes += name_of(far) + printable(far.reason()) + "\n";
  if (far.dropped_size() != 0)
    notes += name_of(far) + "dropped: " + counts(far.dropped(), &v1::DropCount::reason) + "\n";
  if (far.has_longest_stall()) {
    const v1::CreditStall& stall = far.longest_stall();
    notes += name_of(far) + "the longest stall was " + format_us(stall.us()) + ", for rank " +
             std::to_string(stall.rank()) + " of group " + std::to_string(stall.group_id()) + "\n";
  }
  return notes;
}

std::string engine_table(const google::protobuf::RepeatedPtrField<v1::NetworkEngine>& engines) {
  const auto if_any = [](std::uint64_t bytes, bool any) { return any ? format_bytes(bytes) : ""; };
  const Table table = table_of(
      engines,
      {{"DEVICE", "device"},
       {"STATE", "state"},
       {"CARRIER", "carrier"},
       {"CHECK", "check"},
       {"INTERFACES", "interfaces"},
       {"PROMISED", [=](const auto& e) { return if_any(e.promised_bytes(), e.max_bytes() != 0); }, kRight},
       {"OF", [=](const auto& e) { return if_any(e.max_bytes(), e.max_bytes() != 0); }, kRight}});
  std::string notes;
  for (const v1::NetworkEngine& engine : engines) {
    const std::string name = printable(engine.device()) + ": ";
    if (!engine.problem().empty()) notes += name + printable(engine.problem()) + "\n";
    if (engine.unlisted_dropped_size() != 0) {
      notes += name + "dropped of engines that are not listed: " +
               counts(engine.unlisted_dropped(), &v1::DropCount::reason) + "\n";
    }
  }
  return table.text() + (notes.empty() ? "" : "\n" + notes);
}

std::string time_of(std::uint64_t us) {
  return us == 0 ? "" : format_us(us);
}

// A count that only the rank's own node knows; "" for a rank on another node.
std::string own(const v1::RankWaits& rank, std::uint64_t count) {
  return rank.device().empty() ? "" : std::to_string(count);
}

std::string rank_table(const v1::GroupWaits& group) {
  const auto waited_for = [](const auto& r) {
    return time_of(r.waited_for_ready_us() + r.waited_for_arrived_us());
  };
  return table_of(group.ranks(),
                  {{"RANK", "rank"},
                   {"DEVICE", "device"},
                   {"OPERATIONS", [](const auto& r) { return own(r, r.operations()); }, kRight},
                   {"LAST", [](const auto& r) { return own(r, r.last_arrivals()); }, kRight},
                   {"ROWS", [](const auto& r) { return own(r, r.rows()); }, kRight},
                   {"WAITED", [](const auto& r) { return time_of(r.waited_us()); }, kRight},
                   {"WAITED FOR", waited_for, kRight},
                   {"READY", [](const auto& r) { return time_of(r.waited_for_ready_us()); }, kRight},
                   {"ARRIVED", [](const auto& r) { return time_of(r.waited_for_arrived_us()); }, kRight}})
      .text();
}

std::string matrix(const v1::GroupWaits& group) {
  std::vector<Column> columns = {{"RANK", kRight}};
  for (const v1::RankWaits& peer : group.ranks())
    columns.push_back({"FOR " + std::to_string(peer.rank()), kRight});
  std::map<std::pair<std::uint32_t, std::uint32_t>, std::uint64_t> waits;
  for (const v1::PairWait& pair : group.pairs())
    waits[{pair.rank(), pair.peer()}] = pair.ready_us() + pair.arrived_us();
  Table table(std::move(columns));
  for (const v1::RankWaits& rank : group.ranks()) {
    std::vector<std::string> cells = {std::to_string(rank.rank())};
    for (const v1::RankWaits& peer : group.ranks())
      cells.push_back(time_of(waits[{rank.rank(), peer.rank()}]));
    table.add(std::move(cells));
  }
  return table.text();
}

std::string longest_pairs(const v1::GroupWaits& group) {
  std::vector<v1::PairWait> pairs(group.pairs().begin(), group.pairs().end());
  std::stable_sort(pairs.begin(), pairs.end(), [](const v1::PairWait& a, const v1::PairWait& b) {
    return a.ready_us() + a.arrived_us() > b.ready_us() + b.arrived_us();
  });
  const std::uint64_t all = pairs.size() + group.pairs_left_out();
  pairs.resize(std::min(pairs.size(), kPairsShown));
  const std::uint64_t left_out = all - pairs.size();
  return table_of(pairs, {{"RANK", "rank"},
                          {"WAITED FOR", "peer"},
                          {"READY", [](const auto& p) { return time_of(p.ready_us()); }, kRight},
                          {"ARRIVED", [](const auto& p) { return time_of(p.arrived_us()); }, kRight}})
             .text() +
         (left_out == 0 ? "" : std::to_string(left_out) + " pairs of ranks waited less; --json has more\n");
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
    // The last wait is usually the reason, which is not said twice.
    if (detail.text().find(wait.text()) == std::string::npos)
      text += "  waits for  " + printable(wait.text()) + "\n";
  }
  return text + "  why        " + printable(detail.text()) + "\n";
}

std::string render(const v1::GetStatisticsResponse& statistics, bool ranks,
                   const std::map<std::uint64_t, std::string>& names) {
  const auto group = [](const auto& of) { return owner(of.group_id()); };
  const auto session = [](const auto& of) { return owner(of.session_id()); };
  const auto name = [&](const v1::GroupStatistics& of) {
    const auto found = names.find(of.group_id());
    return found == names.end() ? "" : found->second;
  };
  const Table sessions =
      statistics_table(statistics.sessions(), {{"SESSION", session, kRight}, {"DEVICE", "device"}});
  const Table groups =
      statistics_table(statistics.groups(), {{"GROUP", group, kRight}, {"NAME", name, kLeft}});
  if (sessions.empty() && groups.empty())
    return "there are no sessions and no groups; epctl devices has the sums of engines\n";
  std::string text = sessions.text();
  if (!groups.empty()) text += "\n" + groups.text();
  const Table members = statistics_table(
      statistics.ranks(),
      {{"GROUP", group, kRight}, {"RANK", "rank"}, {"SESSION", session, kRight}, {"DEVICE", "device"}});
  return !ranks || members.empty() ? text : text + "\n" + members.text();
}

std::string render(const v1::GetWaitsResponse& waits) {
  if (waits.groups().empty()) return "there are no groups\n";
  std::string text;
  for (const v1::GroupWaits& group : waits.groups()) {
    text += (text.empty() ? "" : "\n");
    text += "group " + std::to_string(group.group_id()) + " (" + printable(group.name()) + ")\n";
    text += rank_table(group);
    if (group.pairs().empty()) continue;
    text += "\n" + (group.ranks_size() <= kMatrixRanks ? matrix(group) : longest_pairs(group));
  }
  return text;
}

std::string render(const v1::ListFarEnginesResponse& network) {
  const auto heard = [](const v1::FarEngine& far) {
    return far.has_heard_age_ms() ? format_ms(far.heard_age_ms()) + " ago" : "";
  };
  const std::string text = table_of(network.far_engines(), {{"DEVICE", "device"},
                                                            {"NODE", "node"},
                                                            {"FAR", "far_device"},
                                                            {"STATE", "state"},
                                                            {"CARRIER", carrier, kLeft},
                                                            {"ROUND TRIP", "round_trip_us"},
                                                            {"HEARD", heard, kRight},
                                                            {"GROUPS", "groups"},
                                                            {"WINDOWS", "window_bytes"},
                                                            {"SENT", sent, kRight},
                                                            {"RECEIVED", received, kRight},
                                                            {"STALLS", stalls, kRight},
                                                            {"DROPPED", drops, kRight}})
                               .text("no engine of another node is needed\n");
  std::string notes;
  for (const v1::FarEngine& far : network.far_engines()) notes += notes_of(far);
  return text + (notes.empty() ? "" : "\n" + notes) + "\n" + engine_table(network.engines());
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
