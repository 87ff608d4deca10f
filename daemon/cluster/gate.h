// The gate carries a connection's bytes, which are TLS, to gRPC and back, and limits what comes in. gRPC has
// the other end of a pair of sockets.
#pragma once

#include "base/clock.h"
#include "common/fd.h"

#include <cstdint>
#include <string>

namespace epd::cluster {

class Gate {
 public:
  // The most bytes before the Hello is taken: the handshake with its certificates, and a Hello of less than 2
  // KiB. gRPC can make 500 streams of them.
  static constexpr std::uint64_t kBeforeHello = 16 << 10;
  // The most bytes until the next frame of the stream is complete: gRPC itself ends the stream at 1 MiB.
  static constexpr std::uint64_t kForFrame = (1 << 20) + (64 << 10);
  // The pace of bytes to gRPC. More follow when gRPC has read the last ones and has had time to handle them:
  // each time a sixteenth more, until the connection has been silent for a while.
  static constexpr std::size_t kFirst = 1 << 10;
  static constexpr std::size_t kMost = 2 << 10;
  static constexpr std::uint64_t kPauseNs = 1'000'000;
  static constexpr std::uint64_t kSilenceNs = 20'000'000;

  enum class State {
    kWaits,   // for either end
    kPauses,  // carry() is due within kPauseNs, whatever happens
    kFlood,   // it has sent more than it may
    kEnded,
  };

  // Both are non-blocking. The connection's belongs to the caller.
  Gate(const Clock& clock, int connection, UniqueFd inner)
      : clock_(clock), connection_(connection), inner_(std::move(inner)) {}

  // Carries both directions. `frames` is the number of complete frames, and `most_bytes` the limit until the
  // next one.
  State carry(std::uint64_t frames, std::uint64_t most_bytes);
  int inner() const { return inner_.get(); }
  std::uint64_t unheard() const { return unheard_; }

 private:
  State carry_out();
  State carry_in(std::uint64_t most_bytes);
  // Keeps what could not be sent. False: something is kept, or the other end is gone.
  bool send(int to, std::string& waiting, const char* data, std::size_t size);
  bool send_waiting(int to, std::string& waiting);
  void slow_down_after_silence();
  bool may_go_on();  // whether gRPC has had its time

  const Clock& clock_;
  const int connection_;
  const UniqueFd inner_;
  std::string in_;   // for gRPC; waits
  std::string out_;  // from gRPC; waits
  bool said_all_ = false;
  bool broken_ = false;
  std::uint64_t frames_ = 0;
  std::uint64_t unheard_ = 0;  // bytes since the last frame
  std::size_t at_once_ = kFirst;
  std::size_t left_ = 0;         // of at_once_
  std::uint64_t began_ns_ = 0;   // when left_ was at_once_
  std::uint64_t silent_ns_ = 0;  // since when the connection has had nothing; 0: it has
};

}  // namespace epd::cluster
