// epctl watch: rates of devices, sessions and groups, from what the engines have counted between two looks.
#include "commands.h"
#include "proto/statistics.h"
#include "table.h"
#include "units.h"

#include <array>
#include <chrono>
#include <cstdio>
#include <map>
#include <ostream>
#include <thread>

namespace epd::ctl {
namespace {

using std::chrono::steady_clock;

struct Sample {
  steady_clock::time_point at;
  v1::GetStatusResponse status;
  v1::ListSessionsResponse sessions;
  v1::ListGroupsResponse groups;
  v1::GetStatisticsResponse statistics;
  v1::ListOperationsResponse operations;
  v1::GetOperationResponse slowest;  // without an operation if there is none
};

// What one owner did between two looks.
struct Rates {
  double ops_per_s = 0;
  double bytes_per_s = 0;
  std::uint64_t p50_us = 0;
  std::uint64_t p99_us = 0;
  std::uint64_t failures = 0;  // since the look before, refusals too
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

Rates rates(const Totals& before, const Totals& now, double seconds) {
  Rates r;
  r.ops_per_s = static_cast<double>(since(before.completed, now.completed)) / seconds;
  r.bytes_per_s = static_cast<double>(since(before.bytes, now.bytes)) / seconds;
  std::array<std::uint64_t, abi::kHistogramBuckets> delta{};
  for (std::size_t i = 0; i < delta.size(); ++i) delta[i] = since(before.done[i], now.done[i]);
  r.p50_us = abi::histogram_percentile(delta, 500);
  r.p99_us = abi::histogram_percentile(delta, 990);
  r.failures = since(before.failures, now.failures);
  return r;
}

struct AllTotals {
  std::map<std::string, Totals> devices;
  std::map<std::uint64_t, Totals> sessions;
  std::map<std::uint64_t, Totals> groups;
};

AllTotals totals_of(const Sample& sample) {
  AllTotals all;
  for (const v1::SessionStatistics& s : sample.statistics.sessions()) {
    add(all.devices[s.device()], s.statistics());
    add(all.sessions[s.session_id()], s.statistics());
  }
  for (const v1::GroupStatistics& g : sample.statistics.groups())
    add(all.groups[g.group_id()], g.statistics());
  return all;
}

std::optional<Failure> look(Connection& connection, Sample& sample) {
  sample = {};
  sample.at = steady_clock::now();
  if (auto f = connection.call(v1::GetStatusRequest(), sample.status)) return f;
  if (auto f = connection.call(v1::ListSessionsRequest(), sample.sessions)) return f;
  if (auto f = connection.call(v1::ListGroupsRequest(), sample.groups)) return f;
  if (auto f = connection.call(v1::GetStatisticsRequest(), sample.statistics)) return f;
  if (auto f = connection.call(v1::ListOperationsRequest(), sample.operations)) return f;
  const v1::Operation* slowest = nullptr;
  for (const v1::Operation& op : sample.operations.operations()) {
    if (slowest == nullptr || op.age_us() > slowest->age_us()) slowest = &op;
  }
  if (slowest == nullptr) return std::nullopt;
  v1::GetOperationRequest request;
  request.set_id(slowest->id());
  // It may have ended in the meantime. Then nothing is printed.
  if (connection.call(request, sample.slowest)) sample.slowest.Clear();
  return std::nullopt;
}

struct Row {
  std::vector<std::string> cells;  // name and state
  Json json;                       // likewise
  Rates rates;
};
struct Frame {
  double seconds = 0;
  std::vector<Row> devices, sessions, groups;
};

Frame compare(const Sample& before, const Sample& now) {
  Frame frame;
  frame.seconds = std::max(std::chrono::duration<double>(now.at - before.at).count(), 1e-3);
  const AllTotals a = totals_of(before);
  const AllTotals b = totals_of(now);
  const auto of = [&](const auto& then, const auto& current, const auto& key) {
    const auto x = then.find(key);
    const auto y = current.find(key);
    return rates(x == then.end() ? Totals() : x->second, y == current.end() ? Totals() : y->second,
                 frame.seconds);
  };
  for (const v1::Device& d : now.status.devices()) {
    frame.devices.push_back({{d.name(), word(d.state()), std::to_string(d.sms())},
                             {{"name", d.name()}, {"state", word(d.state())}, {"sms", d.sms()}},
                             of(a.devices, b.devices, d.name())});
  }
  for (const v1::Session& s : now.sessions.sessions()) {
    frame.sessions.push_back({{std::to_string(s.session_id()), s.device(), std::to_string(s.pid())},
                              {{"session_id", s.session_id()}, {"device", s.device()}, {"pid", s.pid()}},
                              of(a.sessions, b.sessions, s.session_id())});
  }
  for (const v1::Group& g : now.groups.groups()) {
    frame.groups.push_back({{std::to_string(g.group_id()), g.name(), word(g.state())},
                            {{"group_id", g.group_id()}, {"name", g.name()}, {"state", word(g.state())}},
                            of(a.groups, b.groups, g.group_id())});
  }
  return frame;
}

std::string one_decimal(double value) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), value < 10 ? "%.2f" : "%.1f", value);
  return text.data();
}

