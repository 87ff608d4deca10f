#include "relay.h"

#include "base/own_table.h"

#include <algorithm>
#include <cerrno>
#include <utility>

namespace epd::control {
namespace {

constexpr int kRefillMs = 20;
constexpr int kPatienceMs = 2000;  // for a client that does not read, when gRPC has closed

bool later() {
  return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR;
}

pollfd entry_of(int fd, int events) {
  // Not polled when no event is wanted. Otherwise a hang-up that is not read would wake the thread for ever.
  return {events != 0 ? fd : -1, static_cast<short>(events), 0};
}

}  // namespace

RelayBudget::Left RelayBudget::left(std::uint64_t now_ns) {
  const std::lock_guard lock(mutex_);
  if (filled_ns_ == 0) filled_ns_ = now_ns;
  const double seconds = static_cast<double>(now_ns - std::min(now_ns, filled_ns_)) / 1e9;
  filled_ns_ = std::max(now_ns, filled_ns_);
  bytes_ = std::min<double>(kBurst, bytes_ + seconds * kPerSecond);
  streams_ = std::min<double>(kStreamBurst, streams_ + seconds * kStreamsPerSecond);
  return {static_cast<std::size_t>(bytes_), static_cast<std::size_t>(streams_)};
}

bool RelayBudget::full(std::uint64_t now_ns) {
  const Left now = left(now_ns);
  return now.bytes == kBurst && now.streams == kStreamBurst;
}

// Several connections of the user may have been told of the same streams.
void RelayBudget::spend(std::size_t bytes, std::size_t streams) {
  const std::lock_guard lock(mutex_);
  bytes_ = std::max(0.0, bytes_ - static_cast<double>(bytes));
  streams_ = std::max(0.0, streams_ - static_cast<double>(streams));
}

std::size_t StreamFinder::pass(const char* bytes, std::size_t size, std::size_t most, std::size_t& begun) {
  constexpr unsigned char kHeaders = 1;
  begun = 0;
  for (std::size_t i = 0; i < size;) {
    if (skip_ != 0) {
      const std::size_t skipped = std::min(skip_, size - i);
      skip_ -= skipped;
      i += skipped;
      continue;
    }
    const auto byte = static_cast<unsigned char>(bytes[i]);
    const bool begins = head_bytes_ == kTypeAt && byte == kHeaders;
    if (begins && begun == most) return i;
    begun += begins ? 1 : 0;
    if (head_bytes_ < kTypeAt) length_ = length_ << 8 | byte;
    ++i;
    if (++head_bytes_ < kHeadBytes) continue;
    skip_ = std::exchange(length_, 0);
    head_bytes_ = 0;
  }
  return size;
}

bool Relay::must_wait() const {
  if (budget_ == nullptr) return false;
  const RelayBudget::Left left = budget_->left(clock_.now_ns());
  return left.bytes == 0 || (begins_stream_ && left.streams == 0);
}

void Relay::run() {
  while (wait() && move()) {
  }
  own_table::shut_down(at_.peer, SHUT_RDWR);
}

// False: the client has ended, or does not read what gRPC has left for it.
bool Relay::wait() const {
  const bool waits = up_.has_room() && must_wait();
  pollfd entries[2] = {
      {at_.peer, static_cast<short>((up_.has_room() && !waits ? POLLIN : 0) | (down_.empty() ? 0 : POLLOUT)),
       0},
      entry_of(at_.inner, (down_.has_room() ? POLLIN : 0) | (up_.empty() ? 0 : POLLOUT))};
  const int ready = own_table::poll(entries, 2, waits ? kRefillMs : down_.ended ? kPatienceMs : -1);
  if ((entries[0].revents & (POLLHUP | POLLERR)) != 0) return false;  // no answer can be read any more
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

// Looks before it receives: bytes with descriptors are not received, and end the connection.
Relay::Read Relay::read_client() {
  if (!up_.has_room()) return Read::kOk;
  RelayBudget::Left left{up_.bytes.size(), 0};
  if (budget_ != nullptr) left = budget_->left(clock_.now_ns());
  const std::size_t most = std::min(up_.bytes.size(), left.bytes);
  if (most == 0) return Read::kOk;
  bool descriptors = false;
  const long seen = receive(at_.peer, up_.bytes.data(), most, MSG_PEEK, descriptors);
  if (seen < 0) return later() ? Read::kOk : Read::kOver;
  if (descriptors) return Read::kOver;
  up_.ended = seen == 0;
  if (seen == 0) return Read::kOk;
  auto passes = static_cast<std::size_t>(seen);
  std::size_t streams = 0;
  if (budget_ != nullptr) passes = finder_.pass(up_.bytes.data(), passes, left.streams, streams);
  begins_stream_ = passes < static_cast<std::size_t>(seen);
  if (passes == 0) return Read::kOk;
  const long got = receive(at_.peer, up_.bytes.data(), passes, 0, descriptors);
  if (got != static_cast<long>(passes)) return Read::kOver;
  if (budget_ != nullptr) budget_->spend(passes, streams);
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

}  // namespace epd::control
