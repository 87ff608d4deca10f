// A client that speaks the attach protocol by hand: for what libepd never sends.
#pragma once

#include "base/fd.h"
#include "base/packet.h"
#include "proto/attach.h"

#include <optional>
#include <string>

namespace epd::test {

class RawClient {
 public:
  explicit RawClient(const std::string& socket);  // connects; valid() says whether
  bool valid() const { return socket_.valid(); }
  int fd() const { return socket_.get(); }
  void close() { socket_.reset(); }

  // A Hello that the daemon accepts; change what the test is about.
  static abi::Hello good_hello();
  bool send(abi::AttachType type, const void* body, std::size_t bytes) const;
  bool send_bytes(const void* data, std::size_t bytes) const;
  // The next packet; none if the daemon hangs up or `seconds` pass.
  std::optional<Packet> receive(double seconds) const;
  // True when the daemon has closed the connection, unread packets aside.
  bool closed_within(double seconds) const;

 private:
  UniqueFd socket_;
};

// "STATUS: text" of a refusal, or what came instead.
std::string refusal(const std::optional<Packet>& packet);

}  // namespace epd::test
