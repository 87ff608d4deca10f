#include "registered.h"

#include <algorithm>
#include <string>
#include <utility>

namespace epd::client {
namespace {

std::string range_of(const Registered& registered) {
  return std::to_string(registered.bytes) + " bytes at " + hex(registered.address);
}

}  // namespace

abi::RowPlace GroupRegistered::find(const void* rows, std::uint64_t bytes) const {
  const auto address = reinterpret_cast<std::uintptr_t>(rows);
  for (std::size_t i = 0; i < all_.size(); ++i) {
    const Registered& registered = all_[i];
    const std::uint64_t offset = address - registered.address;
    if (address < registered.address || offset > registered.bytes || bytes > registered.bytes - offset)
      continue;
    if (offset % abi::kRowPlaceAlign != 0 || !registered.usable()) return 0;
    return abi::row_place(static_cast<std::uint32_t>(i), offset);
  }
  return 0;
}

void GroupRegistered::forget(std::uint64_t number) {
  for (Registered& registered : all_) {
    if (registered.number == number) registered.bytes = 0;  // the others keep their places
  }
}

Status SessionRegistered::check(std::uintptr_t address, std::uint64_t bytes) const {
  const auto there = std::find_if(all_.begin(), all_.end(), [&](const Registered& known) {
    return known.usable() && address < known.address + known.bytes && known.address < address + bytes;
  });
  if (there != all_.end())
    return invalid_argument("the range overlaps " + range_of(*there) +
                            ", which are registered; allowed: each byte once");
  const std::vector<Registered> known = usable();
  if (known.size() < abi::kMaxRegistered) return {};
  return {StatusCode::kResourceExhausted,
          std::to_string(known.size()) +
              " ranges are registered in this session; allowed: " + std::to_string(abi::kMaxRegistered)};
}

void SessionRegistered::add(Registered registered) {
  std::erase_if(all_, [](const Registered& known) { return !known.usable(); });
  registered.number = ++last_;
  all_.push_back(std::move(registered));
}

Status SessionRegistered::remove(std::uintptr_t address, std::uint64_t& number) {
  const auto found = std::find_if(all_.begin(), all_.end(), [address](const Registered& known) {
    return known.address == address && known.usable();
  });
  if (found == all_.end()) {
    return {StatusCode::kNotFound,
            "address is " + hex(address) + ", where no registered range of this session begins"};
  }
  number = found->number;
  all_.erase(found);
  return {};
}

std::vector<Registered> SessionRegistered::usable() const {
  std::vector<Registered> found;
  std::copy_if(all_.begin(), all_.end(), std::back_inserter(found),
               [](const Registered& known) { return known.usable(); });
  return found;
}

bool SessionRegistered::has(std::uint64_t number) const {
  return std::any_of(all_.begin(), all_.end(),
                     [number](const Registered& known) { return known.number == number; });
}

Status find_range(Device& device, const void* address, std::uint64_t bytes, Registered& out) {
  const auto begin = reinterpret_cast<std::uintptr_t>(address);
  if (begin == 0 || begin % abi::kRowPlaceAlign != 0)
    return invalid_argument("address is " + hex(begin) + "; allowed: a multiple of " +
                            std::to_string(abi::kRowPlaceAlign) + ", not 0");
  if (bytes == 0) return bad_value("bytes", 0, "1 or more");
  ExportedAllocation allocation;  // each join exports it again: a descriptor would keep memory that is freed
  Status status = device.export_allocation(begin, allocation);
  if (!status.ok()) return status;
  const std::uint64_t behind = allocation.bytes - (begin - allocation.begin);
  if (bytes > behind)
    return invalid_argument("bytes is " + std::to_string(bytes) + "; allowed: 1 .. " +
                            std::to_string(behind) + ", up to the end of the allocation");
  out = {0, begin, bytes, std::move(allocation.freed)};
  return {};
}

}  // namespace epd::client
