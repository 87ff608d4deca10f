// What a rank may bind to memory of its own, as one table: the daemon judges joins by it, the client library
// by the same before it sends one. Messages name the region, the value and what is allowed.
#pragma once

#include "proto/arena.h"

#include <array>
#include <string>

namespace epd::abi {

// Where rows may begin. A tensor of [depth, T, H] always fits.
inline constexpr std::uint64_t kBindingAlign = 128;
// Far above any device's memory; keeps sums below 2^64.
inline constexpr std::uint64_t kMaxBindingOffset = std::uint64_t{1} << 50;

// As in epd.h.
inline constexpr std::array<const char*, kNumRegions> kRegionNames = {"x",
                                                                      "x_scales",
                                                                      "topk_idx",
                                                                      "topk_weights",
                                                                      "recv_x",
                                                                      "recv_scales",
                                                                      "recv_topk_idx",
                                                                      "recv_topk_weights",
                                                                      "recv_src",
                                                                      "rank_offsets",
                                                                      "expert_counts",
                                                                      "expert_offsets",
                                                                      "source_ranges",
                                                                      "y",
                                                                      "y_weights",
                                                                      "bias[0]",
                                                                      "bias[1]",
                                                                      "out",
                                                                      "out_weights"};

// The end of the last slot's, as an offset in the memory.
constexpr std::uint64_t binding_end(const GroupShape& s, Region region, const Binding& binding) {
  return binding.offset + (s.depth - 1) * binding.stride + region_bytes(s, region);
}

namespace detail {

inline std::string check_place(const std::string& what, std::uint64_t value, std::uint64_t low) {
  if (value >= low && value <= kMaxBindingOffset && value % kBindingAlign == 0) return "";
  return what + " is " + std::to_string(value) + "; allowed: multiples of " + std::to_string(kBindingAlign) +
         ", " + std::to_string(low) + " .. 2^50";
}

}  // namespace detail

// "" or what is wrong: of regions (region_bit), whether the group has them. The shape has passed check_shape.
inline std::string check_bound(const GroupShape& s, std::uint32_t bound) {
  for (std::size_t i = 0; i < kNumRegions; ++i) {
    if ((bound >> i & 1) != 0 && region_bytes(s, static_cast<Region>(i)) == 0)
      return std::string("binding of ") + kRegionNames[i] + ": this group has no such region";
  }
  return "";
}

// "" or what is wrong. The shape has passed check_shape.
inline std::string check_binding(const GroupShape& s, Region region, const Binding& binding) {
  const std::string name = std::string("binding of ") + kRegionNames[static_cast<std::size_t>(region)];
  if (binding.reserved != 0)
    return name + ": reserved is " + std::to_string(binding.reserved) + "; allowed: 0";
  std::string wrong = check_bound(s, region_bit(region));
  if (!wrong.empty()) return wrong;
  const std::uint64_t bytes = region_bytes(s, region);
  wrong = detail::check_place(name + ": offset", binding.offset, 0);
  if (wrong.empty() && s.depth > 1)
    wrong = detail::check_place(name + ": stride", binding.stride, align_up(bytes, kBindingAlign));
  if (wrong.empty() && s.depth == 1) wrong = detail::check_place(name + ": stride", binding.stride, 0);
  return wrong;
}

// How much of memory `index` (from 1) the bindings reach.
inline std::uint64_t used_bytes(const GroupShape& s, const Bindings& bindings, std::uint32_t index) {
  std::uint64_t end = 0;
  for (std::size_t i = 0; i < kNumRegions; ++i) {
    if (bindings[i].memory != index) continue;
    const std::uint64_t own = binding_end(s, static_cast<Region>(i), bindings[i]);
    end = own > end ? own : end;
  }
  return end;
}

// "" or what is wrong with the sizes that the client says.
inline std::string check_whole(const GroupShape& s, const Bindings& bindings, std::size_t num_memories) {
  for (std::size_t i = 0; i < kMaxMemories; ++i) {
    const std::uint64_t whole = bindings.whole[i];
    if (whole == 0) continue;
    const std::string what = "descriptor " + std::to_string(i + 1) + ": the memory has " +
                             std::to_string(whole) + " bytes; allowed: 0";
    if (i >= num_memories) return what + ", as it did not come";
    const std::uint64_t used = used_bytes(s, bindings, static_cast<std::uint32_t>(i + 1));
    if (whole < used || whole > 2 * kMaxBindingOffset)
      return what + " (unknown), " + std::to_string(used) + " (used) .. 2^51";
  }
  return "";
}

// Of all regions, with as many descriptors of memory as came with them.
inline std::string check_bindings(const GroupShape& s, const Bindings& bindings, std::size_t num_memories) {
  std::uint32_t used = 0;
  for (std::size_t i = 0; i < kNumRegions; ++i) {
    const Binding& binding = bindings[i];
    if (binding.memory > num_memories) {
      return std::string("binding of ") + kRegionNames[i] + ": memory is " + std::to_string(binding.memory) +
             "; allowed: 0 (the arena) .. " + std::to_string(num_memories) + ", the descriptors that came";
    }
    if (binding.memory == 0) {
      if (binding.offset == 0 && binding.stride == 0 && binding.reserved == 0) continue;
      return std::string("binding of ") + kRegionNames[i] + ": memory is 0 with a place; allowed: neither";
    }
    used |= 1u << (binding.memory - 1);
    std::string wrong = check_binding(s, static_cast<Region>(i), binding);
    if (!wrong.empty()) return wrong;
  }
  for (std::size_t i = 0; i < num_memories; ++i) {
    if ((used >> i & 1) == 0)
      return "descriptor " + std::to_string(i + 1) + " of " + std::to_string(num_memories) +
             " is not bound to a region; allowed: those that bindings name";
  }
  return check_whole(s, bindings, num_memories);
}

// "the memory that recv_x, y is bound to": memory `index` (from 1) in messages.
inline std::string memory_title(const Bindings& bindings, std::uint32_t index) {
  std::string names;
  for (std::size_t i = 0; i < kNumRegions; ++i) {
    if (bindings[i].memory == index) names += (names.empty() ? "" : ", ") + std::string(kRegionNames[i]);
  }
  if (!names.empty()) return "the memory that " + names + " is bound to";
  return "descriptor " + std::to_string(index);
}

// How much of memory `index` (from 1) must be mapped. The bindings have passed check_bindings.
inline std::uint64_t memory_bytes(const GroupShape& s, const Bindings& bindings, std::uint32_t index) {
  const std::uint64_t whole = bindings.whole[index - 1];
  return whole != 0 ? whole : used_bytes(s, bindings, index);
}

}  // namespace epd::abi
