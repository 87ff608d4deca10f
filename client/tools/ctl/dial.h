// A connection to a unix socket that streams.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <utility>

namespace epd::ctl {

// Owns a descriptor; -1 is none.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() { reset(); }
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    if (this != &other) reset(std::exchange(other.fd_, -1));
    return *this;
  }
  int get() const { return fd_; }
  int release() { return std::exchange(fd_, -1); }
  void reset(int fd = -1);

 private:
  int fd_ = -1;
};

struct Dialled {
  Descriptor fd;  // blocks; none if `error` is not 0
  int error = 0;  // an errno; EAGAIN: the listener's queue was full until the deadline
};

// Waits for a place in the listener's queue until the deadline.
Dialled dial(const std::string& path, std::chrono::steady_clock::time_point deadline);

// Whether the other side has closed the connection. Reads no data.
bool has_ended(const Descriptor& connection);

// The process that listens behind a connection, as a pidfd. `own_pid` is the number that it tells as its own,
// which may be of another namespace. None: it is another process, or not seen from here.
Descriptor listening_process(const Descriptor& connection, std::int32_t own_pid);

// The number of the process that listens behind a connection, if it is stopped by a signal or a debugger;
// else 0.
std::int32_t stopped_listener(const Descriptor& connection);

// Whether the process of a pidfd ends until the deadline.
bool wait_for_exit(const Descriptor& process, std::chrono::steady_clock::time_point deadline);

}  // namespace epd::ctl
