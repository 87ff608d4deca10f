// Memory that a session has registered (epd_memory_register): calls that name rows there copy nothing.
#pragma once

#include "device.h"
#include "errors.h"
#include "proto/arena.h"

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

namespace epd::client {

struct Registered {
  std::uint64_t number = 0;  // in its session
  std::uintptr_t address = 0;
  std::uint64_t bytes = 0;  // 0: not registered any more
  FreedWord freed;

  bool usable() const { return bytes != 0 && !is_freed(freed); }
};

// What a group's engines know, by the numbers that row places have. With the session's mutex.
class GroupRegistered {
 public:
  GroupRegistered() = default;
  explicit GroupRegistered(std::vector<Registered> all) : all_(std::move(all)) {}

  // Where `bytes` of rows at the address lie; 0: not within one usable memory, or not on kRowPlaceAlign.
  abi::RowPlace find(const void* rows, std::uint64_t bytes) const;
  // The registration has ended.
  void forget(std::uint64_t number);

 private:
  std::vector<Registered> all_;
};

// Of a session. With its mutex.
class SessionRegistered {
 public:
  // Whether a range may be added. INVALID_ARGUMENT: it is registered, or overlaps one that is.
  // RESOURCE_EXHAUSTED: there are kMaxRegistered.
  Status check(std::uintptr_t address, std::uint64_t bytes) const;
  void add(Registered registered);
  // NOT_FOUND: no range begins there.
  Status remove(std::uintptr_t address, std::uint64_t& number);
  // Those whose memory has not been freed.
  std::vector<Registered> usable() const;
  bool has(std::uint64_t number) const;

 private:
  std::vector<Registered> all_;
  std::uint64_t last_ = 0;
};

// INVALID_ARGUMENT: no range, or it is not within one allocation that can be passed on.
Status find_range(Device& device, const void* address, std::uint64_t bytes, Registered& out);

}  // namespace epd::client
