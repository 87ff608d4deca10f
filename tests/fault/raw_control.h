// A client of the control plane without gRPC, over a socket that the test has made: HTTP/2 by hand, as much
// as a call needs.
#pragma once

#include "common/fd.h"

#include <cstdint>
#include <string>
#include <string_view>

namespace epd::test {

// Throws RankFailure where the daemon does not play along: for processes of their own.
class RawControl {
 public:
  static UniqueFd make_unconnected();
  RawControl(UniqueFd unconnected, const std::string& socket);

  int fd() const { return socket_.get(); }
  // A call of epd.v1.Control with an empty request. Returns when it is over, whatever its answer.
  void call(const std::string& method);
  void send(std::string_view bytes) const;
  bool closed_within(double seconds) const;

 private:
  struct Frame {
    std::uint8_t type = 0;
    std::uint8_t flags = 0;
    std::uint32_t stream = 0;
  };
  Frame next_frame();
  std::string receive(std::size_t bytes);

  UniqueFd socket_;
  std::string received_;  // and not yet looked at
  std::uint32_t next_stream_ = 1;
};

}  // namespace epd::test
