// The TCP port of health: grpc.health.v1.Health/Check, for whoever reaches the port, and nothing else. Nobody
// says who calls there, so nothing can be changed, and nothing be read but whether parts of the daemon serve.
//
// A thread of its own takes connections in and sees them end, so that they are limited; gRPC has no such
// limit. What floods the port asks the supervisor ten times a second at most.
#pragma once

#include "common/fd.h"
#include "common/status.h"
#include "health.h"

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <thread>

namespace epd::control {

class HealthPort {
 public:
  static constexpr std::size_t kMaxConnections = 64;
  static constexpr std::size_t kMaxOfAddress = 16;

  // `listen`: "127.0.0.1:9456", "[::1]:0". RESOURCE_EXHAUSTED if it can't be had. `model` outlives it.
  static Result<std::unique_ptr<HealthPort>> open(const std::string& listen, HealthModel& model);
  ~HealthPort();  // ends all connections
  HealthPort(const HealthPort&) = delete;
  HealthPort& operator=(const HealthPort&) = delete;

  std::uint16_t port() const { return port_; }

 private:
  struct Answers;  // what gRPC sees
  struct Connection {
    UniqueFd copy;     // gRPC has the other one
    std::string host;  // of the other end
  };

  HealthPort(std::unique_ptr<Answers> answers, UniqueFd listener, UniqueFd wake, std::uint16_t port);
  void run();
  void take_in();
  bool has_room(const std::string& host);

  const std::unique_ptr<Answers> answers_;
  const UniqueFd listener_;
  const UniqueFd wake_;  // rung once, to end the thread
  const std::uint16_t port_;
  std::map<int, Connection> connections_;  // by the copy's number; the thread's
  std::thread thread_;
};

}  // namespace epd::control
