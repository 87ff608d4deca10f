#include "relay.h"

#include <poll.h>
#include <sys/socket.h>
#include <algorithm>
#include <cerrno>

namespace epd {
namespace {

bool later() {
  return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR;
}

}  // namespace

void ByteBudget::refill(std::uint64_t now_ns) {
  const std::uint64_t earned = filled_ns_ == 0 ? 0 : (now_ns - filled_ns_) / 1000 * kPerSecond / 1'000'000;
  if (filled_ns_ != 0 && earned == 0) return;
  filled_ns_ = now_ns;
  left_ = std::min<std::uint64_t>(kBurst, left_ + earned);
}

short Relay::client_events() const {
  return static_cast<short>((up_.empty() && !up_.ended && !must_wait() ? POLLIN : 0) |
                            (down_.empty() ? 0 : POLLOUT));
}

short Relay::inner_events() const {
  return static_cast<short>((down_.empty() && !down_.ended ? POLLIN : 0) | (up_.empty() ? 0 : POLLOUT));
}

// Looks first: bytes that come with descriptors are not received, and end the connection.
Relay::Read Relay::read_client() {
  if (!up_.empty() || up_.ended || must_wait()) return Read::kOk;
  iovec part{up_.bytes.data(),
             budget_ == nullptr ? up_.bytes.size() : std::min(up_.bytes.size(), budget_->left())};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  const ssize_t seen = ::recvmsg(client_.get(), &message, MSG_DONTWAIT | MSG_PEEK);
  if (seen < 0) return later() ? Read::kOk : Read::kOver;
  if ((message.msg_flags & MSG_CTRUNC) != 0) return Read::kOver;
  up_.ended = seen == 0;
  if (seen == 0) return Read::kOk;
  const ssize_t got = ::recv(client_.get(), up_.bytes.data(), static_cast<std::size_t>(seen), MSG_DONTWAIT);
  if (got != seen) return Read::kOver;
  if (budget_ != nullptr) budget_->spend(static_cast<std::size_t>(got));
  up_.begin = 0;
  up_.end = static_cast<std::size_t>(got);
  return Read::kOk;
}

Relay::Read Relay::read_inner() {
  if (!down_.empty() || down_.ended) return Read::kOk;
  const ssize_t got = ::recv(inner_.get(), down_.bytes.data(), down_.bytes.size(), MSG_DONTWAIT);
  if (got < 0) return later() ? Read::kOk : Read::kOver;
  down_.ended = got == 0;
  down_.begin = 0;
  down_.end = static_cast<std::size_t>(got);
  return Read::kOk;
}

bool Relay::write(int socket, Direction& direction) {
  while (!direction.empty()) {
    const ssize_t sent = ::send(socket, direction.bytes.data() + direction.begin,
                                direction.end - direction.begin, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent < 0) return later();
    direction.begin += static_cast<std::size_t>(sent);
  }
  return true;
}

bool Relay::move() {
  if (read_client() == Read::kOver || !write(inner_.get(), up_)) return false;
  if (read_inner() == Read::kOver || !write(client_.get(), down_)) return false;
  if (up_.ended && up_.empty() && !told_end_) {
    ::shutdown(inner_.get(), SHUT_WR);
    told_end_ = true;
  }
  return !(down_.ended && down_.empty());
}

}  // namespace epd
