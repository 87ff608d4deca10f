#include "support/fake_control_facade.h"

#include <unistd.h>
#include <utility>

namespace epd::test {
namespace {

DeviceView make_device(const std::string& name) {
  DeviceView device;
  device.name = name;
  device.state = DeviceState::kReady;
  device.engine_pid = 4242;
  device.sms = 2;
  device.sessions = 1;
  device.heartbeat_age_ms = 3;
  device.ops_submitted = 1200;
  device.ops_completed = 1190;
  device.ops_failed = 8;
  device.bytes_dispatched = std::uint64_t{5} << 30;
  device.bytes_combined = std::uint64_t{3} << 20;
  device.submissions_refused = 2;
  return device;
}

SessionView make_session(std::uint64_t id, const std::string& device) {
  SessionView session;
  session.id = id;
  session.uid = 1000;
  session.gid = 100;
  session.pid = 7000 + static_cast<std::int32_t>(id);
  session.device = device;
  session.library = "libepd 0.1.0";
  session.claimed = {5, "node7"};
  session.age_ms = 65'000;
  session.groups = 1;
  session.arena_bytes = std::uint64_t{300} << 20;
  return session;
}

GroupView make_group() {
  GroupView group;
  group.id = 9;
  group.name = "layer-experts";
  group.state = "active";
  group.shape = {
      2, 256, 4096, 7168, 8, 4, abi::Payload::kFp8Cast, abi::IndexType::kInt64, abi::LossPolicy::kFailFast};
  group.shape.layout = abi::Layout::kPacked;
  group.shape.scale_format = abi::ScaleFormat::kUe8m0;
  group.shape.expert_alignment = 128;
  group.shape.num_biases = 2;
  group.shape.num_handles = 3;
  group.shape.max_recv_rows = 9000;
  group.sms = 2;
  group.epoch = 3;
  group.age_ms = 64'000;
  group.cause = "engine of host:1 restarted";
  group.members = {{1, 12, "host:1", false, true}, {0, 11, "host:0", false, false}};
  return group;
}

GroupView make_forming_group() {
  GroupView group = make_group();
  group.id = 10;
  group.name = "late";
  group.state = "forming";
  group.shape.payload = abi::Payload::kBf16;
  group.shape.index_type = abi::IndexType::kInt32;
  group.shape.num_ranks = 4;
  group.cause.clear();
  group.members = {{2, 11, "host:0", true, false}};
  group.missing_ranks = {3, 0, 1};
  return group;
}

OperationView make_operation(std::uint32_t rank) {
  OperationView operation;
  operation.device = "host:" + std::to_string(rank);
  operation.session_id = 11 + rank;
  operation.group_id = 9;
  operation.ticket = 500 + rank;
  operation.op_index = 77;
  operation.op = "dispatch";
  operation.stage = rank == 0 ? "wait_ready" : "planning";
  operation.rank = rank;
  operation.slot = 1;
  operation.num_tokens = 128;
  operation.waiting_for = rank == 0 ? 1 : -1;
  operation.age_us = 1500;
  operation.epoch = 3;
  operation.waiting_us = rank == 0 ? 900 : 0;
  operation.deadline_in_us = 29'000'000;
  operation.stages = {{"seen", 2}, {"planning", 3}};
  return operation;
}

OwnedStatisticsView make_statistics(std::uint32_t rank) {
  OwnedStatisticsView owned;
  owned.device = "host:" + std::to_string(rank);
  owned.session_id = 11 + rank;
  owned.group_id = 9;
  owned.rank = rank;
  StatisticsView& s = owned.statistics;
  s.queue_depth = 1;
  s.operations = {0, 5, 100, 90};
  s.ended[0] = 190;
  s.ended[static_cast<std::size_t>(StatusCode::kRankLost)] = 3;
  s.refused[static_cast<std::size_t>(StatusCode::kInvalidArgument)] = 2;
  s.stalls = {1, 20, 300};
  s.bytes_dispatched = std::uint64_t{1} << 20;
  s.bytes_combined = std::uint64_t{1} << 10;
  s.intervals[3][abi::histogram_bucket(100)] = 98;
  s.intervals[3][abi::histogram_bucket(5000)] = 2;
  return owned;
}

}  // namespace

FakeControlFacade::FakeControlFacade() {
  DaemonView& daemon = views_.daemon;
  daemon.version = "0.1.0";
  daemon.boot_id = "00112233445566778899aabbccddeeff";
  daemon.pid = ::getpid();
  daemon.uptime_ms = 3'723'000;
  daemon.state = DaemonState::kServing;
  daemon.config_generation = 1;
  daemon.sessions = 2;
  daemon.groups = 2;
  daemon.arena_bytes = std::uint64_t{600} << 20;
  daemon.sessions_total = 17;
  daemon.sessions_refused = 1;
  views_.devices = {make_device("host:1"), make_device("host:0")};
  views_.sessions = {make_session(12, "host:1"), make_session(11, "host:0")};
  views_.groups = {make_forming_group(), make_group()};
  views_.operations = {make_operation(1), make_operation(0)};
  views_.statistics = {{make_statistics(1), make_statistics(0)}, {make_statistics(1), make_statistics(0)}};
  for (const char* text : {"session attached", "rank joined", "group breaks"}) {
    Event event;
    event.kind = EventKind::kGroupBroke;
    event.unix_ms = 1'700'000'000'000;
    event.text = text;
    event.fields = {{"group", "9"}, {"text", "rank 1 died"}};
    events_.add(event);
  }
  views_.config = {{"limits.max_sessions", "64", "file", true}, {"device.host", "2", "flag", false}};
}

Result<OperationDetail> FakeControlFacade::operation(std::uint64_t session_id, std::uint64_t ticket) {
  const std::lock_guard lock(mutex_);
  if (!failure_.ok()) return failure_;
  for (const OperationView& operation : views_.operations) {
    if (operation.session_id != session_id || operation.ticket != ticket) continue;
    OperationDetail detail;
    detail.operation = operation;
    detail.group_name = "layer-experts";
    detail.pid = 7011;
    detail.engine_pid = 4242;
    detail.waits = {{1, 12, 7012, "7012", "host:1", DeviceState::kReady, 4242, true, false, false, false, "",
                     "rank 1 (session 12, pid 7012, host:1) has not submitted it"}};
    detail.text = "waits for 0 ms: rank 1";
    return detail;
  }
  return not_found("operation is not in flight");
}

Status FakeControlFacade::authorize(const Operator& by, Right wanted, const std::string& what) {
  const std::lock_guard lock(mutex_);
  if (wanted <= allowed_) return {};
  return {StatusCode::kPermissionDenied,
          "user " + std::to_string(by.uid) + " may not " + what +
              ": no access.rule gives it more, and access.operate is \"read\""};
}

void FakeControlFacade::allow(Right right) {
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

Status FakeControlFacade::set_device(const Operator& by, const std::string& device, std::uint32_t sms) {
  return ask(by, "set device " + device + " sms=" + std::to_string(sms));
}

Status FakeControlFacade::set_group(const Operator& by, const std::string& group,
                                    const GroupSettingsChange& change) {
  return ask(by, "set group " + group + (change.sms ? " sms=" + std::to_string(*change.sms) : "") +
                     (change.priority ? " priority=" + std::to_string(*change.priority) : ""));
}

Status FakeControlFacade::evict_session(const Operator& by, std::uint64_t session_id,
                                        const std::string& reason) {
  return ask(by, "evict session " + std::to_string(session_id) + " " + reason);
}

Status FakeControlFacade::evict_rank(const Operator& by, const std::string& group, std::uint32_t rank,
                                     const std::string& reason) {
  return ask(by, "evict group " + group + " rank " + std::to_string(rank) + " " + reason);
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
  views_.daemon.state = DaemonState::kDraining;
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
