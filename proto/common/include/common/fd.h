// Descriptors: owned, duplicated, made, rung.
#pragma once

#include "common/status.h"

#include <utility>

namespace epd {

class UniqueFd {
 public:
  UniqueFd() = default;
  explicit UniqueFd(int fd) : fd_(fd) {}
  UniqueFd(UniqueFd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept {
    if (this != &other) reset(std::exchange(other.fd_, -1));
    return *this;
  }
  ~UniqueFd() { reset(); }

  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }
  int release() { return std::exchange(fd_, -1); }
  void reset(int fd = -1);

 private:
  int fd_ = -1;
};

// A second descriptor of the same open file, close-on-exec.
Result<UniqueFd> duplicate(int fd);
// Non-blocking eventfd, close-on-exec.
Result<UniqueFd> make_eventfd();
// Adds one to an eventfd; never blocks and ignores a full counter.
void ring_eventfd(int fd);
// Sends one byte; never blocks and ignores a full queue.
void ring_socket(int fd);
// Connected SOCK_SEQPACKET pair, close-on-exec.
Result<std::pair<UniqueFd, UniqueFd>> make_socketpair();

}  // namespace epd
