// The stores of a dispatch for one row at one destination, by whichever way the row came there. Internal.
#pragma once

#include "host/row_kernels.h"

#include <algorithm>
#include <cstring>
#include <span>
#include <vector>

namespace epd::kernels::host {

// One row of one token, and its place.
struct Delivery {
  const DispatchTarget* target;
  std::size_t row;
  std::uint32_t rank;
  std::uint32_t expert;  // per-expert plans only
};

// Layout compact: a row for a rank gets the choices of that rank's experts, in its own numbering of experts.
template <typename Index>
void store_choices(const Delivery& to, std::span<const std::int32_t> choices, const float* weights,
                   std::uint32_t experts_per_rank) {
  const std::size_t first = to.row * choices.size();
  auto* indices = static_cast<Index*>(to.target->recv_topk_idx) + first;
  float* recv_weights = to.target->recv_topk_weights + first;
  const std::uint32_t first_expert = to.rank * experts_per_rank;
  for (std::size_t k = 0; k < choices.size(); ++k) {
    const std::uint32_t local = static_cast<std::uint32_t>(choices[k]) - first_expert;
    const bool here = local < experts_per_rank;
    indices[k] = here ? static_cast<Index>(local) : Index{-1};
    recv_weights[k] = here && weights != nullptr ? weights[k] : 0.0f;
  }
}

// Packed, expert: a row for an expert gets that expert.
template <typename Index>
void store_expert(const Delivery& to, float weight, std::uint32_t experts_per_rank) {
  static_cast<Index*>(to.target->recv_topk_idx)[to.row] =
      static_cast<Index>(to.expert - to.rank * experts_per_rank);
  to.target->recv_topk_weights[to.row] = weight;
}

inline void store_source(const Delivery& to, std::uint32_t source, std::uint32_t token) {
  to.target->recv_src[2 * to.row] = static_cast<std::int32_t>(source);
  to.target->recv_src[2 * to.row + 1] = static_cast<std::int32_t>(token);
}

inline void store_scales(std::span<const Delivery> deliveries, const void* scales, const RowFormat& format) {
  const std::size_t whole = format.scale_pitch == 0 ? format.scale_bytes : 4;
  for (const Delivery& to : deliveries) {
    char* at = static_cast<char*>(to.target->recv_scales) + format.scale_word(to.row) * 4;
    for (std::size_t byte = 0; byte < format.scale_bytes; byte += whole) {
      std::memcpy(at, static_cast<const char*>(scales) + byte, whole);
      at += std::size_t{format.scale_pitch} * 4;
    }
  }
}

// Brings given rows into the form in which they are delivered.
class RowWriter {
 public:
  RowWriter(Choice choice, const RowFormat& format)
      : choice_(choice),
        format_(format),
        scales_(format.cast ? (format.hidden + kScaleBlock - 1) / kScaleBlock : 0),
        scale_bytes_(format.cast ? format.scale_bytes : 0) {}

  // Writes the row of a token to all places. Returns its scales, valid until the next call; null if rows have
  // none.
  const void* write(const void* x, const void* x_scales, std::uint32_t token, std::span<void* const> places) {
    const void* const row = given_row(x, token);
    if (format_.cast) {
      choice_.kernels->cast_row({static_cast<const std::uint16_t*>(row), format_.hidden, scales_.data(),
                                 format_.scales != ScaleFormat::kFloat32},
                                places, choice_.stores);
      return cast_scales();
    }
    choice_.kernels->copy_row(row, format_.row_bytes, places, choice_.stores);
    return given_scales(x_scales, token);
  }

  const void* given_row(const void* x, std::uint32_t token) const {
    return static_cast<const char*>(x) + std::size_t{token} * format_.x_bytes;
  }
  const void* given_scales(const void* x_scales, std::uint32_t token) const {
    if (format_.scale_bytes == 0) return nullptr;
    return static_cast<const char*>(x_scales) + std::size_t{token} * format_.scale_bytes;
  }

 private:
  // Returns the scales of the row that was just cast, in the group's scale format.
  const void* cast_scales() {
    if (format_.scales != ScaleFormat::kUe8m0) return scales_.data();
    std::transform(scales_.begin(), scales_.end(), scale_bytes_.begin(), scale_to_ue8m0);
    return scale_bytes_.data();
  }

  const Choice choice_;
  const RowFormat format_;
  std::vector<float> scales_;
  std::vector<std::uint8_t> scale_bytes_;  // bytes past the last scale stay zero
};

}  // namespace epd::kernels::host
