// The output of an operation, in memory of this process, for the comparison.
#pragma once

#include "epd/epd.h"
#include "kernels/reference.h"
#include "rank_device.h"

#include <cstddef>
#include <vector>

namespace epd::bench {

class Snapshot {
 public:
  // Of the group's regions `from`: rows [0, rows) of what dispatch delivers, with row-major scales, or the
  // tokens' rows that combine does. The regions have room for `recv_rows`.
  static Snapshot of_dispatch(const kernels::reference::GroupParams& params, const epd_buffers_t& from,
                              std::size_t rows, std::size_t recv_rows, RankDevice& device);
  static Snapshot of_combine(const kernels::reference::GroupParams& params, const epd_buffers_t& from,
                             std::size_t tokens, RankDevice& device);

  // Of dispatched bf16 or cast rows only these values and their scales, as if the rows had no others.
  void keep_columns(const kernels::reference::GroupParams& params, std::uint32_t first, std::uint32_t count);

  // Only regions of that operation; the others are null.
  const epd_buffers_t& buffers() const { return buffers_; }

 private:
  void take_scales(const kernels::reference::GroupParams& params, const epd_buffers_t& from,
                   std::size_t recv_rows, RankDevice& device);
  template <typename T>
  void take(T* epd_buffers_t::*region, const epd_buffers_t& from, std::size_t bytes, RankDevice& device);

  std::vector<std::vector<char>> memory_;
  std::size_t rows_ = 0;
  epd_buffers_t buffers_{};
};

}  // namespace epd::bench