std::string table(std::vector<Column> columns, const std::vector<Row>& rows) {
  for (const char* title : {"OPS/S", "GB/S", "P50", "P99", "FAILURES"})
    columns.push_back({title, Align::kRight});
  Table out(std::move(columns));
  for (const Row& row : rows) {
    std::vector<std::string> cells = row.cells;
    const Rates& r = row.rates;
    const bool any = r.p50_us != 0 || r.p99_us != 0;
    for (std::string& cell : std::vector<std::string>{
             one_decimal(r.ops_per_s), one_decimal(r.bytes_per_s / 1e9), any ? format_us(r.p50_us) : "",
             any ? format_us(r.p99_us) : "", std::to_string(r.failures)}) {
      cells.push_back(cell);
    }
    out.add(std::move(cells));
  }
  return out.empty() ? "" : out.text() + "\n";
}

std::string text_of(const Sample& sample, const Frame& frame) {
  const v1::DaemonStatus& daemon = sample.status.daemon();
  std::string text = "epd " + printable(daemon.version()) + "  " + word(daemon.state()) + "  up " +
                     format_ms(daemon.uptime_ms()) + "  " + counted(daemon.sessions(), "session") + "  " +
                     counted(daemon.groups(), "group") + "  over " + one_decimal(frame.seconds) + " s\n\n";
  text += table({{"DEVICE"}, {"STATE"}, {"SMS", Align::kRight}}, frame.devices);
  text += table({{"SESSION", Align::kRight}, {"DEVICE"}, {"PID", Align::kRight}}, frame.sessions);
  text += table({{"GROUP", Align::kRight}, {"NAME"}, {"STATE"}}, frame.groups);
  if (!sample.slowest.has_operation()) return text + "no operation waits\n";
  const v1::Operation& op = sample.slowest.operation();
  return text + "slowest operation " + printable(op.id()) + " (" + word(op.op()) + " of group " +
         std::to_string(op.group_id()) + ", rank " + std::to_string(op.rank()) + ", " +
         format_us(op.age_us()) + " old): " + printable(sample.slowest.text()) + "\n";
}

Json json_of(const std::vector<Row>& rows) {
  Json list = Json::array();
  for (const Row& row : rows) {
    Json object = row.json;
    object["ops_per_s"] = row.rates.ops_per_s;
    object["bytes_per_s"] = row.rates.bytes_per_s;
    object["p50_us"] = row.rates.p50_us;
    object["p99_us"] = row.rates.p99_us;
    object["failures"] = row.rates.failures;
    list.push_back(std::move(object));
  }
  return list;
}

Json json_of(const Sample& sample, const Frame& frame) {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return {{"unix_ms", std::chrono::duration_cast<std::chrono::milliseconds>(now).count()},
          {"seconds", frame.seconds},
          {"devices", json_of(frame.devices)},
          {"sessions", json_of(frame.sessions)},
          {"groups", json_of(frame.groups)},
          {"slowest", sample.slowest.has_operation() ? to_json(sample.slowest) : Json(nullptr)}};
}

}  // namespace

Exit run_watch(const Arguments& arguments, Connection& connection, Output& output) {
  constexpr const char* kHomeAndClear = "\x1b[H\x1b[J";
  const auto interval =
      std::chrono::duration_cast<steady_clock::duration>(std::chrono::duration<double>(arguments.interval_s));
  Sample before;
  if (auto failure = look(connection, before)) return report(arguments, output, *failure);
  for (std::uint32_t shown = 0; arguments.count == 0 || shown < arguments.count; ++shown) {
    std::this_thread::sleep_until(before.at + interval);
    Sample now;
    if (auto failure = look(connection, now)) return report(arguments, output, *failure);
    const Frame frame = compare(before, now);
    if (arguments.json) {
      write_json_line(output, json_of(now, frame));
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
