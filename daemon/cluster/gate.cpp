#include "gate.h"

#include <linux/sockios.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>

namespace epd::cluster {
namespace {

constexpr std::size_t kBufferBytes = 16 << 10;

}  // namespace

Gate::State Gate::carry(std::uint64_t frames, std::uint64_t most_bytes) {
  if (std::exchange(frames_, frames) != frames) unheard_ = 0;
  const State out = carry_out();
  return out == State::kEnded ? out : carry_in(most_bytes);
}

bool Gate::send(int to, std::string& waiting, const char* data, std::size_t size) {
  while (size > 0) {
    const ssize_t n = ::send(to, data, size, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) {
      broken_ = errno != EAGAIN;
      waiting.assign(data, size);
      return false;
    }
    data += n;
    size -= static_cast<std::size_t>(n);
  }
  waiting = {};
  return true;
}

bool Gate::send_waiting(int to, std::string& waiting) {
  if (waiting.empty()) return true;
  const std::string bytes = std::exchange(waiting, {});
  return send(to, waiting, bytes.data(), bytes.size());
}

Gate::State Gate::carry_out() {
  std::array<char, kBufferBytes> bytes;
  bool sent = send_waiting(connection_, out_);
  while (sent) {
    const ssize_t n = ::recv(inner_.get(), bytes.data(), bytes.size(), MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) return State::kWaits;
    if (n <= 0) return State::kEnded;
    sent = send(connection_, out_, bytes.data(), static_cast<std::size_t>(n));
  }
  return broken_ ? State::kEnded : State::kWaits;
}

Gate::State Gate::carry_in(std::uint64_t most_bytes) {
  std::array<char, kBufferBytes> bytes;
  bool sent = send_waiting(inner_.get(), in_);
  slow_down_after_silence();
  while (sent && !said_all_) {
    if (left_ == 0 && !may_go_on()) return State::kPauses;
    const ssize_t n = ::recv(connection_, bytes.data(), std::min(left_, bytes.size()), MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno != EAGAIN) return State::kEnded;
    if (n < 0) {
      if (silent_ns_ == 0) silent_ns_ = clock_.now_ns();
      return State::kWaits;
    }
    silent_ns_ = 0;
    said_all_ = n == 0;
    if (said_all_) ::shutdown(inner_.get(), SHUT_WR);
    unheard_ += static_cast<std::uint64_t>(n);
    if (unheard_ > most_bytes) return State::kFlood;
    left_ -= static_cast<std::size_t>(n);
    sent = send(inner_.get(), in_, bytes.data(), static_cast<std::size_t>(n));
  }
  return broken_ ? State::kEnded : State::kWaits;
}

// Time in which gRPC was slow does not count as silence: an honest node that sends much would be slowed down.
void Gate::slow_down_after_silence() {
  if (silent_ns_ == 0 || clock_.now_ns() < silent_ns_ + kSilenceNs) return;
  at_once_ = kFirst;
  left_ = std::min(left_, kFirst);
}

bool Gate::may_go_on() {
  int unread = 0;
  const std::uint64_t now = clock_.now_ns();
  if (now < began_ns_ + kPauseNs || ::ioctl(inner_.get(), SIOCOUTQ, &unread) != 0 || unread != 0)
    return false;
  at_once_ = std::min(at_once_ + at_once_ / 16, kMost);
  began_ns_ = now;
  left_ = at_once_;
  return true;
}

}  // namespace epd::cluster
