// Owning descriptors and mappings of the segments that the daemon hands over.
#pragma once

#include "status.h"

#include <cstddef>
#include <cstdint>
#include <utility>

namespace epd::client {

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
  void reset(int fd = -1);

 private:
  int fd_ = -1;
};

enum class Access { kReadOnly, kReadWrite };

// A shared mapping of `bytes` of a memfd that can't change its size any more, so that no access
// inside it can raise SIGBUS, whatever happens to the daemon.
class Mapping {
 public:
  Mapping() = default;
  Mapping(Mapping&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  Mapping& operator=(Mapping&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~Mapping();

  // `what` names the segment in errors. Refuses files without seals or shorter than `bytes`.
  static Status map(const UniqueFd& fd, std::uint64_t bytes, Access access, const char* what, Mapping& out);

  template <typename T>
  T* as(std::uint64_t offset = 0) const {
    return reinterpret_cast<T*>(static_cast<std::byte*>(data_) + offset);
  }

 private:
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace epd::client
