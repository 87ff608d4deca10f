#include "relay.h"

#include "base/own_table.h"

#include <algorithm>
#include <cerrno>

namespace epd {
namespace {

constexpr int kRefillMs = 20;
constexpr int kPatienceMs = 2000;  // with a client that does not read, when gRPC has closed

bool later() {
  return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR;
}

pollfd entry_of(int fd, int events) {
  // Not polled when nothing is asked for: else a hang-up that nobody reads would wake for ever.
  return {events != 0 ? fd : -1, static_cast<short>(events), 0};
}

}  // namespace

std::size_t ByteBudget::left(std::uint64_t now_ns) {
  const std::lock_guard lock(mutex_);
  if (filled_ns_ == 0) filled_ns_ = now_ns;
  const std::uint64_t earned = (now_ns - std::min(now_ns, filled_ns_)) / 1000 * kPerSecond / 1'000'000;
  if (earned != 0) {
    filled_ns_ = now_ns;
    left_ = std::min<std::uint64_t>(kBurst, left_ + earned);
  }
  return left_;
}

// Several of the user's connections may have been told of the same bytes.
void ByteBudget::spend(std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  left_ -= std::min(left_, bytes);
}

void Relay::run() {
  while (wait() && move()) {
  }
  own_table::shut_down(at_.peer, SHUT_RDWR);
}

// False: the client takes nothing any more of what gRPC has left it.
bool Relay::wait() const {
  const bool waits = up_.has_room() && must_wait();
  pollfd entries[2] = {
      entry_of(at_.peer, (up_.has_room() && !waits ? POLLIN : 0) | (down_.empty() ? 0 : POLLOUT)),
      entry_of(at_.inner, (down_.has_room() ? POLLIN : 0) | (up_.empty() ? 0 : POLLOUT))};
  const int ready = own_table::poll(entries, 2, waits ? kRefillMs : down_.ended ? kPatienceMs : -1);
  return ready != 0 || waits;
}

long Relay::receive(int socket, void* bytes, std::size_t size, int flags, bool& descriptors) {
  iovec part{bytes, size};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  const long n = own_table::receive(socket, message, MSG_DONTWAIT | flags);
  descriptors = n >= 0 && (message.msg_flags & MSG_CTRUNC) != 0;
  return n;
}

// Looks first: bytes that come with descriptors are not received, and end the connection.
Relay::Read Relay::read_client() {
  if (!up_.has_room()) return Read::kOk;
  const std::size_t most =
      budget_ == nullptr ? up_.bytes.size() : std::min(up_.bytes.size(), budget_->left(clock_.now_ns()));
  if (most == 0) return Read::kOk;
  bool descriptors = false;
  const long seen = receive(at_.peer, up_.bytes.data(), most, MSG_PEEK, descriptors);
  if (seen < 0) return later() ? Read::kOk : Read::kOver;
  if (descriptors) return Read::kOver;
  up_.ended = seen == 0;
  if (seen == 0) return Read::kOk;
  const long got = receive(at_.peer, up_.bytes.data(), static_cast<std::size_t>(seen), 0, descriptors);
  if (got != seen) return Read::kOver;
  if (budget_ != nullptr) budget_->spend(static_cast<std::size_t>(got));
  up_.begin = 0;
  up_.end = static_cast<std::size_t>(got);
  return Read::kOk;
}

Relay::Read Relay::read_inner() {
  if (!down_.has_room()) return Read::kOk;
  bool descriptors = false;
  const long got = receive(at_.inner, down_.bytes.data(), down_.bytes.size(), 0, descriptors);
  if (got < 0) return later() ? Read::kOk : Read::kOver;
  down_.ended = got == 0;
  down_.begin = 0;
  down_.end = static_cast<std::size_t>(got);
  return Read::kOk;
}

bool Relay::write(int socket, Direction& direction) {
  while (!direction.empty()) {
    iovec part{direction.bytes.data() + direction.begin, direction.end - direction.begin};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    const long sent = own_table::send(socket, message, MSG_DONTWAIT);
    if (sent < 0) return later();
    direction.begin += static_cast<std::size_t>(sent);
  }
  return true;
}

bool Relay::move() {
  if (read_client() == Read::kOver || !write(at_.inner, up_)) return false;
  if (read_inner() == Read::kOver || !write(at_.peer, down_)) return false;
  if (up_.ended && up_.empty() && !told_end_) {
    own_table::shut_down(at_.inner, SHUT_WR);
    told_end_ = true;
  }
  return !(down_.ended && down_.empty());
}

}  // namespace epd
