// Stores the words that a dispatch writes beside a received row.
#pragma once

#include "cuda/common/layout.h"

namespace epd::kernels::cuda {

// Stores a local expert number at index `at` of recv_topk_idx, in the group's index type.
__device__ inline void store_index(const Operation& op, void* indices, std::size_t at, std::int32_t value) {
  EPD_BELOW(at, op.shape.recv_rows * (op.shape.per_expert ? 1 : op.shape.topk));
  if (op.shape.index64) {
    static_cast<std::int64_t*>(indices)[at] = value;
  } else {
    static_cast<std::int32_t*>(indices)[at] = value;
  }
}

// Returns the place of a row's first scale, in words, where scales lie in columns: RowFormat::scale_word() in
// 32 bits, as far as they reach.
__device__ inline std::size_t first_scale(const RowFormat& format, std::size_t row) {
  const auto number = static_cast<std::uint32_t>(row);
  const std::uint32_t block = number / format.scale_block_rows;
  return std::size_t{block} * (format.scale_bytes / 4) * format.scale_pitch +
         (number - block * format.scale_block_rows);
}

}  // namespace epd::kernels::cuda
