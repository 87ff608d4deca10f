// Calls to one daemon. Only connection.cpp sees gRPC.
#pragma once

#include "arguments.h"

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

  // Makes the call of epd.v1.Control or grpc.health.v1.Health that takes such a request. Returns no value on
  // success. Each call ends within the timeout.
  std::optional<Failure> try_call(const google::protobuf::Message& request,
                                  google::protobuf::Message& response);
  // Like try_call, but throws the Failure.
  template <typename Response>
  Response call(const google::protobuf::Message& request) {
    Response response;
    if (auto failure = try_call(request, response)) throw std::move(*failure);
    return response;
  }
  // Asks grpc.health.v1 whether a service serves. Throws the Failure; for an unknown service its status is
  // NOT_FOUND.
  bool is_serving(const std::string& service);
  // Reads events until the daemon ends the stream; with `follow` there is no timeout. `each` returns false to
  // end it. Throws the Failure.
  void watch(const v1::WatchEventsRequest& request,
             const std::function<bool(const v1::WatchEventsResponse&)>& each);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Version of the gRPC library that this program runs with.
std::string grpc_version();

}  // namespace epd::ctl
