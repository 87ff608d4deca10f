#include "families.h"

#include "base/log.h"
#include "common/build_info.h"
#include "proto/statistics.h"

#include <algorithm>
#include <cctype>
#include <cstdint>
#include <limits>
#include <map>
#include <string>
#include <string_view>
#include <utility>

namespace epd::metrics {
namespace {

using prometheus::ClientMetric;
using prometheus::MetricFamily;

constexpr std::size_t kAllPairs = std::numeric_limits<std::size_t>::max();
constexpr std::size_t kUsersTold = 16;
constexpr double kSecondsOfMs = 1e-3;
constexpr double kSecondsOfUs = 1e-6;

// "DEVICE_STATE_READY" becomes "ready".
std::string short_name(std::string_view name, std::string_view prefix) {
  std::string text(name.starts_with(prefix) ? name.substr(prefix.size()) : name);
  std::transform(text.begin(), text.end(), text.begin(), [](unsigned char c) { return std::tolower(c); });
  return text;
}

// Two buckets for each power of two, up to 29 s: every second one of the engine's, whose values are whole
// microseconds, rounded down.
void fill(ClientMetric::Histogram& out, const v1::Histogram& histogram) {
  std::uint64_t counts[abi::kHistogramBuckets] = {};
  double sum = 0;
  for (const v1::HistogramBucket& bucket : histogram.buckets()) {
    const std::uint64_t last = std::numeric_limits<std::uint32_t>::max();
    const std::size_t i = abi::histogram_bucket(static_cast<std::uint32_t>(std::min(bucket.from_us(), last)));
    const auto from = static_cast<double>(abi::histogram_floor(i));
    const double to =
        i + 1 < abi::kHistogramBuckets ? static_cast<double>(abi::histogram_floor(i + 1)) : from;
    counts[i] += bucket.count();
    sum += static_cast<double>(bucket.count()) * (from + to) / 2 * kSecondsOfUs;
  }
  std::uint64_t total = 0;
  for (std::size_t i = 0; i < abi::kHistogramBuckets; ++i) {
    total += counts[i];
    if (i % 2 == 0 && i + 1 < abi::kHistogramBuckets) continue;
    const bool last = i + 1 == abi::kHistogramBuckets;
    const double bound = last ? std::numeric_limits<double>::infinity()
                              : static_cast<double>(abi::histogram_floor(i + 1)) * kSecondsOfUs;
    out.bucket.push_back({total, bound});
  }
  out.sample_count = total;
  out.sample_sum = sum;
}

void add(v1::Histogram& sum, const v1::Histogram& more) {
  for (const v1::HistogramBucket& bucket : more.buckets()) *sum.add_buckets() = bucket;
}

void add(google::protobuf::RepeatedPtrField<v1::StatusCount>& sum,
         const google::protobuf::RepeatedPtrField<v1::StatusCount>& more) {
  for (const v1::StatusCount& count : more) {
    const auto found = std::find_if(sum.begin(), sum.end(),
                                    [&](const v1::StatusCount& of) { return of.status() == count.status(); });
    if (found == sum.end()) {
      *sum.Add() = count;
    } else {
      found->set_count(found->count() + count.count());
    }
  }
}

void add(v1::Statistics& sum, const v1::Statistics& more) {
  sum.set_noops(sum.noops() + more.noops());
  sum.set_dispatches(sum.dispatches() + more.dispatches());
  sum.set_combines(sum.combines() + more.combines());
  sum.set_completed(sum.completed() + more.completed());
  sum.set_bytes_dispatched(sum.bytes_dispatched() + more.bytes_dispatched());
  sum.set_bytes_combined(sum.bytes_combined() + more.bytes_combined());
  add(*sum.mutable_failed(), more.failed());
  add(*sum.mutable_refused(), more.refused());
  add(*sum.mutable_done(), more.done());
}

void tell_daemon(Families& out, const v1::DaemonStatus& daemon) {
  out.gauge("epd_supervisor_up", "Whether the supervisor has answered this scrape.", {}, 1);
  out.gauge("epd_build_info", "1; the daemon's version.",
            {{"version", daemon.version()}, {"commit", build_info().commit}}, 1);
  out.gauge("epd_uptime_seconds", "Time since the daemon's start.", {},
            static_cast<double>(daemon.uptime_ms()) * kSecondsOfMs);
  out.gauge("epd_draining", "1 while the daemon drains.", {},
            daemon.state() == v1::DAEMON_STATE_DRAINING ? 1 : 0);
  out.gauge("epd_config_generation", "1 at start, and one more for each reload that was applied.", {},
            static_cast<double>(daemon.config_generation()));
  out.gauge("epd_config_reload_failed", "1 if the last reload was refused.", {},
            daemon.last_reload_error().empty() ? 0 : 1);
  out.gauge("epd_sessions", "Sessions that are attached.", {}, static_cast<double>(daemon.sessions()));
  out.counter("epd_sessions_total", "Sessions since the daemon's start.", {},
              static_cast<double>(daemon.sessions_total()));
  out.counter("epd_sessions_refused_total", "Attaches that were refused.", {},
              static_cast<double>(daemon.sessions_refused()));
  out.gauge("epd_arena_bytes", "Arenas that are promised to clients.", {},
            static_cast<double>(daemon.arena_bytes()));
  out.gauge("epd_mps_control_failed", "1 if MPS control does not answer.", {},
            daemon.mps_control_error().empty() ? 0 : 1);
}

void tell_limits(Families& out, const v1::DaemonStatus& daemon) {
  for (const v1::LimitUse& limit : daemon.limits()) {
    const Labels labels = {{"limit", limit.key()}};
    out.gauge("epd_limit_used", "The used part of the daemon's limit.", labels,
              static_cast<double>(limit.used()));
    out.gauge("epd_limit", "The limit.", labels, static_cast<double>(limit.allowed()));
  }
}

// Named as Prometheus's libraries do. Only the supervisor's: engines are separate processes.
void tell_process(Families& out, const Snapshot& snapshot) {
  const ProcessUse& use = snapshot.process;
  out.counter("process_cpu_seconds_total", "Processor time of the supervisor.", {}, use.cpu_seconds);
  out.gauge("process_start_time_seconds", "Start of the supervisor, Unix time.", {}, use.start_seconds);
  out.gauge("process_resident_memory_bytes", "Resident memory of the supervisor.", {},
            static_cast<double>(use.resident_bytes));
  out.gauge("process_open_fds", "Descriptors that the supervisor has open.", {},
            static_cast<double>(use.open_fds));
  out.gauge("process_max_fds", "Descriptors that the supervisor may have open.", {},
            static_cast<double>(use.max_fds));
  out.counter("epd_log_lines_lost_total", "Log lines that could not be written.", {},
              static_cast<double>(snapshot.log_lines_lost));
}

// How much of the limit that it is closest to the user has used.
double nearness(const v1::UserUse& user) {
  double nearest = 0;
  for (const v1::LimitUse& limit : user.limits()) {
    const auto allowed = static_cast<double>(std::max<std::uint64_t>(limit.allowed(), 1));
    nearest = std::max(nearest, static_cast<double>(limit.used()) / allowed);
  }
  return nearest;
}

// Tells the users that are closest to a limit, and the sums of the others.
void tell_users(Families& out, const v1::ListSessionsResponse& sessions) {
  std::vector<const v1::UserUse*> users;
  for (const v1::UserUse& user : sessions.users()) users.push_back(&user);
  std::stable_sort(users.begin(), users.end(),
                   [](const auto* a, const auto* b) { return nearness(*a) > nearness(*b); });
  const char* used = "The used part of the user's limit.";
  std::map<std::string, std::uint64_t> others;
  for (std::size_t i = 0; i < users.size(); ++i) {
    for (const v1::LimitUse& limit : users[i]->limits()) {
      if (i >= kUsersTold) {
        others[limit.key()] += limit.used();
        continue;
      }
      const Labels labels = {{"uid", std::to_string(users[i]->uid())}, {"limit", limit.key()}};
      out.gauge("epd_user_limit_used", used, labels, static_cast<double>(limit.used()));
      out.gauge("epd_user_limit", "The user's limit.", labels, static_cast<double>(limit.allowed()));
    }
  }
  for (const auto& [key, sum] : others)
    out.gauge("epd_user_limit_used", used, {{"uid", "other"}, {"limit", key}}, static_cast<double>(sum));
}

void tell_calls(Families& out, const CallTimes::All& calls) {
  for (const auto& [method, of] : calls) {
    const Labels labels = {{"method", method}};
    ClientMetric::Histogram& histogram =
        out.histogram("epd_rpc_seconds", "Calls of the control plane, by method.", labels);
    std::uint64_t total = 0;
    for (std::size_t i = 0; i < of.buckets.size(); ++i) {
      total += of.buckets[i];
      const bool last = i + 1 == of.buckets.size();
      histogram.bucket.push_back(
          {total, last ? std::numeric_limits<double>::infinity() : CallTimes::kBounds_s[i]});
    }
    histogram.sample_count = total;
    histogram.sample_sum = of.seconds;
  }
  for (const auto& [method, of] : calls) {
    for (const auto& [status, count] : of.failed)
      out.counter("epd_rpc_failed_total", "Calls that were refused or failed, by gRPC's status.",
                  {{"method", method}, {"status", status}}, static_cast<double>(count));
  }
}

void tell_cluster(Families& out, const v1::ClusterStatus& cluster) {
  const char* nodes = "Nodes of the cluster by state, as far as this daemon knows.";
  out.gauge("epd_cluster_nodes", nodes, {{"state", "up"}}, cluster.nodes_up());
  out.gauge("epd_cluster_nodes", nodes, {{"state", "silent"}}, cluster.nodes_silent());
  out.gauge("epd_cluster_nodes", nodes, {{"state", "lost"}}, cluster.nodes_lost());
  out.gauge("epd_cluster_nodes", nodes, {{"state", "draining"}}, cluster.nodes_draining());
  out.gauge("epd_cluster_nodes", nodes, {{"state", "unknown"}}, cluster.nodes_unknown());
  out.gauge("epd_cluster_attached", "1 if this node coordinates or is attached to the coordinator.", {},
            cluster.problem().empty() ? 1 : 0);
  out.gauge("epd_cluster_insecure", "1 if daemons talk in plain text.", {}, cluster.insecure() ? 1 : 0);
  if (cluster.certificate_expires_unix_s() != 0) {
    out.gauge("epd_cluster_certificate_expiry_timestamp_seconds", "When the certificate in use expires.", {},
              static_cast<double>(cluster.certificate_expires_unix_s()));
  }
  for (const v1::RefusalCount& refusal : cluster.refusals()) {
    out.counter("epd_cluster_refused_total", "Connections, nodes and frames that were refused.",
                {{"reason", refusal.reason()}}, static_cast<double>(refusal.count()));
  }
}

void tell_device(Families& out, const v1::Device& device) {
  const Labels labels = {{"device", device.name()}};
  Labels info = labels;
  info.emplace_back("kind", device.has_cuda() ? "cuda" : "host");
  info.emplace_back("model", device.cuda().model());
  info.emplace_back("uuid", device.cuda().uuid());
  out.gauge("epd_device_info", "1; a description of the device.", info, 1);
  out.gauge("epd_device_up", "1 if the device's engine serves.", labels,
            device.state() == v1::DEVICE_STATE_READY ? 1 : 0);
  out.gauge("epd_device_state", "1; the device's state.",
            with(labels, "state", short_name(v1::DeviceState_Name(device.state()), "DEVICE_STATE_")), 1);
  out.counter("epd_device_engine_restarts_total", "Starts of the device's engine after the first one.",
              labels, device.restarts());
  out.gauge("epd_device_sms", "SMs (host devices: threads) that operations may use.", labels, device.sms());
  out.gauge("epd_device_sessions", "Sessions on the device.", labels, device.sessions());
  out.gauge("epd_device_heartbeat_age_seconds", "Time since the engine's loop last turned.", labels,
            static_cast<double>(device.heartbeat_age_ms()) * kSecondsOfMs);
  const char* ended = "Operations that have ended on the device.";
  out.counter("epd_device_operations_total", ended, with(labels, "result", "ok"),
              static_cast<double>(device.ops_completed()));
  out.counter("epd_device_operations_total", ended, with(labels, "result", "failed"),
              static_cast<double>(device.ops_failed()));
  const char* bytes = "Bytes of rows that the device has sent (dispatch) or pulled (combine).";
  out.counter("epd_device_bytes_total", bytes, with(labels, "op", "dispatch"),
              static_cast<double>(device.bytes_dispatched()));
  out.counter("epd_device_bytes_total", bytes, with(labels, "op", "combine"),
              static_cast<double>(device.bytes_combined()));
  out.counter("epd_device_busy_seconds_total",
              "Time with an operation in flight; on a GPU the sum of the operations' times.", labels,
              static_cast<double>(device.busy_us()) * kSecondsOfUs);
  out.counter("epd_device_illegal_submissions_total", "Submissions that ended their session.", labels,
              static_cast<double>(device.submissions_refused()));
  out.counter("epd_device_stuck_total", "How often the GPU began no kernel for 100 ms.", labels,
              static_cast<double>(device.times_stuck()));
}

// An engine's page shows at most 256 of each.
void tell_far_engine(Families& out, const v1::FarEngine& far) {
  const Labels labels = {{"device", far.device()}, {"node", far.node()}, {"far_device", far.far_device()}};
  out.gauge("epd_far_engine_connected", "1 if the engine of the device reaches the one of another node.",
            labels, far.state() == v1::FAR_ENGINE_STATE_CONNECTED ? 1 : 0);
  if (far.has_round_trip_us()) {
    out.gauge("epd_far_round_trip_seconds", "Round trip of the last ping between the two engines' loops.",
              labels, static_cast<double>(far.round_trip_us()) * kSecondsOfUs);
  }
  const char* bytes = "Batches' bytes between engines of two nodes: rows, what combines ask for, and sums.";
  for (const auto& [kind, traffic] :
       {std::pair("rows", &far.rows()), std::pair("asks", &far.asks()), std::pair("sums", &far.sums())}) {
    const Labels of_kind = with(labels, "kind", kind);
    out.counter("epd_far_bytes_total", bytes, with(of_kind, "direction", "sent"),
                static_cast<double>(traffic->bytes_sent()));
    out.counter("epd_far_bytes_total", bytes, with(of_kind, "direction", "received"),
                static_cast<double>(traffic->bytes_received()));
  }
  out.counter("epd_far_credit_stall_seconds_total",
              "Time for which operations had no credit of a rank there.", labels,
              static_cast<double>(far.credit_stall_us()) * kSecondsOfUs);
  std::uint64_t dropped = 0;
  for (const v1::DropCount& drop : far.dropped()) dropped += drop.count();
  out.counter("epd_far_dropped_total", "Messages from there that were dropped.", labels,
              static_cast<double>(dropped));
}

// One group, or all those that are summed up as "other".
struct GroupSum {
  Labels labels;
  v1::Statistics statistics;
  std::uint64_t ranks = 0, active = 0, breaks = 0, arena_bytes = 0, handles = 0;
  double waited_for = 0;  // seconds: the longest wait of now
  std::string waited_for_rank;
};

void tell_statistics(Families& out, const Labels& labels, const v1::Statistics& s) {
  const char* taken = "Operations of the group's ranks that have ended.";
  out.counter("epd_group_operations_total", taken, with(labels, "op", "noop"),
              static_cast<double>(s.noops()));
  out.counter("epd_group_operations_total", taken, with(labels, "op", "dispatch"),
              static_cast<double>(s.dispatches()));
  out.counter("epd_group_operations_total", taken, with(labels, "op", "combine"),
              static_cast<double>(s.combines()));
  const char* ended = "Operations that have ended, by their status.";
  out.counter("epd_group_operations_ended_total", ended, with(labels, "status", "OK"),
              static_cast<double>(s.completed()));
  for (const v1::StatusCount& failed : s.failed())
    out.counter("epd_group_operations_ended_total", ended, with(labels, "status", failed.status()),
                static_cast<double>(failed.count()));
  for (const v1::StatusCount& refused : s.refused())
    out.counter("epd_group_calls_refused_total", "Calls that ended their session, by status.",
                with(labels, "status", refused.status()), static_cast<double>(refused.count()));
  const char* bytes = "Bytes of rows that the group's ranks have sent (dispatch) or pulled (combine).";
  out.counter("epd_group_bytes_total", bytes, with(labels, "op", "dispatch"),
              static_cast<double>(s.bytes_dispatched()));
  out.counter("epd_group_bytes_total", bytes, with(labels, "op", "combine"),
              static_cast<double>(s.bytes_combined()));
  fill(out.histogram("epd_group_operation_seconds",
                     "Dispatches and combines with OK, from the device's begin to the end, with waits for "
                     "other ranks. The sum is an estimate.",
                     labels),
       s.done());
}

void tell_group(Families& out, const GroupSum& group) {
  out.gauge("epd_group_ranks", "Ranks of the group.", group.labels, static_cast<double>(group.ranks));
  out.gauge("epd_group_ranks_active", "Ranks that have joined and not gone.", group.labels,
            static_cast<double>(group.active));
  out.gauge("epd_group_arena_bytes", "Arenas that are promised to the group's ranks of this node.",
            group.labels, static_cast<double>(group.arena_bytes));
  out.gauge("epd_group_handles_allowed", "Routings that each rank may keep (num_handles).", group.labels,
            static_cast<double>(group.handles));
  out.counter("epd_group_breaks_total", "Breaks that the group has gone through.", group.labels,
              static_cast<double>(group.breaks));
  if (!group.waited_for_rank.empty())
    out.gauge("epd_group_waited_for_seconds",
              "The rank that an operation in flight has waited for longest, and how long.",
              with(group.labels, "rank", group.waited_for_rank), group.waited_for);
  tell_statistics(out, group.labels, group.statistics);
}

// Sums by group id. Values of other groups (id 0, or beyond the first `max_groups`) are in `other`.
class GroupSums {
 public:
  GroupSums(const v1::ListGroupsResponse& groups, std::size_t max_groups) {
    std::map<std::uint64_t, const v1::Group*> by_id;
    for (const v1::Group& group : groups.groups()) by_id.emplace(group.group_id(), &group);
    for (const auto& [id, group] : by_id) {
      GroupSum* sum = &other_;
      if (sums_.size() < max_groups) {
        sum = &sums_[id];
        sum->labels = {{"group", group->name()}, {"group_id", std::to_string(id)}};
      } else {
        has_other_ = true;
      }
      sum->ranks += group->shape().num_ranks();
      sum->active += static_cast<std::uint64_t>(
          std::count_if(group->members().begin(), group->members().end(),
                        [](const v1::GroupMember& member) { return !member.gone(); }));
      sum->breaks += group->epoch() == 0 ? 0 : group->epoch() - 1;
      sum->arena_bytes += group->arena_bytes();
      sum->handles += group->shape().num_handles();
    }
  }

