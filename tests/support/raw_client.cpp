#include "support/raw_client.h"

#include "support/ranks.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <algorithm>
#include <cstring>

namespace epd::test {

RawClient::RawClient(const std::string& socket)
    : socket_(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0)) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::strncpy(address.sun_path, socket.c_str(), sizeof(address.sun_path) - 1);
  if (::connect(socket_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0)
    socket_.reset();
}

abi::Hello RawClient::good_hello() {
  abi::Hello hello{};
  hello.version_min = abi::kAbiVersionMin;
  hello.version_max = abi::kAbiVersion;
  hello.layout_hash = abi::layout_hash();
  hello.nonce = 42;
  abi::set_text(hello.library, "raw client of a test", 20);
  return hello;
}

bool RawClient::send(abi::AttachType type, const void* body, std::size_t bytes) const {
  return send_packet(socket_.get(), static_cast<std::uint16_t>(type), 1, body, bytes).ok();
}

bool RawClient::send_bytes(const void* data, std::size_t bytes) const {
  return ::send(socket_.get(), data, bytes, MSG_NOSIGNAL) == static_cast<ssize_t>(bytes);
}

std::optional<Packet> RawClient::receive(double seconds) const {
  const double end = now_s() + seconds;
  for (;;) {
    Packet packet;
    Status error;
    const ReceiveResult result = receive_packet(socket_.get(), packet, error);
    if (result == ReceiveResult::kPacket) return packet;
    if (result != ReceiveResult::kNothing || now_s() > end) return std::nullopt;
    pollfd entry{socket_.get(), POLLIN, 0};
    ::poll(&entry, 1, 20);
  }
}

bool RawClient::closed_within(double seconds) const {
  return eventually(seconds, [&] {
    pollfd entry{socket_.get(), POLLRDHUP, 0};
    return ::poll(&entry, 1, 0) == 1 && (entry.revents & (POLLRDHUP | POLLHUP)) != 0;
  });
}

std::string refusal(const std::optional<Packet>& packet) {
  if (!packet.has_value()) return "no answer";
  if (packet->header.type != static_cast<std::uint16_t>(abi::AttachType::kRefused)) {
    return "message type " + std::to_string(packet->header.type);
  }
  const Result<abi::Refused> body = packet->read<abi::Refused>();
  if (!body.ok()) return body.status().to_string();
  const abi::Refused& refused = body.value();
  return std::string(status_name(refused.status)) + ": " +
         std::string(refused.text, abi::text_length(refused.text));
}

}  // namespace epd::test
