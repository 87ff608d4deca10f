#include "supervisor_link.h"

#include "base/log.h"

#include <cstring>

namespace epd::engine {

using abi::LinkType;

void SupervisorLink::receive(const Clock& clock, std::uint64_t until_ns) {
  flush();
  Packet packet;
  Status error;
  while (!exit_code_ && clock.now_ns() < until_ns) {
    switch (receive_packet(socket_.get(), packet, error)) {
      case ReceiveResult::kNothing: return;
      case ReceiveResult::kClosed:
        exit_code_ = 1;  // the supervisor has ended, and with it the owners of all memory
        return;
      case ReceiveResult::kMalformed:
        log_event(LogLevel::kError, "malformed link message", {{"error", error.to_string()}});
        exit_code_ = 2;
        return;
      case ReceiveResult::kPacket: handle(packet); break;
    }
  }
}

void SupervisorLink::handle(Packet& packet) {
  const auto type = static_cast<LinkType>(packet.header.type);
  if (type == LinkType::kStop) {
    exit_code_ = 0;
    return;
  }
  const auto handler = handlers_.find(type);
  const Status status = handler != handlers_.end()
                            ? handler->second(packet)
                            : invalid_argument("link message type " + std::to_string(packet.header.type));
  if (status.ok()) return;
  log_event(LogLevel::kError, "link message refused",
            {{"type", packet.header.type}, {"error", status.to_string()}});
  exit_code_ = 2;
}

void SupervisorLink::send_bytes(LinkType type, const void* body, std::size_t bytes) {
  Packet packet;
  packet.header.type = static_cast<std::uint16_t>(type);
  packet.body_bytes = bytes;
  std::memcpy(packet.body.data(), body, bytes);
  backlog_.push_back(std::move(packet));
  flush();
}

void SupervisorLink::say_device_failed() {
  flush();
  // If the socket has no space, the end of the process will tell.
  if (backlog_.empty())
    (void)send_packet(socket_.get(), static_cast<std::uint16_t>(LinkType::kDeviceFailed), 0, nullptr, 0);
}

void SupervisorLink::flush() {
  while (!backlog_.empty()) {
    const Packet& packet = backlog_.front();
    const Status sent =
        send_packet(socket_.get(), packet.header.type, 0, packet.body.data(), packet.body_bytes);
    if (sent.code() == StatusCode::kWouldBlock) return;
    backlog_.pop_front();  // after a failure the supervisor is gone; receive() will see that
  }
}

}  // namespace epd::engine
