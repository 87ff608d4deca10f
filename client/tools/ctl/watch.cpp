// epctl events and watch: the commands that can go on.
#include "commands.h"
#include "format.h"
#include "proto/statistics.h"
#include "render.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <deque>
#include <map>
#include <optional>
#include <ostream>
#include <thread>

namespace epd::ctl {

// ---- events

namespace {

int importance(const std::string& level) {
  return level == "error" ? 2 : level == "warning" ? 1 : 0;
}

bool is_of(const v1::Event& event, const char* key, const std::string& value) {
  const auto field = event.fields().find(key);
  return field != event.fields().end() && field->second == value;
}

// Decides which events are printed, and prints them in order.
class Selection {
 public:
  Selection(const Arguments& arguments, Output& output)
      : arguments_(arguments), output_(output), max_age_ms_(parse_duration(arguments.since)) {
    if (!max_age_ms_) seen_ = parse_whole(arguments.since).value_or(0);
  }

  std::uint64_t seen() const { return seen_; }
  // Prints the last events, which were kept so far. Later ones are printed as they come.
  void print_kept() {
    for (const v1::Event& event : kept_) print(event);
    kept_.clear();
    keeps_ = false;
    output_.out.flush();
  }
  bool take(const v1::WatchEventsResponse& response) {
    for (const v1::Event& event : response.events()) take(event);
    output_.out.flush();
    return output_.out.good();
  }

 private:
  void take(const v1::Event& event) {
    // Lost events are reported where they would stand.
    if (event.sequence() > seen_ + 1 && !keeps_) tell_lost(event.sequence() - seen_ - 1);
    seen_ = event.sequence();
    if (!is_wanted(event)) return;
    if (!keeps_) return print(event);
    kept_.push_back(event);
    if (kept_.size() > arguments_.last) kept_.pop_front();
  }
  bool is_wanted(const v1::Event& event) const {
    return importance(event.level()) >= importance(arguments_.level) &&
           (!max_age_ms_ || event.age_ms() <= *max_age_ms_) &&
           (arguments_.group.empty() || is_of_group(event)) &&
           (arguments_.node.empty() || is_of(event, "node", arguments_.node));
  }
  bool is_of_group(const v1::Event& event) const {
    constexpr std::string_view kById = "id:";
    const std::string& group = arguments_.group;
    if (!event.fields().contains("group")) return false;
    if (group.starts_with(kById)) return is_of(event, "group", group.substr(kById.size()));
    return is_of(event, "group", group) || is_of(event, "name", group);
  }
  void print(const v1::Event& event) {
    if (arguments_.json) {
      write_json_line(output_, to_json(event));
    } else {
      output_.out << render(event);
    }
  }
  void tell_lost(std::uint64_t lost) {
    if (arguments_.json) {
      write_json_line(output_, Json{{"lost", lost}});
    } else {
      output_.out << "... " << lost << (lost == 1 ? " event" : " events") << " here no longer remembered\n";
    }
  }

