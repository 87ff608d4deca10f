// What a dispatch writes beside a received row.
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

}  // namespace epd::kernels::cuda
