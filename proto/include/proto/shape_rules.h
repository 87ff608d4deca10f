// The allowed values of a GroupShape, as one table: the daemon judges joins by it, the client library by the
// same before it sends one. Messages name the field, the value and what is allowed.
#pragma once

#include "proto/shape.h"

#include <algorithm>
#include <array>
#include <bit>
#include <iterator>
#include <string>
#include <string_view>

namespace epd::abi {

struct ShapeField {
  const char* name;    // as in epd.h
  std::uint32_t word;  // of GroupShape
  std::uint32_t low;
  std::uint32_t high;
  std::uint32_t multiple;  // of which it must be one

  constexpr std::uint32_t value(const GroupShape& shape) const {
    return std::bit_cast<std::array<std::uint32_t, sizeof(GroupShape) / sizeof(std::uint32_t)>>(shape)[word];
  }
};

// Every field; ranks that differ in one can't form a group.
inline constexpr ShapeField kShapeFields[] = {
    // [fields.py: kShapeFields]
    {"num_ranks", 0, 1, kMaxRanks, 1},
    {"num_experts", 1, 1, kMaxExperts, 1},
    {"max_tokens", 2, 1, kMaxTokens, 1},
    {"hidden", 3, kHiddenMultiple, kMaxHidden, kHiddenMultiple},
    {"topk", 4, 1, kMaxTopk, 1},
    {"depth", 5, 1, kMaxDepth, 1},
    {"payload", 6, 0, 3, 1},
    {"index_type", 7, 0, 1, 1},
    {"policy", 8, 0, 2, 1},
    {"layout", 9, 0, 2, 1},
    {"scale_format", 10, 0, 2, 1},
    {"expert_alignment", 11, 1, kMaxAlignment, 1},
    {"opaque_bytes", 12, 0, kMaxOpaqueBytes, kOpaqueMultiple},
    {"num_biases", 13, 0, kMaxBiases, 1},
    {"num_handles", 14, 0, kMaxHandles, 1},
    {"max_recv_rows", 15, 0, kMaxRecvRows, 1},
    {"sum_ranks", 16, 0, kMaxRanks, 1},
    {"span", 17, 0, 1, 1},
    {"scale_layout", 18, 0, 1, 1},
    {"range_format", 19, 0, 1, 1},
    {"num_more_formats", 20, 0, kMaxMoreFormats, 1},
    {"more_formats[0].payload", 21, 0, 2, 1},
    {"more_formats[0].scale_format", 22, 0, 2, 1},
    {"more_formats[1].payload", 23, 0, 2, 1},
    {"more_formats[1].scale_format", 24, 0, 2, 1},
    {"more_formats[2].payload", 25, 0, 2, 1},
    {"more_formats[2].scale_format", 26, 0, 2, 1},
    {"shared_regions", 27, 0, 1, 1},
    // [end]
};
static_assert(sizeof(GroupShape) == std::size(kShapeFields) * sizeof(std::uint32_t));
// Within these limits recv_rows() never passes kMaxRecvRows: R * min(K, E/R) <= E.
static_assert(std::uint64_t{kMaxExperts} * kMaxTokens + std::uint64_t{kMaxExperts} * (kMaxAlignment - 1) <=
              kMaxRecvRows);

// "1 .. 1024", "multiples of 8, 8 .. 16384"
inline std::string allowed_values(const ShapeField& field) {
  const std::string range = std::to_string(field.low) + " .. " + std::to_string(field.high);
  return field.multiple == 1 ? range : "multiples of " + std::to_string(field.multiple) + ", " + range;
}
// `name` is one of the table.
inline const ShapeField& shape_field(std::string_view name) {
  return *std::find_if(std::begin(kShapeFields), std::end(kShapeFields),
                       [&](const ShapeField& field) { return name == field.name; });
}

namespace detail {

inline std::string bad_field(const char* name, std::uint32_t value, const std::string& allowed) {
  return std::string(name) + " is " + std::to_string(value) + "; allowed: " + allowed;
}

inline std::string check_field(const ShapeField& field, std::uint32_t value) {
  if (value >= field.low && value <= field.high && value % field.multiple == 0) return "";
  return bad_field(field.name, value, allowed_values(field));
}

// `prefix`: of the names of the format's fields.
inline std::string check_scales(const RowFormat& format, const std::string& prefix) {
  const bool fp8 = format.payload == Payload::kFp8Cast || format.payload == Payload::kFp8;
  const std::string name = prefix + "scale_format";
  if (format.scale_format != ScaleFormat::kFloat32 && !fp8)
    return bad_field(name.c_str(), static_cast<std::uint32_t>(format.scale_format),
                     "0 unless payload is 1 (fp8 cast) or 2 (fp8)");
  if (format.scale_format == ScaleFormat::kFloat32Pow2 && format.payload != Payload::kFp8Cast)
    return bad_field(name.c_str(), 1, "0 (float32) and 2 (ue8m0) with payload 2 (fp8): scales are as given");
  return "";
}

// Those beyond the first.
inline std::string check_more_formats(const GroupShape& s) {
  if (s.payload == Payload::kOpaque && s.num_more_formats != 0)
    return bad_field("num_more_formats", s.num_more_formats, "0 with payload 3 (opaque)");
  for (std::uint32_t i = 0; i < kMaxMoreFormats; ++i) {
    const RowFormat& more = s.more_formats[i];
    const std::string prefix = "more_formats[" + std::to_string(i) + "].";
    const std::string payload = prefix + "payload";
    const auto number = static_cast<std::uint32_t>(more.payload);
    if (i >= s.num_more_formats) {
      if (more == RowFormat{}) continue;
      return bad_field((number != 0 ? payload : prefix + "scale_format").c_str(),
                       number != 0 ? number : static_cast<std::uint32_t>(more.scale_format),
                       "0, since num_more_formats is " + std::to_string(s.num_more_formats));
    }
    std::string wrong = check_scales(more, prefix);
    if (!wrong.empty()) return wrong;
    for (std::uint32_t before = 0; before <= i; ++before) {
      if (s.format(before) != more) continue;
      return bad_field(payload.c_str(), number,
                       "another payload or scale_format than " +
                           (before == 0 ? "the group's own"
                                        : "those of more_formats[" + std::to_string(before - 1) + "]"));
    }
  }
  return "";
}

// Checks fields that depend on each other; each by itself is within its limits.
inline std::string check_together(const GroupShape& s) {
  if (s.num_experts % s.num_ranks != 0)
    return bad_field("num_experts", s.num_experts,
                     "multiples of num_ranks, which is " + std::to_string(s.num_ranks));
  const bool opaque = s.payload == Payload::kOpaque;
  if (opaque != (s.opaque_bytes != 0))
    return bad_field("opaque_bytes", s.opaque_bytes,
                     opaque ? "16 .. " + std::to_string(kMaxOpaqueBytes) + " with payload 3 (opaque)"
                            : "0 unless payload is 3 (opaque)");
  std::string wrong = check_scales(s.format(0), "");
  if (wrong.empty()) wrong = check_more_formats(s);
  if (!wrong.empty()) return wrong;
  if (s.scale_layout != ScaleLayout::kRowMajor && !s.has_scales())
    return bad_field("scale_layout", static_cast<std::uint32_t>(s.scale_layout),
                     "0 unless payload is 1 (fp8 cast) or 2 (fp8)");
  if (s.range_format != RangeFormat::kRows && !s.per_expert())
    return bad_field("range_format", static_cast<std::uint32_t>(s.range_format),
                     "0 unless layout is 1 (packed) or 2 (expert)");
  GroupShape worst = s;
  worst.max_recv_rows = 0;
  const std::uint64_t rows = s.layout == Layout::kExpert ? worst.expert_capacity() : worst.recv_rows();
  if (s.max_recv_rows > rows)
    return bad_field("max_recv_rows", s.max_recv_rows, "0 .. " + std::to_string(rows) + ", the worst case");
  if (s.sum_ranks > s.num_ranks)
    return bad_field("sum_ranks", s.sum_ranks,
                     "1 .. num_ranks, which is " + std::to_string(s.num_ranks) + ", or 0 (the default)");
  return "";
}

}  // namespace detail

// "" or what is wrong. Nothing in abi:: may be asked about a shape that has not passed.
inline std::string check_shape(const GroupShape& shape) {
  for (const ShapeField& field : kShapeFields) {
    std::string wrong = detail::check_field(field, field.value(shape));
    if (!wrong.empty()) return wrong;
  }
  return detail::check_together(shape);
}

// The first field that differs, or null.
inline const ShapeField* first_difference(const GroupShape& a, const GroupShape& b) {
  for (const ShapeField& field : kShapeFields) {
    if (field.value(a) != field.value(b)) return &field;
  }
  return nullptr;
}

}  // namespace epd::abi
