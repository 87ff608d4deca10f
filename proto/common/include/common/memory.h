// Shared memory: sealed memfds and their mappings (mapped by Boost.Interprocess).
#pragma once

#include "common/fd.h"
#include "common/status.h"

#include <boost/interprocess/mapped_region.hpp>

#include <cstddef>
#include <cstdint>

namespace epd {

// Zero-filled, exactly `bytes` long, sealed against shrinking, growing and further seals. Mode 0.
Result<UniqueFd> make_sealed_memfd(const char* name, std::uint64_t bytes);
// The same file through a description that can't be mapped writable.
Result<UniqueFd> reopen_read_only(int memfd);
// Size of the file, if it is sealed against shrinking and growing: no access inside it can raise SIGBUS.
Result<std::uint64_t> sealed_size(int memfd);

enum class Access { kReadOnly, kReadWrite };

// A shared mapping of a file's first bytes; unmapped by the destructor. The descriptor may be closed
// meanwhile.
class Mapping {
 public:
  Mapping() = default;
  static Result<Mapping> map(int fd, std::uint64_t bytes, Access access);

  void* data() const { return region_.get_address(); }
  std::byte* bytes() const { return static_cast<std::byte*>(data()); }
  std::uint64_t size() const { return region_.get_size(); }
  // Maps another file in its place, at the same address. Failed: nothing has changed.
  Status map_over(int fd, Access access);
  // Unmaps so many bytes from the end. False: all, or the system does not do it.
  bool shrink_by(std::uint64_t bytes);
  bool valid() const { return region_.get_size() != 0; }
  template <typename T>
  T* as(std::uint64_t offset = 0) const {
    return reinterpret_cast<T*>(bytes() + offset);
  }

 private:
  boost::interprocess::mapped_region region_;
};

}  // namespace epd
