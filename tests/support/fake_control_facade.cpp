#include "support/fake_control_facade.h"

#include "proto/statistics.h"

#include <unistd.h>
#include <array>
#include <utility>

namespace epd::test {
namespace {

using supervisor::Operator;

void fill(v1::Device& device, const std::string& name) {
  device.set_name(name);
  device.set_state(v1::DEVICE_STATE_READY);
  device.set_engine_pid(4242);
  device.set_sms(2);
  device.set_sessions(1);
  device.set_heartbeat_age_ms(3);
  device.set_ops_submitted(1200);
  device.set_ops_completed(1190);
  device.set_ops_failed(8);
  device.set_bytes_dispatched(std::uint64_t{5} << 30);
  device.set_bytes_combined(std::uint64_t{3} << 20);
  device.set_submissions_refused(2);
}

void fill(v1::Session& session, std::uint64_t id, const std::string& device) {
  session.set_session_id(id);
  session.set_uid(1000);
  session.set_gid(100);
  session.set_pid(7000 + static_cast<std::int32_t>(id));
  session.set_device(device);
  session.set_library("libepd 0.1.0");
  session.set_claimed_pid(5);
  session.set_claimed_host("node7");
  session.set_age_ms(65'000);
  session.set_groups(1);
  session.set_arena_bytes(std::uint64_t{300} << 20);
}

void fill(v1::GroupShape& shape) {
  shape.set_num_ranks(2);
  shape.set_num_experts(256);
  shape.set_max_tokens(4096);
  shape.set_hidden(7168);
  shape.set_topk(8);
  shape.set_depth(4);
  shape.set_payload(v1::PAYLOAD_FP8_CAST);
  shape.set_index_type(v1::INDEX_TYPE_INT64);
  shape.set_policy(v1::LOSS_POLICY_FAIL_FAST);
  shape.set_layout(v1::LAYOUT_PACKED);
  shape.set_scale_format(v1::SCALE_FORMAT_UE8M0);
  shape.add_more_formats()->set_payload(v1::PAYLOAD_BF16);
  shape.set_expert_alignment(128);
  shape.set_num_biases(2);
  shape.set_num_handles(3);
  shape.set_max_recv_rows(9000);
  shape.set_sum_ranks(1);
}

void add_member(v1::Group& group, std::uint32_t rank, std::uint64_t session_id, const std::string& device) {
  v1::GroupMember& member = *group.add_members();
  member.set_rank(rank);
  member.set_session_id(session_id);
  member.set_device(device);
}

v1::Group make_group() {
  v1::Group group;
  group.set_group_id(9);
  group.set_name("layer-experts");
  group.set_state(v1::GROUP_STATE_ACTIVE);
  fill(*group.mutable_shape());
  group.set_sms(2);
  group.set_epoch(3);
  group.set_age_ms(64'000);
  group.set_cause("engine of host:1 restarted");
  group.set_arena_bytes(std::uint64_t{500} << 20);
  add_member(group, 0, 11, "host:0");
  add_member(group, 1, 12, "host:1");
  group.mutable_members(1)->set_registered_bytes(std::uint64_t{3} << 30);
  for (const auto& [where, times] : {std::pair("in_place", 4000), std::pair("no_room", 900)}) {
    v1::RowCount& count = *group.mutable_members(1)->add_rows();
    count.set_where(where);
    count.set_times(times);
  }
  group.mutable_members(1)->set_pid(4242);
  group.mutable_members(1)->set_client_stopped(true);
  return group;
}

v1::Group make_forming_group() {
  v1::Group group = make_group();
  group.set_group_id(10);
  group.set_name("late");
  group.set_state(v1::GROUP_STATE_FORMING);
  group.mutable_shape()->set_payload(v1::PAYLOAD_BF16);
  group.mutable_shape()->clear_scale_format();
  group.mutable_shape()->clear_more_formats();
  group.mutable_shape()->set_index_type(v1::INDEX_TYPE_INT32);
  group.mutable_shape()->set_num_ranks(4);
  group.clear_cause();
  group.clear_members();
  add_member(group, 2, 11, "host:0");
  group.mutable_members(0)->set_gone(true);
  for (const std::uint32_t rank : {0u, 1u, 3u}) group.add_missing_ranks(rank);
  group.mutable_shape()->set_span(v1::SPAN_CLUSTER);
  group.set_coordinator_away_ms(2'300);
  return group;
}

void fill(v1::Operation& operation, std::uint32_t rank) {
  operation.set_device("host:" + std::to_string(rank));
  operation.set_session_id(11 + rank);
  operation.set_group_id(9);
  operation.set_ticket(500 + rank);
  operation.set_op_index(77);
  operation.set_op(v1::OPERATION_KIND_DISPATCH);
  operation.set_stage(rank == 0 ? v1::OPERATION_STAGE_WAIT_READY : v1::OPERATION_STAGE_PLANNING);
  operation.set_rank(rank);
  operation.set_slot(1);
  operation.set_num_tokens(128);
  operation.set_waiting_for(rank == 0 ? 1 : -1);
  operation.set_age_us(1500);
  operation.set_id(std::to_string(11 + rank) + ":" + std::to_string(500 + rank));
  operation.set_epoch(3);
  operation.set_waiting_us(rank == 0 ? 900 : 0);
  operation.set_deadline_in_us(29'000'000);
  for (const auto& [stage, after_us] : {std::pair("seen", 2), std::pair("planning", 3)}) {
    v1::StageEntry& entry = *operation.add_stages();
    entry.set_stage(stage);
    entry.set_after_us(static_cast<std::uint64_t>(after_us));
  }
}

void add(google::protobuf::RepeatedPtrField<v1::StatusCount>& counts, StatusCode code, std::uint64_t count) {
  v1::StatusCount& out = *counts.Add();
  out.set_status(status_name(code));
  out.set_count(count);
}

// Fills in the statistics of `times` ranks that did the same.
void fill(v1::Statistics& s, std::uint64_t times) {
  s.set_noops(5 * times);
  s.set_dispatches(100 * times);
  s.set_combines(90 * times);
  s.set_completed(190 * times);
  add(*s.mutable_failed(), StatusCode::kRankLost, 3 * times);
  add(*s.mutable_refused(), StatusCode::kInvalidArgument, 2 * times);
  s.set_bytes_dispatched((std::uint64_t{1} << 20) * times);
  s.set_bytes_combined((std::uint64_t{1} << 10) * times);
  std::array<std::uint64_t, abi::kHistogramBuckets> counts{};
  for (const auto& [us, count] : {std::pair(100u, 98u), std::pair(5000u, 2u)}) {
    const std::size_t bucket = abi::histogram_bucket(us);
    counts[bucket] = count * times;
    v1::HistogramBucket& out = *s.mutable_done()->add_buckets();
    out.set_from_us(abi::histogram_floor(bucket));
    out.set_count(counts[bucket]);
  }
  s.mutable_done()->set_count(100 * times);
  s.mutable_done()->set_p50_us(abi::histogram_percentile(counts, 500));
  s.mutable_done()->set_p99_us(abi::histogram_percentile(counts, 990));
}

void fill(v1::GetStatisticsResponse& statistics) {
  for (const std::uint32_t rank : {0u, 1u}) {
    v1::SessionStatistics& session = *statistics.add_sessions();
    session.set_session_id(11 + rank);
    session.set_device("host:" + std::to_string(rank));
    fill(*session.mutable_statistics(), 1);
    v1::RankStatistics& out = *statistics.add_ranks();
    out.set_group_id(9);
    out.set_rank(rank);
    out.set_session_id(11 + rank);
    out.set_device(session.device());
    fill(*out.mutable_statistics(), 1);
  }
  v1::GroupStatistics& group = *statistics.add_groups();
  group.set_group_id(9);
  fill(*group.mutable_statistics(), 2);
}

// Rank 1 has waited for rank 0, for 1.5 s, and was last in 3 of 40 operations.
void fill(v1::GetWaitsResponse& waits) {
  v1::GroupWaits& group = *waits.add_groups();
  group.set_group_id(9);
  group.set_name("layer-experts");
  for (const std::uint32_t rank : {0u, 1u}) {
    v1::RankWaits& out = *group.add_ranks();
    out.set_rank(rank);
    out.set_device("host:" + std::to_string(rank));
    out.set_operations(40);
    out.set_last_arrivals(rank == 0 ? 37 : 3);
    out.set_rows(rank == 0 ? 3000 : 1000);
    out.set_waited_us(rank == 0 ? 0 : 1'500'000);
  }
  group.mutable_ranks(0)->set_waited_for_ready_us(1'250'000);
  group.mutable_ranks(0)->set_waited_for_arrived_us(250'000);
  v1::PairWait& pair = *group.add_pairs();
  pair.set_rank(1);
  pair.set_peer(0);
  pair.set_ready_us(1'250'000);
  pair.set_arrived_us(250'000);
}

// Three nodes: this one, which coordinates, one that is silent, one that is lost.
void fill(v1::ListNodesResponse& nodes) {
  v1::ClusterStatus& cluster = *nodes.mutable_cluster();
  cluster.set_name("prod");
  cluster.set_node("node-a");
  cluster.set_listen("0.0.0.0:7410");
  cluster.set_advertise("node-a:7410");
  cluster.set_coordinator("node-a:7410");
  cluster.set_coordinates(true);
  cluster.set_term(1);
  cluster.set_nodes_up(1);
  cluster.set_nodes_silent(1);
  cluster.set_nodes_lost(1);
  v1::RefusalCount& refusal = *cluster.add_refusals();
  refusal.set_reason("plain_text");
  refusal.set_count(3);
  const auto add_node = [&](const char* name, v1::NodeState state, const char* reason) -> v1::Node& {
    v1::Node& node = *nodes.add_nodes();
    node.set_name(name);
    node.set_state(state);
    node.set_since_ms(5'000);
    node.set_reason(reason);
    node.set_address(std::string(name) + ":7410");
    node.set_version("0.1.0");
    node.set_boot_id("00112233445566778899aabbccddeeff");
    node.set_heartbeat_age_ms(1'200);
    return node;
  };
  v1::Node& own = add_node("node-a", v1::NODE_STATE_UP, "");
  own.set_coordinator(true);
  own.set_own(true);
  own.set_heartbeat_age_ms(0);
  add_node("node-b", v1::NODE_STATE_SILENT, "it says nothing");
  add_node("node-c", v1::NODE_STATE_LOST, "nobody listens at 10.0.0.3:7410 any more");
  v1::CertificateStatus& certificate = *nodes.mutable_certificate();
  certificate.set_file("/etc/epd/node-a.pem");
  certificate.add_names("node-a");
  certificate.set_seconds_left(40 * 86'400);
}

// An engine with one far engine that is connected and one that is down, and one that has no network.
void fill(v1::ListFarEnginesResponse& network) {
  v1::NetworkEngine& engine = *network.add_engines();
  engine.set_device("host:0");
  engine.set_state(v1::DEVICE_STATE_READY);
  engine.set_carrier("UCX 1.13.1");
  engine.set_library("libucp.so.0");
  engine.set_interfaces("lo");
  engine.set_check("crc");
  engine.set_promised_bytes(std::uint64_t{32} << 20);
  engine.set_max_bytes(std::uint64_t{1} << 30);
  v1::NetworkEngine& other = *network.add_engines();
  other.set_device("host:1");
  other.set_state(v1::DEVICE_STATE_READY);
  other.set_problem("libucp.so.0: cannot open shared object file");
  v1::FarEngine& far = *network.add_far_engines();
  far.set_device("host:0");
  far.set_node("node-b");
  far.set_far_device("host:0");
  far.set_state(v1::FAR_ENGINE_STATE_CONNECTED);
  far.set_carrier("UCX 1.13.1");
  far.set_far_carrier("UCX 1.19.0");
  far.set_lanes("#\n# lane[0]: tcp/eth0\n");
  far.set_round_trip_us(43);
  far.set_groups(2);
  far.set_window_bytes(std::uint64_t{8} << 20);
  for (v1::FarTraffic* traffic : {far.mutable_rows(), far.mutable_asks(), far.mutable_sums()}) {
    traffic->set_batches_sent(10);
    traffic->set_bytes_sent(1 << 20);
    traffic->set_batches_received(20);
    traffic->set_bytes_received(2 << 20);
  }
  far.set_credit_stalls(3);
  far.set_credit_stall_us(4500);
  far.mutable_longest_stall()->set_us(2500);
  far.mutable_longest_stall()->set_group_id(9);
  far.mutable_longest_stall()->set_rank(7);
  v1::DropCount& drop = *far.add_dropped();
  drop.set_reason("token");
  drop.set_count(5);
  v1::FarEngine& down = *network.add_far_engines();
  down.set_device("host:0");
  down.set_node("node-c");
  down.set_far_device("host:1");
  down.set_state(v1::FAR_ENGINE_STATE_DOWN);
  down.set_reason("has said nothing for 2000 ms");
  down.set_groups(1);
}

void add(v1::GetConfigResponse& config, const std::string& key, const std::string& value,
         v1::ConfigOrigin origin, bool reloadable) {
  v1::ConfigEntry& entry = *config.add_entries();
  entry.set_key(key);
  entry.set_value(value);
  entry.set_origin(origin);
  entry.set_reloadable(reloadable);
}

template <typename Response>
Response label_of(const v1::ListGroupsResponse& groups, const std::string& name_or_id) {
  Response response;
  for (const v1::Group& group : groups.groups()) {
    if (group.name() != name_or_id && std::to_string(group.group_id()) != name_or_id) continue;
    response.set_group_id(group.group_id());
    response.set_name(group.name());
  }
  return response;
}

}  // namespace

FakeControlFacade::FakeControlFacade() {
  v1::DaemonStatus& daemon = views_.daemon;
  daemon.set_version("0.1.0");
  daemon.set_boot_id("00112233445566778899aabbccddeeff");
  daemon.set_pid(::getpid());
  daemon.set_uptime_ms(3'723'000);
  daemon.set_state(v1::DAEMON_STATE_SERVING);
  daemon.set_config_generation(1);
  daemon.set_sessions(2);
  daemon.set_groups(2);
  daemon.set_arena_bytes(std::uint64_t{600} << 20);
  daemon.set_sessions_total(17);
  daemon.set_sessions_refused(1);
  fill(views_.nodes);
  fill(views_.network);
  for (const std::uint32_t i : {0u, 1u}) {
    const std::string device = "host:" + std::to_string(i);
    fill(*views_.devices.add_devices(), device);
    fill(*views_.sessions.add_sessions(), 11 + i, device);
    fill(*views_.operations.add_operations(), i);
  }
  *views_.groups.add_groups() = make_group();
  *views_.groups.add_groups() = make_forming_group();
  fill(views_.statistics);
  fill(views_.waits);
  add(views_.config, "device.host", "2", v1::CONFIG_ORIGIN_FLAG, false);
  add(views_.config, "limits.max_sessions", "64", v1::CONFIG_ORIGIN_FILE, true);
  for (const char* key : {"limits.max_groups", "limits.max_arena_bytes", "log.level"})
    add(views_.config, key, "", v1::CONFIG_ORIGIN_FILE, true);
  for (const char* text : {"session attached", "rank joined", "group breaks"}) {
    Event event;
    event.kind = EventKind::kGroupBroke;
    event.unix_ms = 1'700'000'000'000;
    event.text = text;
    event.fields = {{"group", "9"}, {"text", "rank 1 died"}, {"who", "x\" level=\"error\\"}};
    events_.add(event);
  }
}

Result<v1::GetStatusResponse> FakeControlFacade::status() {
  Result<Views> views = answer(views_);
  if (!views.ok()) return views.status();
  v1::GetStatusResponse response;
  *response.mutable_daemon() = views->daemon;
  *response.mutable_devices() = views->devices.devices();
  return response;
}

Result<std::string> FakeControlFacade::boot_id() {
  Result<v1::DaemonStatus> daemon = answer(views_.daemon);
  return daemon.ok() ? Result<std::string>(daemon->boot_id()) : daemon.status();
}

Result<supervisor::HealthFacts> FakeControlFacade::health() {
  Result<Views> views = answer(views_);
  if (!views.ok()) return views.status();
  supervisor::HealthFacts facts;
  facts.serving = views->daemon.state() == v1::DAEMON_STATE_SERVING;
  facts.socket_problem = views->daemon.socket_problem();
  if (views->daemon.has_cluster()) facts.cluster_problem = views->daemon.cluster().problem();
  for (const v1::Device& device : views->devices.devices())
    facts.devices[device.name()] = device.state() == v1::DEVICE_STATE_READY;
  return facts;
}

int FakeControlFacade::questions() const {
  const std::lock_guard lock(mutex_);
  return questions_;
}

Result<v1::GetOperationResponse> FakeControlFacade::operation(std::uint64_t session_id,
                                                              std::uint64_t ticket) {
  const std::lock_guard lock(mutex_);
  if (!failure_.ok()) return failure_;
  for (const v1::Operation& operation : views_.operations.operations()) {
    if (operation.session_id() != session_id || operation.ticket() != ticket) continue;
    v1::GetOperationResponse detail;
    *detail.mutable_operation() = operation;
    detail.set_group("layer-experts");
    detail.set_pid(7011);
    detail.set_engine_pid(4242);
    v1::Wait& wait = *detail.add_waits();
    wait.set_rank(1);
    wait.set_session_id(12);
    wait.set_pid(7012);
    wait.set_device("host:1");
    wait.set_device_state(v1::DEVICE_STATE_READY);
    wait.set_engine_pid(4242);
    wait.set_client_stopped(true);
    wait.set_text("rank 1 (session 12, pid 7012, host:1) has not submitted it");
    detail.set_text("waits for 0 ms: " + wait.text());
    return detail;
  }
  return not_found("operation is not in flight");
}

Result<v1::GetWaitsResponse> FakeControlFacade::waits(const supervisor::WaitsWanted& wanted) {
  Result<v1::GetWaitsResponse> all = answer(views_.waits);
  if (!all.ok()) return all;
  if (!wanted.group.empty() && wanted.group != all->groups(0).name())
    return not_found("there is no group \"" + wanted.group + "\"");
  for (v1::GroupWaits& group : *all->mutable_groups()) {
    if (group.ranks_size() > static_cast<int>(wanted.max_ranks)) group.clear_pairs();
  }
  return all;
}

Status FakeControlFacade::authorize(const Operator& by, supervisor::Right wanted, const std::string& what) {
  const std::lock_guard lock(mutex_);
  if (wanted <= allowed_) return {};
  return {StatusCode::kPermissionDenied,
          "user " + std::to_string(by.uid) + " may not " + what +
              ": no access.rule gives it more, and access.operate is \"read\""};
}

void FakeControlFacade::allow(supervisor::Right right) {
  const std::lock_guard lock(mutex_);
  allowed_ = right;
}

Operator FakeControlFacade::last_operator() const {
  const std::lock_guard lock(mutex_);
  return last_operator_;
}

Status FakeControlFacade::restart_device(const Operator& by, const std::string& device) {
  return ask(by, "restart device " + device);
}

Status FakeControlFacade::ask(const Operator& by, std::string text) {
  const std::lock_guard lock(mutex_);
  if (!failure_.ok()) return failure_;
  last_operator_ = by;
  last_operator_.has_gone = {};
  if (asked_.size() < 64) asked_.push_back(std::move(text));
  return {};
}

Result<v1::ReloadConfigResponse> FakeControlFacade::reload(const Operator& by) {
  if (Status status = ask(by, "reload"); !status.ok()) return status;
  v1::ReloadConfigResponse response;
  response.set_generation(2);
  v1::OptionChange& change = *response.add_changes();
  change.set_key("limits.max_sessions");
  change.set_before("256");
  change.set_after("8");
  return response;
}

Result<v1::SetOptionsResponse> FakeControlFacade::set_options(const Operator& by,
                                                              const supervisor::OptionSettings& options) {
  std::string text = "set options";
  v1::SetOptionsResponse response;
  for (const auto& [key, value] : options) {
    text += " " + key + "=" + value.value_or("(unset)");
    v1::OptionChange& change = *response.add_changes();
    change.set_key(key);
    change.set_before("old");
    change.set_after(value.value_or("configured"));
  }
  if (Status status = ask(by, text); !status.ok()) return status;
  return response;
}

Status FakeControlFacade::set_device(const Operator& by, const std::string& device,
                                     std::optional<std::uint32_t> sms) {
  return ask(by, "set device " + device + " sms=" + (sms ? std::to_string(*sms) : "(unset)"));
}

Result<v1::SetGroupResponse> FakeControlFacade::set_group(const Operator& by, const std::string& group,
                                                          const supervisor::GroupSettingsChange& change) {
  Status status = ask(by, "set group " + group + (change.sms ? " sms=" + std::to_string(*change.sms) : "") +
                              (change.priority ? " priority=" + std::to_string(*change.priority) : "") +
                              (change.unset_sms ? " sms=(unset)" : "") +
                              (change.linger_us ? " linger_us=" + std::to_string(*change.linger_us) : "") +
                              (change.unset_priority ? " priority=(unset)" : "") +
                              (change.unset_linger_us ? " linger_us=(unset)" : ""));
  if (!status.ok()) return status;
  const std::lock_guard lock(mutex_);
  return label_of<v1::SetGroupResponse>(views_.groups, group);
}

Status FakeControlFacade::evict_session(const Operator& by, std::uint64_t session_id,
                                        const std::string& reason) {
  return ask(by, "evict session " + std::to_string(session_id) + " " + reason);
}

Result<v1::EvictRankResponse> FakeControlFacade::evict_rank(const Operator& by, const std::string& group,
                                                            std::uint32_t rank, const std::string& reason) {
  Status status = ask(by, "evict group " + group + " rank " + std::to_string(rank) + " " + reason);
  if (!status.ok()) return status;
  const std::lock_guard lock(mutex_);
  return label_of<v1::EvictRankResponse>(views_.groups, group);
}

std::vector<std::string> FakeControlFacade::asked() const {
  const std::lock_guard lock(mutex_);
  return asked_;
}

Status FakeControlFacade::drain(const Operator& by, std::uint32_t timeout_ms) {
  const std::lock_guard lock(mutex_);
  if (!failure_.ok()) return failure_;
  drained_ = timeout_ms;
  last_operator_ = by;
  last_operator_.has_gone = {};
  const bool sooner = !views_.daemon.has_drain_left_ms() || timeout_ms < views_.daemon.drain_left_ms();
  if (sooner) views_.daemon.set_drain_left_ms(timeout_ms);
  views_.daemon.set_state(v1::DAEMON_STATE_DRAINING);
  return {};
}

void FakeControlFacade::fail(Status status) {
  const std::lock_guard lock(mutex_);
  failure_ = std::move(status);
}

std::optional<std::uint32_t> FakeControlFacade::drained() const {
  const std::lock_guard lock(mutex_);
  return drained_;
}

}  // namespace epd::test
