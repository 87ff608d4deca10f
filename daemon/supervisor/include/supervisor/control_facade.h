// What the control plane may ask of the supervisor. All calls may come from any thread: they are
// carried out on the supervisor's loop, which never blocks, and so return within milliseconds.
// DEADLINE_EXCEEDED if the loop has not answered within two seconds; ABORTED if it is stopping. A change
// whose caller was told so, or has gone, does not happen later.
#pragma once

#include "base/event.h"
#include "common/status.h"
#include "proto/shape.h"
#include "proto/statistics.h"
#include "supervisor/access_policy.h"

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace epd {

enum class DaemonState { kStarting, kServing, kDraining };

struct DaemonView {
  std::string version;
  std::string boot_id;  // hexadecimal, one per daemon run
  std::int32_t pid = 0;
  std::uint64_t uptime_ms = 0;
  DaemonState state = DaemonState::kStarting;
  std::string socket_path;
  std::string control_path;
  std::uint64_t config_generation = 0;  // 1 at start, +1 for each reload that was applied
  std::string last_reload_error;        // empty if the last reload was applied
  std::uint64_t sessions = 0;
  std::uint64_t groups = 0;
  std::uint64_t arena_bytes = 0;       // promised to clients (touched pages may be fewer)
  std::uint64_t sessions_total = 0;    // since start
  std::uint64_t sessions_refused = 0;  // since start
  std::string
      mps_control_error;  // why MPS can't be asked to terminate a client; "" if it can, or without MPS
};

// What the driver says of a GPU.
struct CudaView {
  std::string model;
  std::uint32_t compute = 0;  // 90 for 9.0
  std::uint32_t driver = 0;   // 13000: it speaks CUDA 13.0
  std::uint32_t num_sms = 0;
  std::uint32_t sm_partition = 0;  // SMs of the smallest partition; 0: it can't be divided
  bool mps = false;
  std::vector<std::string> unreachable;  // devices served here whose memory it can't map (no P2P)
};

// Counts of one histogram, by abi::histogram_bucket.
using HistogramView = std::array<std::uint64_t, abi::kHistogramBuckets>;

// kStopped: ready, but its engine stands still: stopped by a signal or a debugger, or hung.
enum class DeviceState { kStarting, kReady, kRestarting, kFailed, kStopped };

struct DeviceView {
  std::string name;  // "host:0"
  DeviceState state = DeviceState::kStarting;
  std::int32_t engine_pid = 0;
  std::uint32_t restarts = 0;
  std::string last_exit;  // "signal 9", "exit 1", "" if never
  std::uint32_t sms = 0;
  std::uint32_t sessions = 0;
  std::uint64_t heartbeat_age_ms = 0;
  bool sleeping = false;
  // counters of the present engine, from its EnginePage
  std::uint64_t ops_submitted = 0;
  std::uint64_t ops_completed = 0;
  std::uint64_t ops_failed = 0;
  std::uint64_t bytes_dispatched = 0;
  std::uint64_t bytes_combined = 0;
  std::uint64_t submissions_refused = 0;
  HistogramView kernel_stops{};  // of kernels that stay, from telling one to stop until it had
  std::uint64_t kernel_stop_max_us = 0;
  std::uint64_t times_stuck = 0;  // the GPU began no kernel, and those that stay stepped aside
  std::optional<CudaView> cuda;   // of a GPU
};

// What a client says of its own process: shown to people, never believed.
struct ClaimedProcess {
  std::int32_t pid = 0;  // 0: it says none
  std::string host;
};

struct SessionView {
  std::uint64_t id = 0;
  std::uint32_t uid = 0;
  std::uint32_t gid = 0;
  std::int32_t pid = 0;
  std::string device;
  std::string library;
  ClaimedProcess claimed;
  std::uint64_t age_ms = 0;
  std::uint32_t groups = 0;
  std::uint64_t arena_bytes = 0;
};

struct MemberView {
  std::uint32_t rank = 0;
  std::uint64_t session_id = 0;
  std::string device;
  bool gone = false;
  bool by_stream = false;  // its operations are commands
};

struct GroupView {
  std::uint64_t id = 0;
  std::string name;
  std::string state;  // "forming", "starting", "active", "breaking", "lost"
  abi::GroupShape shape{};
  std::uint32_t sms = 0;
  std::int32_t priority = 0;
  std::uint64_t epoch = 0;
  std::uint64_t age_ms = 0;
  std::string cause;  // of the last break, "" if none
  std::vector<MemberView> members;
  std::vector<std::uint32_t> missing_ranks;  // while forming
};

struct StageView {
  std::string stage;           // as below
  std::uint64_t after_us = 0;  // since submission, when it was entered
};

struct OperationView {
  std::string device;
  std::uint64_t session_id = 0;
  std::uint64_t group_id = 0;
  std::uint64_t ticket = 0;
  std::uint64_t op_index = 0;
  std::string op;     // "dispatch", "combine", "noop"
  std::string stage;  // "planning", "wait_ready", "moving", "wait_arrived", "breaking"
  std::uint32_t rank = 0;
  std::uint32_t slot = 0;
  std::uint32_t num_tokens = 0;
  std::int32_t waiting_for = -1;  // rank
  std::uint64_t age_us = 0;
  std::uint64_t epoch = 0;
  std::uint64_t waiting_us = 0;     // for waiting_for
  std::int64_t deadline_in_us = 0;  // negative: it has passed
  std::vector<StageView> stages;    // in the order in which they were entered
};

// One step from an operation towards what it waits for in the end.
struct WaitView {
  std::uint32_t rank = 0;
  std::uint64_t session_id = 0;
  std::int32_t pid = 0;
  std::string process;  // the same for people: see process_name()
  std::string device;
  DeviceState device_state = DeviceState::kStarting;
  std::int32_t engine_pid = 0;
  bool client_stopped = false;  // by a signal (SIGSTOP, a debugger)
  bool engine_stopped = false;  // likewise, or its loop stands still
  bool gone = false;            // it has left the group
  bool submitted = false;       // its engine has taken the operation
  std::string stage;            // of the operation there; "" if not submitted
  std::string text;             // all of this as a sentence
};

struct OperationDetail {
  OperationView operation;
  std::string group_name;
  std::int32_t pid = 0;         // of its own client
  std::int32_t engine_pid = 0;  // of its own engine
  bool engine_stopped = false;  // then everything above is as it left it
  std::vector<WaitView> waits;  // whom it waits for, whom that one waits for, and so on
  std::string text;             // why it has not ended, as a sentence
};

struct StatisticsView {
  std::uint64_t queue_depth = 0;
  std::array<std::uint64_t, abi::kNumOps> operations{};
  std::array<std::uint64_t, abi::kStatusSlots> ended{};
  std::array<std::uint64_t, abi::kStatusSlots> refused{};
  std::array<std::uint64_t, abi::kNumStalls> stalls{};
  std::uint64_t bytes_dispatched = 0;
  std::uint64_t bytes_combined = 0;
  std::array<HistogramView, abi::kNumIntervals> intervals{};
};

// Of a session, or of one session's rank in a group. Counted by the present engine; the engine's next start
// begins anew.
struct OwnedStatisticsView {
  std::string device;
  std::uint64_t session_id = 0;  // 0: all that found no row of their own in the engine's table
  std::uint64_t group_id = 0;    // ranks only
  std::uint32_t rank = 0;        // likewise
  StatisticsView statistics;
};

struct AllStatisticsView {
  std::vector<OwnedStatisticsView> sessions;
  std::vector<OwnedStatisticsView> ranks;
};

struct GroupSettingsChange {
  std::optional<std::uint32_t> sms;
  std::optional<std::int32_t> priority;
};

// Who asks for something on the control socket, or by a signal, as the kernel knows it.
struct Operator {
  std::uint32_t uid = 0;
  std::int32_t pid = 0;  // 0: of another PID namespace
  std::vector<std::uint32_t> gids;
  std::function<bool()> has_gone;  // whether it waits no longer; empty: it does. From the thread that asks
};

struct ConfigEntry {
  std::string key;  // "limits.max_sessions"
  std::string value;
  std::string origin;  // "default", "file", "flag", "environment"
  bool reloadable = false;
};

class ControlFacade {
 public:
  virtual ~ControlFacade() = default;

  virtual Result<DaemonView> daemon() = 0;
  virtual Result<std::vector<DeviceView>> devices() = 0;
  virtual Result<std::vector<SessionView>> sessions() = 0;
  virtual Result<std::vector<GroupView>> groups() = 0;
  virtual Result<std::vector<OperationView>> operations() = 0;
  virtual Result<std::vector<ConfigEntry>> config() = 0;
  // NOT_FOUND if no such operation is in flight.
  virtual Result<OperationDetail> operation(std::uint64_t session_id, std::uint64_t ticket) = 0;
  virtual Result<AllStatisticsView> statistics() = 0;
  // Up to `limit` events after number `after`; waits up to `wait_ms` for one. Never asks the loop.
  virtual Result<EventBatch> events(std::uint64_t after, std::size_t limit, std::uint32_t wait_ms) = 0;
  // PERMISSION_DENIED naming the caller, `what` ("drain") and the rule. Whoever serves the calls asks first;
  // what follows takes `by` for granted and records it. Never asks the loop.
  virtual Status authorize(const Operator& by, Right wanted, const std::string& what) = 0;
  // Stops admitting, waits for sessions to end, ends what is left after timeout_ms (0: the
  // configured drain timeout), then the daemon exits. Returns as soon as draining has begun.
  virtual Status drain(const Operator& by, std::uint32_t timeout_ms) = 0;
  // Changes what operations that are launched from now on may use. Kept over engine restarts, not over the
  // daemon's. INVALID_ARGUMENT says what is allowed. `group` is a name or an id.
  virtual Status set_device(const Operator& by, const std::string& device, std::uint32_t sms) = 0;
  virtual Status set_group(const Operator& by, const std::string& group,
                           const GroupSettingsChange& change) = 0;
  // Ends a session with ABORTED; takes one rank from its group as if it had left.
  virtual Status evict_session(const Operator& by, std::uint64_t session_id, const std::string& reason) = 0;
  virtual Status evict_rank(const Operator& by, const std::string& group, std::uint32_t rank,
                            const std::string& reason) = 0;
  // Starts the device's engine anew: at once if it is down, waits for its restart, or has failed for good;
  // else it is killed first. Deaths so far are forgotten.
  virtual Status restart_device(const Operator& by, const std::string& device) = 0;
};

}  // namespace epd