  void add_statistics(const v1::GroupStatistics& of) {
    has_other_ = has_other_ || !sums_.contains(of.group_id());
    add(sum_of(of.group_id()).statistics, of.statistics());
  }
  void add_wait(const v1::Operation& operation) {
    if (operation.waiting_for() < 0) return;
    GroupSum& sum = sum_of(operation.group_id());
    const double seconds = static_cast<double>(operation.waiting_us()) * kSecondsOfUs;
    if (!sum.waited_for_rank.empty() && seconds <= sum.waited_for) return;
    sum.waited_for = seconds;
    sum.waited_for_rank = std::to_string(operation.waiting_for());
  }
  void tell(Families& out) {
    for (const auto& [id, sum] : sums_) tell_group(out, sum);
    if (has_other_) tell_group(out, other_);
  }

 private:
  GroupSum& sum_of(std::uint64_t id) {
    const auto found = sums_.find(id);
    return found == sums_.end() ? other_ : found->second;
  }

  std::map<std::uint64_t, GroupSum> sums_;
  GroupSum other_{{{"group", "other"}, {"group_id", "0"}}, {}, 0, 0, 0, 0, 0, 0, {}};
  bool has_other_ = false;
};

void tell_group_states(Families& out, const v1::ListGroupsResponse& groups) {
  std::map<v1::GroupState, std::uint64_t> counts;
  for (int state = v1::GROUP_STATE_FORMING; state <= v1::GroupState_MAX; ++state)
    counts[static_cast<v1::GroupState>(state)] = 0;
  for (const v1::Group& group : groups.groups()) ++counts[group.state()];
  for (const auto& [state, count] : counts)
    out.gauge("epd_groups", "Groups, by state.",
              {{"state", short_name(v1::GroupState_Name(state), "GROUP_STATE_")}},
              static_cast<double>(count));
}

}  // namespace

Result<Snapshot> take_snapshot(supervisor::ControlFacade& facade, std::uint32_t max_ranks) {
  Snapshot snapshot;
  const auto take = [](auto answer, auto& message) {
    if (answer.ok()) message = std::move(answer).value();
    return answer.ok() ? Status() : answer.status();
  };
  Status status = take(facade.status(), snapshot.status);
  if (status.ok()) status = take(facade.sessions(), snapshot.sessions);
  if (status.ok()) status = take(facade.groups(), snapshot.groups);
  if (status.ok()) status = take(facade.operations(), snapshot.operations);
  if (status.ok()) status = take(facade.statistics(), snapshot.statistics);
  if (status.ok()) status = take(facade.waits({"", max_ranks, kAllPairs}), snapshot.waits);
  if (status.ok() && snapshot.status.daemon().has_cluster())
    status = take(facade.far_engines(), snapshot.network);
  snapshot.process = own_use();
  snapshot.log_lines_lost = log_lines_lost();
  return status.ok() ? Result<Snapshot>(std::move(snapshot)) : Result<Snapshot>(status);
}

std::vector<MetricFamily> families_of(const Snapshot& snapshot, std::size_t max_groups, RankSeries& ranks) {
  Families out;
  tell_daemon(out, snapshot.status.daemon());
  tell_limits(out, snapshot.status.daemon());
  tell_users(out, snapshot.sessions);
  tell_calls(out, snapshot.calls);
  tell_process(out, snapshot);
  if (snapshot.status.daemon().has_cluster()) tell_cluster(out, snapshot.status.daemon().cluster());
  for (const v1::FarEngine& far : snapshot.network.far_engines()) tell_far_engine(out, far);
  for (const v1::Device& device : snapshot.status.devices()) tell_device(out, device);
  tell_group_states(out, snapshot.groups);
  GroupSums groups(snapshot.groups, max_groups);
  for (const v1::GroupStatistics& of : snapshot.statistics.groups()) groups.add_statistics(of);
  for (const v1::Operation& operation : snapshot.operations.operations()) groups.add_wait(operation);
  groups.tell(out);
  ranks.tell(out, snapshot.waits, max_groups);
  return std::move(out).take();
}

std::vector<MetricFamily> families_of_silence() {
  Families out;
  out.gauge("epd_supervisor_up", "Whether the supervisor has answered this scrape.", {}, 0);
  return std::move(out).take();
}

}  // namespace epd::metrics
