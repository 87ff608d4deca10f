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
  std::uintptr_t address = 0;
  std::uint64_t bytes = 0;  // 0: none
  std::shared_ptr<const ExportedAllocation> allocation;

  bool usable() const { return bytes != 0 && !allocation->is_freed(); }
};

// What a group's engines know, by the numbers that row places have. With the session's mutex.
class GroupRegistered {
 public:
  GroupRegistered() = default;
  explicit GroupRegistered(std::vector<Registered> all) : all_(std::move(all)) {}

  // Where `bytes` of rows at the address lie; 0: not within one usable memory, or not on kRowPlaceAlign.
  abi::RowPlace find(const void* rows, std::uint64_t bytes) const;
  // The registration has ended.
  void forget(const ExportedAllocation* allocation, std::uintptr_t address);

 private:
  std::vector<Registered> all_;
};

// Of a session. With its mutex.
class SessionRegistered {
 public:
  // Whether a range may be added. INVALID_ARGUMENT: it is registered, or overlaps one that is.
  // RESOURCE_EXHAUSTED: there are kMaxRegistered.
  Status check(std::uintptr_t address, std::uint64_t bytes) const;
  void add(Registered registered) { all_.push_back(std::move(registered)); }
  // NOT_FOUND: no range begins there.
  Status remove(std::uintptr_t address, Registered& removed);
  // Those whose memory has not been freed.
  std::vector<Registered> usable() const;
  bool has(const Registered& registered) const;

 private:
  std::vector<Registered> all_;
};

// INVALID_ARGUMENT: no range, or it is not within one allocation that can be passed on.
Status find_range(Device& device, const void* address, std::uint64_t bytes, Registered& out);

}  // namespace epd::client
