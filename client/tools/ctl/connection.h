// Calls to one daemon. The only file that sees gRPC.
#pragma once

#include "arguments.h"
#include "dial.h"

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include "epd/v1/control.pb.h"

namespace epd::ctl {

class Connection {
 public:
  // Does not connect yet.
  Connection(const std::string& socket, std::uint32_t timeout_ms);
  ~Connection();
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  // No value: it went well. Each call ends within the timeout. All go over one connection, which the first
  // makes; if the daemon has ended it, the next call makes another one.
  std::optional<Failure> call(const v1::GetStatusRequest& request, v1::GetStatusResponse& response);
  std::optional<Failure> call(const v1::ListDevicesRequest& request, v1::ListDevicesResponse& response);
  std::optional<Failure> call(const v1::ListNodesRequest& request, v1::ListNodesResponse& response);
  std::optional<Failure> call(const v1::ListFarEnginesRequest& request, v1::ListFarEnginesResponse& response);
  std::optional<Failure> call(const v1::ListSessionsRequest& request, v1::ListSessionsResponse& response);
  std::optional<Failure> call(const v1::ListGroupsRequest& request, v1::ListGroupsResponse& response);
  std::optional<Failure> call(const v1::ListOperationsRequest& request, v1::ListOperationsResponse& response);
  std::optional<Failure> call(const v1::GetConfigRequest& request, v1::GetConfigResponse& response);
  std::optional<Failure> call(const v1::DrainRequest& request, v1::DrainResponse& response);
  std::optional<Failure> call(const v1::GetVersionRequest& request, v1::GetVersionResponse& response);
  std::optional<Failure> call(const v1::GetOperationRequest& request, v1::GetOperationResponse& response);
  std::optional<Failure> call(const v1::GetStatisticsRequest& request, v1::GetStatisticsResponse& response);
  std::optional<Failure> call(const v1::ReloadConfigRequest& request, v1::ReloadConfigResponse& response);
  std::optional<Failure> call(const v1::SetOptionsRequest& request, v1::SetOptionsResponse& response);
  std::optional<Failure> call(const v1::GetWaitsRequest& request, v1::GetWaitsResponse& response);
  std::optional<Failure> call(const v1::SetDeviceRequest& request, v1::SetDeviceResponse& response);
  std::optional<Failure> call(const v1::SetGroupRequest& request, v1::SetGroupResponse& response);
  std::optional<Failure> call(const v1::EvictSessionRequest& request, v1::EvictSessionResponse& response);
  std::optional<Failure> call(const v1::EvictRankRequest& request, v1::EvictRankResponse& response);
  std::optional<Failure> call(const v1::RestartDeviceRequest& request, v1::RestartDeviceResponse& response);
  // The daemon's process, as a pidfd; none if it is not seen from here. `own_pid` is what the daemon has
  // told, over the connection that is open now.
  Descriptor process(std::int32_t own_pid) const;
  // What grpc.health.v1 says of a service; an unknown one is a failure with status NOT_FOUND.
  std::optional<Failure> check_health(const std::string& service, bool& serving);
  // Until the daemon ends the stream; with `follow` there is no timeout. `each` returns false to end it.
  std::optional<Failure> watch(const v1::WatchEventsRequest& request,
                               const std::function<bool(const v1::WatchEventsResponse&)>& each);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Version of the gRPC library that this program runs with.
std::string grpc_version();

}  // namespace epd::ctl
