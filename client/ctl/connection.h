// Calls to one daemon. The only file that sees gRPC.
#pragma once

#include "arguments.h"

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

  // No value: it went well. Each call ends within the timeout.
  std::optional<Failure> call(const v1::GetStatusRequest& request, v1::GetStatusResponse& response);
  std::optional<Failure> call(const v1::ListDevicesRequest& request, v1::ListDevicesResponse& response);
  std::optional<Failure> call(const v1::ListSessionsRequest& request, v1::ListSessionsResponse& response);
  std::optional<Failure> call(const v1::ListGroupsRequest& request, v1::ListGroupsResponse& response);
  std::optional<Failure> call(const v1::ListOperationsRequest& request, v1::ListOperationsResponse& response);
  std::optional<Failure> call(const v1::GetConfigRequest& request, v1::GetConfigResponse& response);
  std::optional<Failure> call(const v1::DrainRequest& request, v1::DrainResponse& response);
  std::optional<Failure> call(const v1::GetVersionRequest& request, v1::GetVersionResponse& response);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Version of the gRPC library that this program runs with.
std::string grpc_version();

}  // namespace epd::ctl
