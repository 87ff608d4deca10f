#include "snapshot.h"

#include <cstring>

namespace epd::bench {

namespace reference = kernels::reference;

template <typename T>
void Snapshot::take(T* epd_buffers_t::*region, const epd_buffers_t& from, std::size_t bytes,
                    RankDevice& device) {
  if (from.*region == nullptr) return;
  std::vector<char>& copy = memory_.emplace_back(bytes);
  device.get(copy.data(), from.*region, bytes);
  buffers_.*region = reinterpret_cast<T*>(copy.data());
}

// Those that lie in columns, by rows.
void Snapshot::take_scales(const reference::GroupParams& params, const epd_buffers_t& from,
                           std::size_t recv_rows, RankDevice& device) {
  if (from.recv_scales == nullptr) return;
  std::vector<char> columns(reference::num_scale_words(params, recv_rows) * 4);
  device.get(columns.data(), from.recv_scales, columns.size());
  device.settle();
  const std::vector<std::uint8_t> rows = reference::scales_by_row(params, recv_rows, columns.data());
  buffers_.recv_scales = memory_.emplace_back(rows.begin(), rows.end()).data();
}

Snapshot Snapshot::of_dispatch(const reference::GroupParams& params, const epd_buffers_t& from,
                               std::size_t rows, std::size_t recv_rows, RankDevice& device) {
  Snapshot made;
  made.rows_ = rows;
  const auto take = [&](auto region, std::size_t bytes) { made.take(region, from, bytes, device); };
  const std::size_t choices = params.layout == reference::Layout::kCompact ? params.topk : 1;
  const std::size_t experts = params.num_experts / params.num_ranks;
  take(&epd_buffers_t::recv_x, rows * reference::row_bytes(params));
  if (params.scale_layout == abi::ScaleLayout::kRowMajor) {
    take(&epd_buffers_t::recv_scales, rows * reference::scale_bytes(params));
  } else {
    made.take_scales(params, from, recv_rows, device);
  }
  take(&epd_buffers_t::recv_topk_idx, rows * choices * sizeof(std::int32_t));
  take(&epd_buffers_t::recv_topk_weights, rows * choices * sizeof(float));
  take(&epd_buffers_t::recv_src, rows * 2 * sizeof(std::int32_t));
  take(&epd_buffers_t::rank_offsets, (params.num_ranks + 1) * sizeof(std::int32_t));
  take(&epd_buffers_t::expert_counts, experts * sizeof(std::int32_t));
  take(&epd_buffers_t::expert_offsets, (experts + 1) * sizeof(std::int32_t));
  take(&epd_buffers_t::source_ranges, experts * params.num_ranks * 2 * sizeof(std::int32_t));
  device.settle();
  return made;
}

namespace {

// Of each row of `width` bytes those from `first` on.
void keep_bytes(void* region, std::size_t rows, std::size_t width, std::size_t first, std::size_t count) {
  auto* const bytes = static_cast<char*>(region);
  for (std::size_t row = 0; row < rows; ++row)
    std::memmove(bytes + row * count, bytes + row * width + first, count);
}

}  // namespace

void Snapshot::keep_columns(const reference::GroupParams& params, std::uint32_t first, std::uint32_t count) {
  if (count == params.hidden) return;
  const std::size_t width = reference::row_bytes(params);
  const std::size_t value = width / params.hidden;
  keep_bytes(buffers_.recv_x, rows_, width, first * value, count * value);
  reference::GroupParams before = params;
  reference::GroupParams kept = params;
  before.hidden = first;
  kept.hidden = count;
  if (buffers_.recv_scales == nullptr) return;
  keep_bytes(buffers_.recv_scales, rows_, reference::scale_bytes(params), reference::scale_bytes(before),
             reference::scale_bytes(kept));
}

Snapshot Snapshot::of_combine(const reference::GroupParams& params, const epd_buffers_t& from,
                              std::size_t tokens, RankDevice& device) {
  Snapshot made;
  made.take(&epd_buffers_t::out, from, tokens * params.hidden * 2, device);
  made.take(&epd_buffers_t::out_weights, from, tokens * params.topk * sizeof(float), device);
  device.settle();
  return made;
}

}  // namespace epd::bench
