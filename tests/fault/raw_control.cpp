#include "raw_control.h"

#include "support/ranks.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <cerrno>
#include <cstring>

namespace epd::test {
namespace {

constexpr double kAnswerS = 20;
constexpr std::uint8_t kData = 0, kHeaders = 1, kReset = 3, kSettings = 4, kGoAway = 7;
constexpr std::uint8_t kEndStream = 1, kAck = 1, kEndHeaders = 4;
constexpr std::size_t kFrameHeader = 9;

std::string frame(std::uint8_t type, std::uint8_t flags, std::uint32_t stream, const std::string& body) {
  const std::size_t size = body.size();
  std::string bytes;
  for (const int shift : {16, 8, 0}) bytes += static_cast<char>(size >> shift);
  bytes += static_cast<char>(type);
  bytes += static_cast<char>(flags);
  for (const int shift : {24, 16, 8, 0}) bytes += static_cast<char>(stream >> shift);
  return bytes + body;
}

// Neither compressed nor remembered.
std::string field(const std::string& name, const std::string& value) {
  return std::string(1, '\0') + static_cast<char>(name.size()) + name + static_cast<char>(value.size()) +
         value;
}

}  // namespace

UniqueFd RawControl::make_unconnected() {
  return UniqueFd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
}

RawControl::RawControl(UniqueFd unconnected, const std::string& socket) : socket_(std::move(unconnected)) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::strncpy(address.sun_path, socket.c_str(), sizeof(address.sun_path) - 1);
  RANK_CHECK(::connect(socket_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0,
             std::strerror(errno));
  send("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(kSettings, 0, 0, ""));
}

void RawControl::send(std::string_view bytes) const {
  RANK_CHECK(
      ::send(socket_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(bytes.size()),
      std::strerror(errno));
}

void RawControl::call(const std::string& method) {
  const std::uint32_t stream = std::exchange(next_stream_, next_stream_ + 2);
  const std::string headers = field(":method", "POST") + field(":scheme", "http") +
                              field(":path", "/epd.v1.Control/" + method) + field(":authority", "localhost") +
                              field("content-type", "application/grpc") + field("te", "trailers");
  send(frame(kHeaders, kEndHeaders, stream, headers) +
       frame(kData, kEndStream, stream, std::string(5, '\0')));
  for (;;) {
    const Frame got = next_frame();
    if (got.type == kSettings && (got.flags & kAck) == 0) send(frame(kSettings, kAck, 0, ""));
    RANK_CHECK(got.type != kReset && got.type != kGoAway, "the call was broken off: " + method);
    if (got.type == kHeaders && got.stream == stream && (got.flags & kEndStream) != 0) return;
  }
}

RawControl::Frame RawControl::next_frame() {
  const std::string header = receive(kFrameHeader);
  const auto byte = [&header](std::size_t i) {
    return static_cast<std::uint32_t>(static_cast<unsigned char>(header[i]));
  };
  (void)receive(byte(0) << 16 | byte(1) << 8 | byte(2));
  return {static_cast<std::uint8_t>(byte(3)), static_cast<std::uint8_t>(byte(4)),
          byte(5) << 24 | byte(6) << 16 | byte(7) << 8 | byte(8)};
}

std::string RawControl::receive(std::size_t bytes) {
  const double end = now_s() + kAnswerS;
  while (received_.size() < bytes) {
    char buffer[4096];
    const ssize_t got = ::recv(socket_.get(), buffer, sizeof(buffer), MSG_DONTWAIT);
    RANK_CHECK(got != 0 && now_s() < end, "no answer from the control plane");
    if (got > 0) {
      received_.append(buffer, static_cast<std::size_t>(got));
      continue;
    }
    RANK_CHECK(errno == EAGAIN, std::strerror(errno));
    pollfd entry{socket_.get(), POLLIN, 0};
    ::poll(&entry, 1, 20);
  }
  std::string taken = received_.substr(0, bytes);
  received_.erase(0, bytes);
  return taken;
}

bool RawControl::closed_within(double seconds) const {
  return eventually(seconds, [&] {
    pollfd entry{socket_.get(), POLLRDHUP, 0};
    return ::poll(&entry, 1, 0) == 1 && (entry.revents & (POLLRDHUP | POLLHUP)) != 0;
  });
}

}  // namespace epd::test
