// The engine's end of its link to the supervisor. Each message that arrives is given to the handler of its
// type. A message to the supervisor waits here while the socket has no space. Both ends of the link are epd's
// own. So a message that makes no sense is logged and ends the engine, because nothing can be trusted then.
// The supervisor restarts it.
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
  // A status that is not OK ends the engine.
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

  // Handles messages until the time has passed. The rest stays in the socket.
  void receive(const Clock& clock, std::uint64_t until_ns);
  // Set once the loop is to end: kStop has come, or the link has ended or can't be trusted. It is the
  // process's exit code.
  const std::optional<int>& exit_code() const { return exit_code_; }
  // Ends the loop for a reason of the engine's own.
  void end(int exit_code) { exit_code_ = exit_code_.value_or(exit_code); }

  template <typename T>
  void send(abi::LinkType type, const T& body) {
    send_bytes(type, &body, sizeof(T));
  }
  // Told when the loop's thread is about to end the process.
  void say_device_failed();

  int fd() const { return socket_.get(); }

 private:
  void handle(Packet& packet);
  void send_bytes(abi::LinkType type, const void* body, std::size_t bytes);
  void flush();

  const UniqueFd socket_;
  std::map<abi::LinkType, std::function<Status(Packet&)>> handlers_;
  std::list<Packet> backlog_;  // messages for which the supervisor had no room
  std::optional<int> exit_code_;
};

}  // namespace epd::engine
