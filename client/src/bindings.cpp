#include "bindings.h"

#include "proto/binding_rules.h"
#include "struct_size.h"

#include <fcntl.h>
#include <algorithm>
#include <string>

namespace epd::client {
namespace {

using abi::Region;

template <typename Ours, typename Theirs>
constexpr bool same(Ours ours, Theirs theirs) {
  return static_cast<int>(ours) == static_cast<int>(theirs);
}
static_assert(same(Region::kX, EPD_REGION_X) && same(Region::kXScales, EPD_REGION_X_SCALES) &&
              same(Region::kTopkIdx, EPD_REGION_TOPK_IDX) &&
              same(Region::kTopkWeights, EPD_REGION_TOPK_WEIGHTS) &&
              same(Region::kRecvX, EPD_REGION_RECV_X) && same(Region::kRecvScales, EPD_REGION_RECV_SCALES) &&
              same(Region::kRecvTopkIdx, EPD_REGION_RECV_TOPK_IDX) &&
              same(Region::kRecvTopkWeights, EPD_REGION_RECV_TOPK_WEIGHTS) &&
              same(Region::kRecvSrc, EPD_REGION_RECV_SRC) &&
              same(Region::kRankOffsets, EPD_REGION_RANK_OFFSETS) &&
              same(Region::kExpertCounts, EPD_REGION_EXPERT_COUNTS) &&
              same(Region::kExpertOffsets, EPD_REGION_EXPERT_OFFSETS) &&
              same(Region::kSourceRanges, EPD_REGION_SOURCE_RANGES) && same(Region::kY, EPD_REGION_Y) &&
              same(Region::kYWeights, EPD_REGION_Y_WEIGHTS) && same(Region::kBias0, EPD_REGION_BIAS_0) &&
              same(Region::kBias1, EPD_REGION_BIAS_1) && same(Region::kOut, EPD_REGION_OUT) &&
              same(Region::kOutWeights, EPD_REGION_OUT_WEIGHTS));

// `bytes` of the whole memory; 0: unknown.
std::uint32_t memory_of(int fd, std::uint64_t bytes, OwnMemory& own) {
  auto found = std::find(own.fds.begin(), own.fds.end(), fd);
  if (found == own.fds.end()) found = own.fds.insert(own.fds.end(), fd);
  const auto index = static_cast<std::size_t>(found - own.fds.begin());
  if (index < own.bindings.whole.size())
    own.bindings.whole[index] = bytes;  // more than that are refused later
  return static_cast<std::uint32_t>(index) + 1;
}

Status bound_twice(const std::string& which, std::uint32_t region) {
  return invalid_argument(which + ": " + abi::kRegionNames[region] + " is bound twice; allowed: once");
}

// The descriptor of the memory, and what is known of where the region lies there.
struct Place {
  int fd = -1;
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;  // of the allocation, 0: the daemon knows
};

Status find_place(const epd_binding_t& given, const std::string& which, Allocations& allocations,
                  Place& place) {
  if (given.address == nullptr)
    return invalid_argument(which + ".address is NULL; allowed: where slot 0's region is mapped");
  if (given.fd != EPD_FD_OF_ADDRESS) {
    place = {given.fd, given.offset, 0};
    if (given.fd >= 0 && ::fcntl(given.fd, F_GETFD) >= 0) return {};
    return bad_value((which + ".fd").c_str(), given.fd, "an open descriptor, or EPD_FD_OF_ADDRESS (-1)");
  }
  if (given.offset != 0) {
    return bad_value((which + ".offset").c_str(), static_cast<long long>(given.offset),
                     "0 with EPD_FD_OF_ADDRESS");
  }
  const auto address = reinterpret_cast<std::uintptr_t>(given.address);
  const ExportedAllocation* found = nullptr;
  Status status = allocations.find(address, found);
  if (!status.ok()) return {status.code(), which + ": " + status.message()};
  place = {found->fd.get(), address - found->begin, found->bytes};
  return {};
}

// The driver names where an allocation ends, the daemon only how long it is.
Status check_end(const std::string& which, const abi::GroupShape& shape, Region region,
                 const abi::Binding& binding, const Place& place) {
  const std::uint64_t end = abi::binding_end(shape, region, binding);
  if (place.bytes == 0 || end <= place.bytes) return {};
  return invalid_argument(which + ": " + abi::kRegionNames[static_cast<std::size_t>(region)] + " ends " +
                          std::to_string(end - place.bytes) + " bytes behind the allocation of " +
                          std::to_string(place.bytes) + " bytes in which it begins; allowed: one " +
                          "allocation, as epd_memory_alloc makes for each call");
}

Status add_binding(const epd_binding_t& given, const std::string& which, const abi::GroupShape& shape,
                   Allocations& allocations, OwnMemory& own) {
  std::uint32_t region = 0;
  Status status = read_region(given.region, (which + ".region").c_str(), region);
  if (!status.ok()) return status;
  abi::Binding& binding = own.bindings[region];
  if (binding.memory != 0) return bound_twice(which, region);
  Place place;
  status = find_place(given, which, allocations, place);
  if (!status.ok()) return status;
  const std::uint64_t bytes = abi::region_bytes(shape, static_cast<Region>(region));
  binding.memory = memory_of(place.fd, place.bytes, own);
  binding.offset = place.offset;
  binding.stride = given.stride != 0 ? given.stride : abi::align_up(bytes, abi::kBindingAlign);
  own.at[region] = reinterpret_cast<std::uintptr_t>(given.address);
  std::string wrong = abi::check_binding(shape, static_cast<Region>(region), binding);
  if (!wrong.empty()) return invalid_argument(std::move(wrong));
  return check_end(which, shape, static_cast<Region>(region), binding, place);
}

// Calls take(binding, its name in messages) for each binding.
template <typename Take>
Status each_binding(const epd_group_config_t& config, Take take) {
  if (config.num_bindings > abi::kNumRegions) {
    return bad_value("num_bindings", config.num_bindings,
                     "0 .. " + std::to_string(abi::kNumRegions) + ", one for each region");
  }
  if (config.num_bindings != 0 && config.bindings == nullptr)
    return invalid_argument("bindings is NULL and num_bindings " + std::to_string(config.num_bindings));
  const auto* next = reinterpret_cast<const std::byte*>(config.bindings);
  for (std::uint32_t i = 0; i < config.num_bindings; ++i) {
    const std::string which = "bindings[" + std::to_string(i) + "]";
    epd_binding_t given{};
    Status status = read_struct(reinterpret_cast<const epd_binding_t*>(next), which.c_str(), given);
    if (status.ok()) status = take(given, which);
    if (!status.ok()) return status;
    next += given.size;  // the caller's struct may be longer or shorter than ours
  }
  return {};
}

}  // namespace

Status read_region(const epd_region_t& given, const char* name, std::uint32_t& region) {
  region = number_in(given);
  if (region < abi::kNumRegions) return {};
  return bad_value(name, region, "0 .. " + std::to_string(abi::kNumRegions - 1));
}

Status Allocations::find(std::uintptr_t address, const ExportedAllocation*& out) {
  for (const ExportedAllocation& known : found_) {
    if (address - known.begin >= known.bytes) continue;
    out = &known;
    return {};
  }
  if (device_ == nullptr)
    return invalid_argument(
        "fd is EPD_FD_OF_ADDRESS (-1); allowed on a host device: the descriptor of a memfd");
  ExportedAllocation found;
  Status status = device_->export_allocation(address, found);
  if (!status.ok()) return status;
  out = &found_.emplace_back(std::move(found));
  return {};
}

Status read_bindings(const epd_group_config_t& config, const abi::GroupShape& shape, Allocations& allocations,
                     OwnMemory& own) {
  return each_binding(config, [&](const epd_binding_t& given, const std::string& which) {
    return add_binding(given, which, shape, allocations, own);
  });
}

Status read_bound_regions(const epd_group_config_t& config, const abi::GroupShape& shape,
                          std::uint32_t& bound) {
  return each_binding(config, [&](const epd_binding_t& given, const std::string& which) {
    std::uint32_t region = 0;
    Status status = read_region(given.region, (which + ".region").c_str(), region);
    if (!status.ok()) return status;
    const std::uint32_t bit = abi::region_bit(static_cast<Region>(region));
    if ((bound & bit) != 0) return bound_twice(which, region);
    bound |= bit;
    std::string wrong = abi::check_bound(shape, bit);
    return wrong.empty() ? Status() : invalid_argument(std::move(wrong));
  });
}

}  // namespace epd::client
