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

std::uint32_t memory_of(int fd, std::vector<int>& fds) {
  auto found = std::find(fds.begin(), fds.end(), fd);
  if (found == fds.end()) found = fds.insert(fds.end(), fd);
  return static_cast<std::uint32_t>(found - fds.begin()) + 1;
}

Status bound_twice(const std::string& which, std::uint32_t region) {
  return invalid_argument(which + ": " + abi::kRegionNames[region] + " is bound twice; allowed: once");
}

Status add_binding(const epd_binding_t& given, const std::string& which, const abi::GroupShape& shape,
                   OwnMemory& own) {
  std::uint32_t region = 0;
  Status status = read_region(given.region, (which + ".region").c_str(), region);
  if (!status.ok()) return status;
  abi::Binding& binding = own.bindings[region];
  if (binding.memory != 0) return bound_twice(which, region);
  if (given.fd < 0 || ::fcntl(given.fd, F_GETFD) < 0)
    return bad_value((which + ".fd").c_str(), given.fd, "an open descriptor");
  if (given.address == nullptr)
    return invalid_argument(which + ".address is NULL; allowed: where slot 0's region is mapped");
  const std::uint64_t bytes = abi::region_bytes(shape, static_cast<Region>(region));
  binding.memory = memory_of(given.fd, own.fds);
  binding.offset = given.offset;
  binding.stride = given.stride != 0 ? given.stride : abi::align_up(bytes, abi::kBindingAlign);
  own.at[region] = reinterpret_cast<std::uintptr_t>(given.address);
  std::string wrong = abi::check_binding(shape, static_cast<Region>(region), binding);
  return wrong.empty() ? Status() : invalid_argument(std::move(wrong));
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

Status read_bindings(const epd_group_config_t& config, const abi::GroupShape& shape, OwnMemory& own) {
  return each_binding(config, [&](const epd_binding_t& given, const std::string& which) {
    return add_binding(given, which, shape, own);
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
