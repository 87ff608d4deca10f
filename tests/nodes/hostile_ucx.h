// Programs on the data network that are no engines: what one can find out of a real engine, a client of UCX
// that sends what it likes, and plain TCP connections.
#pragma once

#include "proto/far.h"
#include "shared.h"
#include "ucx_worker.h"

#include "common/fd.h"

#include <sys/types.h>
#include <cstdint>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace epd::test {

using Bytes = std::vector<std::byte>;

void tcp_write(const UniqueFd& fd, std::string_view bytes);

// Reads from the memory of a running engine what an attacker would have to steal.
class Spy {
 public:
  explicit Spy(pid_t engine) : engine_(engine) {}
  // Whether this process may do that.
  bool can_read() const;
  // An address of a transport by UCX that the engine knows, its own or another's.
  struct Known {
    std::uint64_t transport;
    Bytes ucx;  // UCX's own
    bool operator<(const Known& other) const { return transport < other.transport; }
  };
  std::set<Known> addresses() const;
  // The own one: that with the port on which the engine listens.
  std::optional<Known> own_address() const;
  // The latest message between ranks that the transport of this number has sent, as the engine remembers it.
  std::optional<abi::FarHeader> last_message(std::uint64_t transport) const;

 private:
  // Calls `found` with each place of these bytes and what follows them, at least `room` bytes.
  template <typename Found>
  void search(std::string_view bytes, std::size_t room, const Found& found) const;

  const pid_t engine_;
};

// In a process of its own, which has no transport. UCX's environment is that of engines.
class RawUcx {
 public:
  // Throws RankFailure.
  explicit RawUcx(std::span<const std::byte> ucx_address);
  ~RawUcx();

  // Whether UCX has taken it. Waits until the bytes are out of the sender's memory, or a second.
  bool send(unsigned id, std::span<const std::byte> header, std::span<const std::byte> body,
            std::uint32_t flags = UCP_AM_SEND_FLAG_EAGER);
  // Likewise, and does not wait: what has not gone is dropped with the client.
  bool post(unsigned id, std::span<const std::byte> header, std::span<const std::byte> body,
            std::uint32_t flags);
  void progress_for(int ms);
  bool failed() const { return failed_; }

 private:
  std::optional<transport::UcxWorker> worker_;
  ucp_ep_h endpoint_ = nullptr;
  bool failed_ = false;
};

// The bytes before an engine's header (daemon/transport/ucx_transport.h).
struct Prefix {
  std::uint32_t magic = 0x4d445045;  // "EPDM"
  std::uint16_t format = 2;
  std::uint16_t endpoints = 1;
  std::uint64_t sender = 0;
};
inline constexpr unsigned kEpdMessages = 1;  // UCX's number for them

template <typename T>
Bytes bytes_of(const T& value) {
  const auto raw = std::as_bytes(std::span(&value, 1));
  return {raw.begin(), raw.end()};
}
Bytes with_prefix(const Prefix& prefix, std::span<const std::byte> header);
// Adds the checksums that anybody can make.
Bytes sealed(abi::FarHeader header, std::span<const std::byte> body);

}  // namespace epd::test
