// The requests of the control plane to the supervisor. Any thread may make these calls. They are carried out
// on the supervisor's loop, which never blocks, so they return within milliseconds. DEADLINE_EXCEEDED if the
// loop has not answered within two seconds. ABORTED if it is stopping. A change does not happen after its
// caller got such an error, or has gone.
#pragma once

#include "base/event.h"
#include "common/status.h"
#include "supervisor/access_policy.h"

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

// Messages of epd/v1/control.proto, which says what each field is.
namespace epd::v1 {
class EvictRankResponse;
class GetConfigResponse;
class GetOperationResponse;
class GetStatisticsResponse;
class GetStatusResponse;
class GetWaitsResponse;
class ListDevicesResponse;
class ListFarEnginesResponse;
class ListGroupsResponse;
class ListNodesResponse;
class ListOperationsResponse;
class ListSessionsResponse;
class ReloadConfigResponse;
class SetGroupResponse;
class SetOptionsResponse;
}  // namespace epd::v1

namespace epd::supervisor {

struct WaitsWanted {
  std::string group;  // as in SetGroupRequest; empty: all
  // Pairs of ranks: of groups that have at most so many ranks, and the longest so many of a group.
  std::uint32_t max_ranks = 0;
  std::size_t max_pairs = 0;
  bool in_progress = false;  // with waits that have not ended; a sum may then become smaller
};

struct GroupSettingsChange {
  std::optional<std::uint32_t> sms;
  std::optional<std::int32_t> priority;
  std::optional<std::uint32_t> linger_us;
  // As the ranks have joined, or as configured, again.
  bool unset_sms = false;
  bool unset_priority = false;
  bool unset_linger_us = false;
};
// Maps keys to values. No value: the configuration decides again.
using OptionSettings = std::map<std::string, std::optional<std::string>>;

// The process that makes a request on the control socket, or by a signal, according to the kernel.
struct Operator {
  std::uint32_t uid = 0;
  std::int32_t pid = 0;  // 0: in another PID namespace
  std::vector<std::uint32_t> gids;
  std::function<bool()>
      has_gone;  // whether the caller no longer waits; empty: it waits. Called on the thread that asks
};

// The checks of grpc.health.v1 answer from these facts.
struct HealthFacts {
  bool serving = false;                        // clients are admitted
  std::string socket_problem;                  // as in DaemonStatus; empty: none
  std::optional<std::string> cluster_problem;  // as in ClusterStatus; none: the daemon is in no cluster
  std::map<std::string, bool> devices;         // whether each is ready, by name
};

class ControlFacade {
 public:
  virtual ~ControlFacade() = default;

  // Messages are complete and in the order that control.proto names. Their strings are as clients chose them,
  // so they need not be UTF-8.
  virtual Result<v1::GetStatusResponse> status() = 0;
  virtual Result<v1::ListDevicesResponse> devices() = 0;
  virtual Result<std::string> boot_id() = 0;
  virtual Result<HealthFacts> health() = 0;
  virtual Result<v1::ListSessionsResponse> sessions() = 0;
  virtual Result<v1::ListGroupsResponse> groups() = 0;
  virtual Result<v1::ListOperationsResponse> operations() = 0;
  // UNSUPPORTED without a cluster. Reads the certificate files, on the calling thread.
  virtual Result<v1::ListNodesResponse> nodes() = 0;
  // UNSUPPORTED without a cluster.
  virtual Result<v1::ListFarEnginesResponse> far_engines() = 0;
  virtual Result<v1::GetConfigResponse> config() = 0;
  // NOT_FOUND if no such operation is in flight.
  virtual Result<v1::GetOperationResponse> operation(std::uint64_t session_id, std::uint64_t ticket) = 0;
  virtual Result<v1::GetStatisticsResponse> statistics() = 0;
  // NOT_FOUND if no such group is known. Sums are added up on the thread that asks.
  virtual Result<v1::GetWaitsResponse> waits(const WaitsWanted& wanted) = 0;
  // Up to `limit` events after number `after`. Waits up to `wait_ms` for one. Does not use the loop.
  virtual Result<EventBatch> events(std::uint64_t after, std::size_t limit, std::uint32_t wait_ms) = 0;
  // PERMISSION_DENIED names the caller, `what` ("drain") and the rule. The server of the calls must ask
  // first. The functions below do not check `by` again; they record it. Does not use the loop.
  virtual Status authorize(const Operator& by, Right wanted, const std::string& what) = 0;
  // Admits nobody from now on, and waits for sessions to end. After timeout_ms (0: the configured drain
  // timeout) it ends those that are left. Then the daemon exits. The call returns as soon as draining has
  // begun.
  virtual Status drain(const Operator& by, std::uint32_t timeout_ms) = 0;
  // Reads the configuration again: all of it, or nothing, with a status that names the option, its value and
  // what is allowed.
  virtual Result<v1::ReloadConfigResponse> reload(const Operator& by) = 0;
  // Sets log.level and limits.*, all that are named or none. Kept until the daemon ends, or a reload brings
  // another value of the option.
  virtual Result<v1::SetOptionsResponse> set_options(const Operator& by, const OptionSettings& options) = 0;
  // Changes what operations may use that are launched from now on. The change survives restarts of engines,
  // but not of the daemon. INVALID_ARGUMENT says what is allowed. `group` is as in SetGroupRequest. Without
  // SMs the configuration decides again.
  virtual Status set_device(const Operator& by, const std::string& device,
                            std::optional<std::uint32_t> sms) = 0;
  virtual Result<v1::SetGroupResponse> set_group(const Operator& by, const std::string& group,
                                                 const GroupSettingsChange& change) = 0;
  // Ends a session with ABORTED. The other function removes one rank from its group, as if it had left.
  virtual Status evict_session(const Operator& by, std::uint64_t session_id, const std::string& reason) = 0;
  virtual Result<v1::EvictRankResponse> evict_rank(const Operator& by, const std::string& group,
                                                   std::uint32_t rank, const std::string& reason) = 0;
  // Starts the device's engine again: at once if it is down, waits for its restart, or has failed for good.
  // Otherwise it is killed first. Former deaths no longer count.
  virtual Status restart_device(const Operator& by, const std::string& device) = 0;
};

}  // namespace epd::supervisor
