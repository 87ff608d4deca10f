#include "kernels/rows.h"

#include <algorithm>
#include <cstring>

namespace epd::kernels {
namespace {

template <typename Index>
void mark_rows(const FillArgs& args, std::size_t row, std::size_t count) {
  const std::size_t choices = args.choices_per_row;
  std::fill_n(static_cast<Index*>(args.target.recv_topk_idx) + row * choices, count * choices, Index{-1});
  std::fill_n(args.target.recv_topk_weights + row * choices, count * choices, 0.0f);
  std::fill_n(args.target.recv_src + row * 2, count * 2, std::int32_t{-1});
}

void zero_scales(const FillArgs& args, std::size_t row, std::size_t count) {
  const RowFormat& format = args.format;
  auto* const scales = static_cast<char*>(args.target.recv_scales);
  if (format.scale_bytes == 0) return;
  if (format.scale_pitch == 0) {
    std::memset(scales + row * format.scale_bytes, 0, count * format.scale_bytes);
    return;
  }
  for (const std::size_t end = row + count; row < end; ++row) {
    char* at = scales + format.scale_word(row) * 4;
    for (std::uint32_t i = 0; i < format.scale_bytes / 4; ++i, at += std::size_t{format.scale_pitch} * 4)
      std::memset(at, 0, 4);
  }
}

void fill(const FillArgs& args, std::size_t row, std::size_t count) {
  if (args.index64) {
    mark_rows<std::int64_t>(args, row, count);
  } else {
    mark_rows<std::int32_t>(args, row, count);
  }
  if (!args.zero) return;
  const std::size_t bytes = args.format.row_bytes;
  std::memset(static_cast<char*>(args.target.recv_x) + row * bytes, 0, count * bytes);
  zero_scales(args, row, count);
}

}  // namespace

void fill_rows(const FillArgs& args, std::uint32_t begin, std::uint32_t end) {
  std::uint64_t first = 0;  // number of the range's first row among all rows
  for (const RowRange& range : args.ranges) {
    const std::uint64_t from = std::max<std::uint64_t>(begin, first);
    const std::uint64_t to = std::min<std::uint64_t>(end, first + range.count);
    if (from < to) fill(args, range.begin + (from - first), to - from);
    first += range.count;
  }
}

}  // namespace epd::kernels
