// What the control plane may ask of the supervisor. All calls may come from any thread: they are
// carried out on the supervisor's loop, which never blocks, and so return within milliseconds.
// DEADLINE_EXCEEDED if the loop has not answered within two seconds; ABORTED if it is stopping. A change
// whose caller was told so, or has gone, does not happen later.
#pragma once

#include "base/event.h"
#include "common/status.h"
#include "supervisor/access_policy.h"

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

// Of epd/v1/control.proto, which says what each field is.
namespace epd::v1 {
class DaemonStatus;
class GetConfigResponse;
class GetOperationResponse;
class GetStatisticsResponse;
class ListDevicesResponse;
class ListFarEnginesResponse;
class ListGroupsResponse;
class ListNodesResponse;
class ListOperationsResponse;
class ListSessionsResponse;
}  // namespace epd::v1

namespace epd::supervisor {

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

class ControlFacade {
 public:
  virtual ~ControlFacade() = default;

  // Messages are complete and in the order that control.proto names; their strings are as clients chose them,
  // which need not be UTF-8.
  virtual Result<v1::DaemonStatus> daemon() = 0;
  virtual Result<v1::ListDevicesResponse> devices() = 0;
  virtual Result<v1::ListSessionsResponse> sessions() = 0;
  virtual Result<v1::ListGroupsResponse> groups() = 0;
  virtual Result<v1::ListOperationsResponse> operations() = 0;
  // UNSUPPORTED without a cluster. Reads the certificate files, on the thread that asks.
  virtual Result<v1::ListNodesResponse> nodes() = 0;
  // UNSUPPORTED without a cluster.
  virtual Result<v1::ListFarEnginesResponse> far_engines() = 0;
  virtual Result<v1::GetConfigResponse> config() = 0;
  // NOT_FOUND if no such operation is in flight.
  virtual Result<v1::GetOperationResponse> operation(std::uint64_t session_id, std::uint64_t ticket) = 0;
  virtual Result<v1::GetStatisticsResponse> statistics() = 0;
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

}  // namespace epd::supervisor