  const Arguments& arguments_;
  Output& output_;
  const std::optional<std::uint64_t> max_age_ms_;
  std::uint64_t seen_ = 0;
  bool keeps_ = arguments_.last != 0;
  std::deque<v1::Event> kept_;
};

}  // namespace

Exit run_events(const Context& context) {
  const Arguments& arguments = context.arguments;
  Selection selection(arguments, context.output);
  const auto watch = [&](bool follow) {
    v1::WatchEventsRequest request;
    request.set_since(selection.seen());
    request.set_follow(follow);
    context.connection.watch(request, [&](const auto& response) { return selection.take(response); });
  };
  if (arguments.last != 0) {
    watch(false);
    selection.print_kept();
  }
  if (arguments.last == 0 || arguments.follow) watch(arguments.follow);
  return Exit::kOk;
}

// ---- watch

// Rates of devices, sessions and groups: the differences of the engines' counters between two looks.

namespace {

using std::chrono::steady_clock;

struct Sample {
  steady_clock::time_point at;
  v1::GetStatusResponse status;
  v1::ListSessionsResponse sessions;
  v1::ListGroupsResponse groups;
  v1::GetStatisticsResponse statistics;
  v1::GetOperationResponse slowest;  // without an operation if there is none
};

// Sums. The sum of a device is that of its sessions.
struct Totals {
  std::uint64_t completed = 0;
  std::uint64_t bytes = 0;
  std::uint64_t failures = 0;
  std::array<std::uint64_t, abi::kHistogramBuckets> done{};
};

void add(Totals& totals, const v1::Statistics& s) {
  totals.completed += s.completed();
  totals.bytes += s.bytes_dispatched() + s.bytes_combined();
  for (const auto& count : s.failed()) totals.failures += count.count();
  for (const auto& count : s.refused()) totals.failures += count.count();
  for (const v1::HistogramBucket& bucket : s.done().buckets())
    totals.done[abi::histogram_bucket(static_cast<std::uint32_t>(bucket.from_us()))] += bucket.count();
}

// An engine that was restarted begins anew: then everything there is has happened since.
std::uint64_t since(std::uint64_t before, std::uint64_t now) {
  return now >= before ? now - before : now;
}

// Rates of one owner between two looks. Failures include refusals.
Json rates(const Totals& before, const Totals& now, double seconds) {
  std::array<std::uint64_t, abi::kHistogramBuckets> delta{};
  for (std::size_t i = 0; i < delta.size(); ++i) delta[i] = since(before.done[i], now.done[i]);
  return {{"ops_per_s", static_cast<double>(since(before.completed, now.completed)) / seconds},
          {"bytes_per_s", static_cast<double>(since(before.bytes, now.bytes)) / seconds},
          {"p50_us", abi::histogram_percentile(delta, 500)},
          {"p99_us", abi::histogram_percentile(delta, 990)},
          {"failures", since(before.failures, now.failures)}};
}

// Totals by device, session or group.
using AllTotals = std::map<Json, Totals>;

AllTotals totals_of(const Sample& sample) {
  AllTotals all;
  for (const v1::SessionStatistics& s : sample.statistics.sessions()) {
    add(all[{"device", s.device()}], s.statistics());
    add(all[{"session", s.session_id()}], s.statistics());
  }
  for (const v1::GroupStatistics& g : sample.statistics.groups())
    add(all[{"group", g.group_id()}], g.statistics());
  return all;
}

Sample look(Connection& connection) {
  Sample sample;
  sample.at = steady_clock::now();
  sample.status = connection.call<v1::GetStatusResponse>(v1::GetStatusRequest());
  sample.sessions = connection.call<v1::ListSessionsResponse>(v1::ListSessionsRequest());
  sample.groups = connection.call<v1::ListGroupsResponse>(v1::ListGroupsRequest());
  sample.statistics = connection.call<v1::GetStatisticsResponse>(v1::GetStatisticsRequest());
  const auto operations =
      connection.call<v1::ListOperationsResponse>(v1::ListOperationsRequest()).operations();
  const auto slowest = std::max_element(operations.begin(), operations.end(),
                                        [](const auto& a, const auto& b) { return a.age_us() < b.age_us(); });
  if (slowest == operations.end()) return sample;
  v1::GetOperationRequest request;
  request.set_id(slowest->id());
  // It may have ended in the meantime. Then nothing is printed.
  if (connection.try_call(request, sample.slowest)) sample.slowest.Clear();
  return sample;
}

// The document that --json prints, from which the text is made.
Json compare(const Sample& before, const Sample& now) {
  const double seconds = std::max(std::chrono::duration<double>(now.at - before.at).count(), 1e-3);
  AllTotals a = totals_of(before);
  AllTotals b = totals_of(now);
  const auto unix_time = std::chrono::system_clock::now().time_since_epoch();
  Json frame = {{"unix_ms", std::chrono::duration_cast<std::chrono::milliseconds>(unix_time).count()},
                {"seconds", seconds},
                {"devices", Json::array()},
                {"sessions", Json::array()},
                {"groups", Json::array()}};
  const auto row = [&](const char* list, Json fields, const Json& key) {
    fields.update(rates(a[key], b[key], seconds));
    frame[list].push_back(std::move(fields));
  };
  for (const v1::Device& d : now.status.devices())
    row("devices", {{"name", d.name()}, {"state", word(d.state())}, {"sms", d.sms()}}, {"device", d.name()});
  for (const v1::Session& s : now.sessions.sessions())
    row("sessions", {{"session_id", s.session_id()}, {"device", s.device()}, {"pid", s.pid()}},
        {"session", s.session_id()});
  for (const v1::Group& g : now.groups.groups())
    row("groups", {{"group_id", g.group_id()}, {"name", g.name()}, {"state", word(g.state())}},
        {"group", g.group_id()});
  frame["slowest"] = now.slowest.has_operation() ? to_json(now.slowest) : Json(nullptr);
  return frame;
}

std::string one_decimal(double value) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), value < 10 ? "%.2f" : "%.1f", value);
  return text.data();
}

