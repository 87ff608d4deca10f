// Prometheus's view of a snapshot of the control plane.
#include "families.h"

#include "common/fd.h"
#include "proto/statistics.h"
#include "support/fake_control_facade.h"

#include <gmock/gmock.h>
#include <prometheus/text_serializer.h>
#include <cmath>
#include <ctime>
#include <set>

namespace epd::test {
namespace {

using metrics::Snapshot;
using testing::HasSubstr;
using testing::Not;

std::vector<prometheus::MetricFamily> families(const Snapshot& snapshot, std::size_t max_groups) {
  const ManualClock clock;
  metrics::RankSeries ranks(16, clock);
  return metrics::families_of(snapshot, max_groups, ranks);
}

std::string text_of(const Snapshot& snapshot, std::size_t max_groups = 64) {
  return prometheus::TextSerializer().Serialize(families(snapshot, max_groups));
}

Snapshot fixed_snapshot() {
  FakeControlFacade facade;
  Result<Snapshot> snapshot = metrics::take_snapshot(facade, 16);
  EXPECT_TRUE(snapshot.ok()) << snapshot.status().to_string();
  return *snapshot;
}

v1::Group& add_group(Snapshot& snapshot, std::uint64_t id, const std::string& name, std::uint32_t ranks) {
  v1::Group& group = *snapshot.groups.add_groups();
  group.set_group_id(id);
  group.set_name(name);
  group.set_state(v1::GROUP_STATE_ACTIVE);
  group.set_epoch(1);
  group.mutable_shape()->set_num_ranks(ranks);
  for (std::uint32_t rank = 0; rank < ranks; ++rank) group.add_members()->set_rank(rank);
  v1::GroupStatistics& statistics = *snapshot.statistics.add_groups();
  statistics.set_group_id(id);
  statistics.mutable_statistics()->set_dispatches(10 * id);
  return group;
}

TEST(MetricFamilies, TellEachDeviceAndTheDaemon) {
  const std::string text = text_of(fixed_snapshot());
  EXPECT_THAT(text, HasSubstr("epd_supervisor_up 1"));
  EXPECT_THAT(text, HasSubstr("epd_device_up{device=\"host:0\"} 1"));
  EXPECT_THAT(text, HasSubstr("epd_device_info{device=\"host:0\",kind=\"host\""));
  EXPECT_THAT(text, HasSubstr("epd_device_operations_total{device=\"host:0\",result=\"failed\"}"));
}

TEST(MetricFamilies, TellTheNodesOfAClusterByState) {
  Snapshot snapshot = fixed_snapshot();
  EXPECT_THAT(text_of(snapshot), Not(HasSubstr("epd_cluster_")));
  v1::ClusterStatus& cluster = *snapshot.status.mutable_daemon()->mutable_cluster();
  cluster.set_nodes_up(3);
  cluster.set_nodes_lost(1);
  v1::RefusalCount& refusal = *cluster.add_refusals();
  refusal.set_reason("plain_text");
  refusal.set_count(7);
  EXPECT_THAT(text_of(snapshot), HasSubstr("epd_cluster_nodes{state=\"up\"} 3"));
  EXPECT_THAT(text_of(snapshot), HasSubstr("epd_cluster_nodes{state=\"lost\"} 1"));
  EXPECT_THAT(text_of(snapshot), HasSubstr("epd_cluster_attached 1"));
  EXPECT_THAT(text_of(snapshot), Not(HasSubstr("epd_cluster_certificate"))) << "cluster.insecure";
  cluster.set_certificate_expires_unix_s(1'800'000'000);
  EXPECT_THAT(text_of(snapshot), HasSubstr("epd_cluster_certificate_expiry_timestamp_seconds 1800000000"));
  EXPECT_THAT(text_of(snapshot), HasSubstr("epd_cluster_refused_total{reason=\"plain_text\"} 7"));
  cluster.set_problem("nobody listens");
  EXPECT_THAT(text_of(snapshot), HasSubstr("epd_cluster_attached 0"));
}

TEST(MetricFamilies, TellHowMuchOfEachLimitIsUsed) {
  Snapshot snapshot = fixed_snapshot();
  v1::LimitUse& limit = *snapshot.status.mutable_daemon()->add_limits();
  limit.set_key("limits.max_groups");
  limit.set_used(3);
  limit.set_allowed(4096);
  EXPECT_THAT(text_of(snapshot), HasSubstr("epd_limit_used{limit=\"limits.max_groups\"} 3"));
  EXPECT_THAT(text_of(snapshot), HasSubstr("epd_limit{limit=\"limits.max_groups\"} 4096"));
}

TEST(MetricFamilies, UsersThatAreFarFromTheirLimitsAreToldAsOne) {
  Snapshot snapshot;
  for (std::uint32_t uid = 1; uid <= 20; ++uid) {
    v1::UserUse& user = *snapshot.sessions.add_users();
    user.set_uid(uid);
    for (const char* key : {"limits.max_sessions_per_user", "limits.max_arena_bytes_per_user"}) {
      v1::LimitUse& limit = *user.add_limits();
      limit.set_key(key);
      limit.set_used(uid);
      limit.set_allowed(100);
    }
  }
  v1::LimitUse& allowed_nothing = *snapshot.sessions.mutable_users(0)->mutable_limits(1);
  allowed_nothing.set_allowed(0);  // by a rule: it is nearest of all
  const std::string text = text_of(snapshot);
  EXPECT_THAT(text, HasSubstr("epd_user_limit_used{uid=\"20\",limit=\"limits.max_sessions_per_user\"} 20"));
  EXPECT_THAT(text, HasSubstr("epd_user_limit{uid=\"20\",limit=\"limits.max_sessions_per_user\"} 100"));
  EXPECT_THAT(text, HasSubstr("epd_user_limit{uid=\"1\",limit=\"limits.max_arena_bytes_per_user\"} 0"));
  EXPECT_THAT(text, Not(HasSubstr("{uid=\"5\"")));
  EXPECT_THAT(text, HasSubstr("epd_user_limit_used{uid=\"other\",limit=\"limits.max_sessions_per_user\"} 14"))
      << "2 to 5 are left";
  EXPECT_THAT(text, Not(HasSubstr("epd_user_limit{uid=\"other\""))) << "limits of several users have no sum";
}

TEST(MetricFamilies, TellWhatTheProcessTakes) {
  const std::string text = text_of(fixed_snapshot());
  EXPECT_THAT(text, HasSubstr("epd_log_lines_lost_total "));
  EXPECT_THAT(text, HasSubstr("epd_build_info{version="));
  EXPECT_THAT(text, HasSubstr("\",commit=\""));
  const metrics::ProcessUse before = metrics::own_use();
  const std::vector<char> touched(64 << 20, 1);
  std::vector<UniqueFd> fds(7);
  for (UniqueFd& fd : fds) fd = make_eventfd().value();
  const metrics::ProcessUse use = metrics::own_use();
  EXPECT_EQ(use.open_fds, before.open_fds + 7);
  EXPECT_GE(use.resident_bytes, before.resident_bytes + touched.size() / 2);
  EXPECT_GT(use.cpu_seconds, before.cpu_seconds);
  EXPECT_GE(use.max_fds, use.open_fds);
  EXPECT_EQ(use.start_seconds, before.start_seconds);
  const auto now = static_cast<double>(::time(nullptr));
  EXPECT_GT(use.start_seconds, now - 3600);
  EXPECT_LE(use.start_seconds, now + 2);
}

TEST(MetricFamilies, TellTheTimesOfCalls) {
  CallTimes calls;
  calls.add("ListGroups", 0.0003, "");
  calls.add("ListGroups", 7, "DEADLINE_EXCEEDED");
  calls.add("Drain", 0.25e-3, "PERMISSION_DENIED");
  Snapshot snapshot;
  snapshot.calls = calls.all();
  const std::string text = text_of(snapshot);
  EXPECT_THAT(text, HasSubstr("epd_rpc_seconds_count{method=\"ListGroups\"} 2"));
  EXPECT_THAT(text, HasSubstr("epd_rpc_seconds_sum{method=\"ListGroups\"} 7.0003"));
  EXPECT_THAT(text, HasSubstr("epd_rpc_seconds_bucket{method=\"ListGroups\",le=\"0.0005\"} 1"));
  EXPECT_THAT(text, HasSubstr("epd_rpc_seconds_bucket{method=\"ListGroups\",le=\"+Inf\"} 2"));
  EXPECT_THAT(text, HasSubstr("epd_rpc_seconds_bucket{method=\"Drain\",le=\"0.00025\"} 1"));
  EXPECT_THAT(text, HasSubstr("epd_rpc_failed_total{method=\"ListGroups\",status=\"DEADLINE_EXCEEDED\"} 1"));
  EXPECT_THAT(text, HasSubstr("epd_rpc_failed_total{method=\"Drain\",status=\"PERMISSION_DENIED\"} 1"));
}

TEST(MetricFamilies, TellHowLongADeviceWasBusy) {
  Snapshot snapshot = fixed_snapshot();
  snapshot.status.mutable_devices(0)->set_busy_us(2'500'000);
  EXPECT_THAT(text_of(snapshot), HasSubstr("epd_device_busy_seconds_total{device=\"host:0\"} 2.5"));
}

TEST(MetricFamilies, TellTheMemoryOfGroups) {
  EXPECT_THAT(text_of(fixed_snapshot()),
              HasSubstr("epd_group_arena_bytes{group=\"layer-experts\",group_id=\"9\"} 524288000"));
}

TEST(MetricFamilies, TellTheNetworkOfADaemonInACluster) {
  FakeControlFacade facade;
  Result<Snapshot> alone = metrics::take_snapshot(facade, 16);
  ASSERT_TRUE(alone.ok());
  EXPECT_THAT(text_of(*alone), Not(HasSubstr("epd_far_")));
  facade.change([](FakeControlFacade::Views& views) { views.daemon.mutable_cluster()->set_name("prod"); });
  Result<Snapshot> snapshot = metrics::take_snapshot(facade, 16);
  ASSERT_TRUE(snapshot.ok());
  const std::string text = text_of(*snapshot);
  const std::string b = "{device=\"host:0\",node=\"node-b\",far_device=\"host:0\"";
  EXPECT_THAT(text, HasSubstr("epd_far_engine_connected" + b + "} 1"));
  EXPECT_THAT(
      text, HasSubstr("epd_far_engine_connected{device=\"host:0\",node=\"node-c\",far_device=\"host:1\"} 0"));
  EXPECT_THAT(text, HasSubstr("epd_far_bytes_total" + b + ",kind=\"sums\",direction=\"received\"} 2097152"));
  EXPECT_THAT(text, HasSubstr("epd_far_credit_stall_seconds_total" + b + "} 0.0045"));
  EXPECT_THAT(text, HasSubstr("epd_far_dropped_total" + b + "} 5"));
}

TEST(MetricFamilies, EachFamilyStandsOnceAndNoSeriesTwice) {
  Snapshot snapshot = fixed_snapshot();
  for (std::uint64_t id = 100; id < 110; ++id) add_group(snapshot, id, "same name", 2);
  std::set<std::string> names;
  for (const prometheus::MetricFamily& family : families(snapshot, 4)) {
    EXPECT_TRUE(names.insert(family.name).second) << family.name;
    EXPECT_FALSE(family.help.empty()) << family.name;
    std::set<std::string> series;
    for (const prometheus::ClientMetric& metric : family.metric) {
      std::string labels;
      for (const auto& label : metric.label) labels += label.name + "=" + label.value + ",";
      EXPECT_TRUE(series.insert(labels).second) << family.name << "{" << labels << "}";
    }
  }
}

TEST(MetricFamilies, GroupsBeyondTheLimitAreToldAsOne) {
  Snapshot snapshot;
  for (std::uint64_t id = 1; id <= 5; ++id) add_group(snapshot, id, "g" + std::to_string(id), 2);
  const std::string text = text_of(snapshot, 3);
  EXPECT_THAT(text, HasSubstr("epd_group_operations_total{group=\"g3\",group_id=\"3\",op=\"dispatch\"} 30"));
  EXPECT_THAT(text, Not(HasSubstr("\"g4\"")));
  EXPECT_THAT(text,
              HasSubstr("epd_group_operations_total{group=\"other\",group_id=\"0\",op=\"dispatch\"} 90"));
  EXPECT_THAT(text, HasSubstr("epd_group_ranks{group=\"other\",group_id=\"0\"} 4"));
  EXPECT_THAT(text_of(snapshot, 5), Not(HasSubstr("\"other\"")));
}

TEST(MetricFamilies, RanksThatHaveGoneAreNotActive) {
  Snapshot snapshot;
  add_group(snapshot, 1, "g", 4).mutable_members(2)->set_gone(true);
  const std::string text = text_of(snapshot);
  EXPECT_THAT(text, HasSubstr("epd_group_ranks{group=\"g\",group_id=\"1\"} 4"));
  EXPECT_THAT(text, HasSubstr("epd_group_ranks_active{group=\"g\",group_id=\"1\"} 3"));
}

TEST(MetricFamilies, TheLongestWaitNamesItsRank) {
  Snapshot snapshot;
  add_group(snapshot, 1, "g", 4);
  for (const auto& [rank, us] : {std::pair{1, 1000u}, std::pair{3, 2'500'000u}, std::pair{-1, 9'000'000u}}) {
    v1::Operation& operation = *snapshot.operations.add_operations();
    operation.set_group_id(1);
    operation.set_waiting_for(rank);
    operation.set_waiting_us(us);
  }
  EXPECT_THAT(text_of(snapshot),
              HasSubstr("epd_group_waited_for_seconds{group=\"g\",group_id=\"1\",rank=\"3\"} 2.5"));
}

TEST(MetricFamilies, NamesThatAreNoTextAreMadeText) {
  Snapshot snapshot;
  add_group(snapshot, 1, "a\xff\"\n", 1);
  EXPECT_THAT(text_of(snapshot), HasSubstr("group=\"a\xef\xbf\xbd\\\"\\n\""));
}

TEST(MetricFamilies, BucketsHoldWhatTheEngineCounted) {
  Snapshot snapshot;
  add_group(snapshot, 1, "g", 1);
  v1::Histogram& done = *snapshot.statistics.mutable_groups(0)->mutable_statistics()->mutable_done();
  const auto count = [&](std::uint64_t us, std::uint64_t times) {
    v1::HistogramBucket& bucket = *done.add_buckets();
    bucket.set_from_us(abi::histogram_floor(abi::histogram_bucket(static_cast<std::uint32_t>(us))));
    bucket.set_count(times);
  };
  count(0, 1);
  count(5, 2);
  count(100, 4);
  count(4'000'000'000, 8);
  for (const prometheus::MetricFamily& family : families(snapshot, 1)) {
    if (family.name != "epd_group_operation_seconds") continue;
    const prometheus::ClientMetric::Histogram& histogram = family.metric.front().histogram;
    EXPECT_EQ(histogram.sample_count, 15u);
    double last = 0;
    const auto below = [&](double seconds) {
      std::uint64_t most = 0;
      for (const auto& bucket : histogram.bucket)
        if (bucket.upper_bound <= seconds) most = bucket.cumulative_count;
      return most;
    };
    for (const auto& bucket : histogram.bucket) {
      EXPECT_GT(bucket.upper_bound, last);
      last = bucket.upper_bound;
    }
    EXPECT_TRUE(std::isinf(last));
    EXPECT_EQ(below(3e-6), 1u);
    EXPECT_EQ(below(10e-6), 3u);
    EXPECT_EQ(below(80e-6), 3u);
    EXPECT_EQ(below(1), 7u);
    return;
  }
  FAIL() << "no histogram";
}

TEST(MetricFamilies, ASupervisorThatDoesNotAnswerIsToldToBeDown) {
  FakeControlFacade facade;
  facade.fail({StatusCode::kDeadlineExceeded, "busy"});
  EXPECT_FALSE(metrics::take_snapshot(facade, 16).ok());
  EXPECT_THAT(prometheus::TextSerializer().Serialize(metrics::families_of_silence()),
              HasSubstr("epd_supervisor_up 0"));
}

}  // namespace
}  // namespace epd::test
