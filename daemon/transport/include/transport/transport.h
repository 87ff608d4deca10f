// Messages between engines, over any carrier. The contract is in README.md;
// tests/unit/transport/transport_*.cpp hold each implementation against it.
#pragma once

#include "common/status.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace epd::transport {

// Opaque, at most kMaxAddressBytes; names one transport for as long as that lives.
using Address = std::vector<std::byte>;
// Numbers from 1. A transport uses none twice.
using PeerId = std::uint64_t;

inline constexpr std::size_t kMaxHeaderBytes = 256;
inline constexpr std::size_t kMaxAddressBytes = 1024;

struct Limits {
  std::uint64_t max_body_bytes = 1 << 20;  // of a message, in both directions
  std::uint32_t max_sends = 256;           // to one peer, accepted and not yet kSent
};

// A copy of a message's header.
class Header {
 public:
  Header() = default;
  // At most kMaxHeaderBytes.
  explicit Header(std::span<const std::byte> bytes);
  std::span<const std::byte> bytes() const { return {bytes_.data(), size_}; }

 private:
  std::uint32_t size_ = 0;
  std::array<std::byte, kMaxHeaderBytes> bytes_;
};

// A received body in the transport's memory, at any alignment. Unchanged until release(). It may travel
// between threads, but only the transport's own thread releases it.
struct Body {
  const std::byte* data = nullptr;
  std::uint64_t bytes = 0;
  std::uint64_t hold = 0;  // the transport's; 0: empty, nothing to release
};

enum class EventKind {
  kReceived,  // header, body
  kSent,      // cookie, status: OK, or ABORTED. The sender's body is not touched any more
  kFlushed,   // cookie, status, as kSent
  kDown,      // status: why. The peer's last event
};

struct Event {
  EventKind kind = EventKind::kReceived;
  PeerId peer = 0;
  std::uint64_t cookie = 0;
  Status status;
  Header header;
  Body body;
};

struct Counters {
  std::uint64_t accepted = 0;           // sends
  std::uint64_t received = 0;           // messages that became kReceived or, of a closed peer, nothing
  std::uint64_t dropped_unknown = 0;    // from somebody who is no open peer
  std::uint64_t dropped_malformed = 0;  // not of this format, or beyond the limits
};

// A description of the connection to a peer, for people.
struct Facts {
  std::string carrier;  // "UCX 1.13.1"
  std::string peer;     // the same of the other side
  std::string lanes;    // as the carrier tells it, may have several lines; empty: nothing to tell
};

// One thread owns it and makes every call, including the destructor. Only the destructor waits.
class Transport {
 public:
  virtual ~Transport() = default;

  virtual const Address& address() const = 0;
  virtual const Limits& limits() const = 0;
  // As Facts::carrier.
  virtual std::string carrier() const = 0;

  // Begins to connect; kDown tells if the peer can't be reached. INVALID_ARGUMENT: no address, or one of
  // another kind of transport, of this one, or of a peer. VERSION_MISMATCH: an address of another format.
  virtual Result<PeerId> connect(std::span<const std::byte> address) = 0;
  // Forgets the peer. After this come only a kSent or kFlushed for each send or flush. Messages that have not
  // left may still leave, or are lost. While a peer accepts nothing, bodies sent to it stay in use, until it
  // resumes or ends. The other side may get kDown, or continue to send; its messages are dropped here.
  // NOT_FOUND: no such peer.
  virtual Status close(PeerId peer) = 0;

  // The header is copied. `body` must not change until the kSent with this cookie, which comes exactly once
  // if this is OK, and never otherwise. WOULD_BLOCK: as many sends as allowed are under way, or a flush is;
  // after a kSent or kFlushed there is room. INVALID_ARGUMENT: too large. ABORTED: the peer is down, or goes
  // down. NOT_FOUND: no such peer.
  virtual Status send(PeerId peer, std::span<const std::byte> header, std::span<const std::byte> body,
                      std::uint64_t cookie) = 0;
  // kFlushed comes when all that was accepted for this peer before has left: a close does not take it back.
  // As for a send, exactly one comes if this is OK. A pending flush counts as a send, and nothing more is
  // accepted until it is complete.
  virtual Status flush(PeerId peer, std::uint64_t cookie) = 0;
  virtual void release(const Body& body) = 0;

  // Moves messages and fills in at most events.size() events. Returns how many.
  virtual std::size_t progress(std::span<Event> events) = 0;

  // To sleep: if arm() is true, poll wait_fd() for reading; if false, call progress() again first. Wake up
  // after kMaxSleepMs at the latest: libraries have missed wake-ups.
  virtual int wait_fd() const = 0;
  virtual bool arm() = 0;

  virtual Counters counters() const = 0;
  // Whether nobody can connect to this transport any more. Existing connections work. Only a new transport
  // helps.
  virtual bool deaf() const = 0;
  // NOT_FOUND: no such peer.
  virtual Result<Facts> facts(PeerId peer) const = 0;
};

inline constexpr int kMaxSleepMs = 100;

}  // namespace epd::transport