std::string plain(const Json& value) {
  return value.is_string() ? value.get<std::string>() : value.dump();
}

// The first three fields of each row as they are, then rates.
std::string table(std::vector<Column> columns, const Json& rows) {
  for (const char* title : {"OPS/S", "GB/S", "P50", "P99", "FAILURES"})
    columns.push_back({title, Align::kRight});
  Table out(std::move(columns));
  for (const Json& row : rows) {
    const std::uint64_t p50 = row["p50_us"];
    const std::uint64_t p99 = row["p99_us"];
    const bool any = p50 != 0 || p99 != 0;
    auto field = row.begin();
    std::vector<std::string> cells;
    for (int i = 0; i < 3; ++i, ++field) cells.push_back(plain(*field));
    cells.insert(cells.end(),
                 {one_decimal(row["ops_per_s"]), one_decimal(row["bytes_per_s"].get<double>() / 1e9),
                  any ? format_us(p50) : "", any ? format_us(p99) : "", plain(row["failures"])});
    out.add(std::move(cells));
  }
  return out.empty() ? "" : out.text() + "\n";
}

std::string text_of(const Sample& sample, const Json& frame) {
  constexpr Align kRight = Align::kRight;
  const v1::DaemonStatus& daemon = sample.status.daemon();
  std::string text = "epd " + printable(daemon.version()) + "  " + word(daemon.state()) + "  up " +
                     format_ms(daemon.uptime_ms()) + "  " + counted(daemon.sessions(), "session") + "  " +
                     counted(daemon.groups(), "group") + "  over " + one_decimal(frame["seconds"]) + " s\n\n";
  text += table({{"DEVICE"}, {"STATE"}, {"SMS", kRight}}, frame["devices"]) +
          table({{"SESSION", kRight}, {"DEVICE"}, {"PID", kRight}}, frame["sessions"]) +
          table({{"GROUP", kRight}, {"NAME"}, {"STATE"}}, frame["groups"]);
  if (!sample.slowest.has_operation()) return text + "no operation waits\n";
  const v1::Operation& op = sample.slowest.operation();
  return text + "slowest operation " + printable(op.id()) + " (" + word(op.op()) + " of group " +
         std::to_string(op.group_id()) + ", rank " + std::to_string(op.rank()) + ", " +
         format_us(op.age_us()) + " old): " + printable(sample.slowest.text()) + "\n";
}

}  // namespace

Exit run_watch(const Context& context) {
  constexpr const char* kHomeAndClear = "\x1b[H\x1b[J";
  const Arguments& arguments = context.arguments;
  Output& output = context.output;
  const auto interval =
      std::chrono::duration_cast<steady_clock::duration>(std::chrono::duration<double>(arguments.interval_s));
  Sample before = look(context.connection);
  for (std::uint32_t shown = 0; arguments.count == 0 || shown < arguments.count; ++shown) {
    std::this_thread::sleep_until(before.at + interval);
    Sample now = look(context.connection);
    const Json frame = compare(before, now);
    if (arguments.json) {
      write_json_line(output, frame);
    } else {
      if (output.terminal) output.out << kHomeAndClear;
      output.out << text_of(now, frame) << (output.terminal ? "" : "\n") << std::flush;
    }
    if (!output.out.good()) break;
    before = std::move(now);
  }
  return Exit::kOk;
}

}  // namespace epd::ctl
