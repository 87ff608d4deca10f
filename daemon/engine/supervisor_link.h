// The engine's end of its link to the supervisor. A message that comes goes to the handler of its type; one
// that goes waits here as long as the socket has no room. Both ends of the link are ours: a message that
// makes no sense is logged and, since nothing can be trusted then, ends the engine, which the supervisor
// restarts.
#pragma once

#include "base/clock.h"
#include "common/packet.h"
#include "proto/link.h"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <optional>

namespace epd::engine {

class SupervisorLink {
 public:
  explicit SupervisorLink(UniqueFd socket) : socket_(std::move(socket)) {}

  // The object's handler gets each message of the type: its body, or the packet if descriptors come with it.
  // What is not OK ends the engine.
  template <typename Object, typename Message>
  void on(abi::LinkType type, Object& object, Status (Object::*handler)(const Message&)) {
    handlers_[type] = [&object, handler](Packet& packet) -> Status {
      const Result<Message> body = packet.read<Message>();
      return body.ok() ? (object.*handler)(body.value()) : body.status();
    };
  }
  template <typename Object>
  void on(abi::LinkType type, Object& object, Status (Object::*handler)(Packet&)) {
    handlers_[type] = [&object, handler](Packet& packet) { return (object.*handler)(packet); };
  }

  // Hands on what has come, until the time has passed. What is left stays in the socket.
  void receive(const Clock& clock, std::uint64_t until_ns);
  // Of the process, once the loop is to end: kStop has come, or the link has ended or can't be trusted.
  const std::optional<int>& exit_code() const { return exit_code_; }
  // The loop is to end, for a reason of the engine's own.
  void end(int exit_code) { exit_code_ = exit_code_.value_or(exit_code); }

  template <typename T>
  void send(abi::LinkType type, const T& body) {
    send_bytes(type, &body, sizeof(T));
  }
  // The loop's thread is about to end the process.
  void say_device_failed();

  int fd() const { return socket_.get(); }

 private:
  void handle(Packet& packet);
  void send_bytes(abi::LinkType type, const void* body, std::size_t bytes);
  void flush();

  const UniqueFd socket_;
  std::map<abi::LinkType, std::function<Status(Packet&)>> handlers_;
  std::list<Packet> backlog_;  // messages that the supervisor had no room for
  std::optional<int> exit_code_;
};

}  // namespace epd::engine
