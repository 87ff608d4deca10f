#include "support/caller_memory.h"

#include <algorithm>
#include <cstring>
#include <random>

namespace epd::test {
namespace {

using abi::Region;

constexpr std::size_t kGuard = 64;

bool is_numbers(Region region) {
  return (kCountOutputs & abi::region_bit(region)) != 0;
}
bool is_received(Region region) {
  return (kRowOutputs & abi::region_bit(region)) != 0 || region == Region::kY || region == Region::kYWeights;
}

// The alignment by which a test may read the region.
std::size_t alignment_of(const Case& c, Region region) {
  switch (region) {
    case Region::kTopkIdx:
    case Region::kRecvTopkIdx: return c.index64 ? 8 : 4;
    case Region::kX:
    case Region::kRecvX: {
      const abi::Payload payload = c.row_shape().payload;
      return payload == abi::Payload::kBf16 || payload == abi::Payload::kFp8Cast ? 2 : 1;
    }
    case Region::kXScales: return 1;
    case Region::kRecvScales: return c.scale_layout == EPD_SCALE_LAYOUT_COLUMN_MAJOR ? 4 : 1;
    case Region::kY:
    case Region::kBias0:
    case Region::kBias1:
    case Region::kOut: return 2;
    default: return 4;
  }
}

}  // namespace

SlotImage::SlotImage(const Case& c) : shape_(c.shape()) {
  for (std::size_t i = 0; i < abi::kNumRegions; ++i) {
    offset_[i] = bytes_;
    bytes_ += abi::align_up(abi::region_bytes(shape_, static_cast<Region>(i)), abi::kRegionAlign);
  }
}

std::byte* SlotImage::region(std::byte* at, Region region) const {
  if (abi::region_bytes(shape_, region) == 0) return nullptr;
  return at + offset_[static_cast<std::size_t>(region)];
}

epd_buffers_t SlotImage::buffers(std::byte* slot) const {
  const auto at = [&](Region which) { return region(slot, which); };
  const auto floats = [&](Region which) { return reinterpret_cast<float*>(region(slot, which)); };
  const auto ints = [&](Region which) { return reinterpret_cast<std::int32_t*>(region(slot, which)); };
  epd_buffers_t b;
  epd_buffers_init(&b);
  b.x = at(Region::kX);
  b.x_scales = at(Region::kXScales);
  b.topk_idx = at(Region::kTopkIdx);
  b.topk_weights = floats(Region::kTopkWeights);
  b.recv_x = at(Region::kRecvX);
  b.recv_scales = at(Region::kRecvScales);
  b.recv_topk_idx = at(Region::kRecvTopkIdx);
  b.recv_topk_weights = floats(Region::kRecvTopkWeights);
  b.recv_src = ints(Region::kRecvSrc);
  b.rank_offsets = ints(Region::kRankOffsets);
  b.expert_counts = ints(Region::kExpertCounts);
  b.expert_offsets = ints(Region::kExpertOffsets);
  b.source_ranges = ints(Region::kSourceRanges);
  b.y = at(Region::kY);
  b.y_weights = floats(Region::kYWeights);
  b.bias[0] = at(Region::kBias0);
  b.bias[1] = at(Region::kBias1);
  b.out = at(Region::kOut);
  b.out_weights = floats(Region::kOutWeights);
  return b;
}

CallerMemory::CallerMemory(const Case& c, std::uint32_t named, std::uint32_t tokens, std::uint32_t recv_rows,
                           std::uint64_t seed, bool aligned)
    : case_(c), shape_(c.row_shape()), image_(c), recv_rows_(recv_rows) {
  const bool expert = shape_.layout == abi::Layout::kExpert;
  blocks_ = expert ? shape_.experts_per_rank() : 1;
  region_block_ = expert ? shape_.expert_capacity() : shape_.recv_rows();
  own_block_ = recv_rows != 0 ? recv_rows : region_block_;
  std::mt19937_64 random(seed);
  bytes_ = kGuard;
  for (std::size_t i = 0; i < abi::kNumRegions; ++i) {
    const auto region = static_cast<Region>(i);
    const std::uint64_t bytes = abi::region_bytes(shape_, region);
    if (bytes == 0 || (named >> i & 1) == 0) continue;
    named_ |= 1u << i;
    Place& place = places_[i];
    place.received = is_received(region);
    if (is_numbers(region)) {
      place.row_bytes = 4;
      place.rows = bytes / 4;
    } else if (region == Region::kRecvScales && shape_.scale_columns()) {
      columns_ = shape_.scale_words();
      place.row_bytes = 4;
      place.rows = blocks_ * columns_ * column_rows();
    } else if (place.received) {
      place.row_bytes = bytes / shape_.recv_rows();
      place.rows = blocks_ * own_block_;
    } else {
      place.row_bytes = bytes / shape_.max_tokens;
      place.rows = tokens;
    }
    const std::size_t alignment = alignment_of(c, region);
    const std::size_t odd = random() % (16 / alignment) * alignment;
    place.offset = abi::align_up(bytes_, 16) + (aligned ? 0 : odd);
    bytes_ = place.offset + place.rows * place.row_bytes + kGuard;
  }
  bytes_ = abi::align_up(bytes_, abi::kRegionAlign);
}

epd_memory_t CallerMemory::memory(std::byte* mine) const {
  const auto at = [&](Region region) { return has(region) ? mine + place(region).offset : nullptr; };
  const auto floats = [&](Region region) { return reinterpret_cast<float*>(at(region)); };
  const auto ints = [&](Region region) { return reinterpret_cast<std::int32_t*>(at(region)); };
  epd_memory_t m;
  epd_memory_init(&m);
  m.x = at(Region::kX);
  m.x_scales = at(Region::kXScales);
  m.topk_idx = at(Region::kTopkIdx);
  m.topk_weights = floats(Region::kTopkWeights);
  m.recv_x = at(Region::kRecvX);
  m.recv_scales = at(Region::kRecvScales);
  m.recv_topk_idx = at(Region::kRecvTopkIdx);
  m.recv_topk_weights = floats(Region::kRecvTopkWeights);
  m.recv_src = ints(Region::kRecvSrc);
  m.rank_offsets = ints(Region::kRankOffsets);
  m.expert_counts = ints(Region::kExpertCounts);
  m.expert_offsets = ints(Region::kExpertOffsets);
  m.source_ranges = ints(Region::kSourceRanges);
  m.y = at(Region::kY);
  m.y_weights = floats(Region::kYWeights);
  m.bias[0] = at(Region::kBias0);
  m.bias[1] = at(Region::kBias1);
  m.out = at(Region::kOut);
  m.out_weights = floats(Region::kOutWeights);
  m.recv_rows = recv_rows_;
  return m;
}

void CallerMemory::put(Region region, std::byte* mine, const std::byte* slot) const {
  const Place& at = place(region);
  const std::byte* const from = image_.region(const_cast<std::byte*>(slot), region);  // NOLINT: only read
  if (!at.received) {
    std::memcpy(mine + at.offset, from, at.rows * at.row_bytes);
    return;
  }
  for (std::size_t block = 0; block < blocks_; ++block)
    std::memcpy(mine + at.offset + block * own_block_ * at.row_bytes,
                from + block * region_block_ * at.row_bytes,
                std::min(own_block_, region_block_) * at.row_bytes);
}

void CallerMemory::renumber(Region region, std::byte* numbers, std::int64_t blocks_apart) const {
  if (shape_.layout != abi::Layout::kExpert) return;
  if (region != Region::kExpertOffsets && region != Region::kSourceRanges) return;
  if (region == Region::kSourceRanges && shape_.range_format == abi::RangeFormat::kPacked64) return;
  auto* const words = reinterpret_cast<std::int32_t*>(numbers);
  const bool pairs = region == Region::kSourceRanges;
  const std::size_t of_block = pairs ? std::size_t{2} * shape_.num_ranks : 1;
  for (std::size_t i = 0; i < place(region).rows; i += pairs ? 2 : 1)
    words[i] += static_cast<std::int32_t>(static_cast<std::int64_t>(i / of_block) * blocks_apart);
}

void CallerMemory::take(Region region, const std::byte* mine, std::byte* slot, bool marks) const {
  const Place& at = place(region);
  std::byte* const to = image_.region(slot, region);
  if (!at.received) {
    std::memcpy(to, mine + at.offset, at.rows * at.row_bytes);
    renumber(region, to, static_cast<std::int64_t>(region_block_) - static_cast<std::int64_t>(own_block_));
    return;
  }
  const std::size_t common = std::min(own_block_, region_block_);
  for (std::size_t column = 0; region == Region::kRecvScales && column < blocks_ * columns_; ++column)
    std::memcpy(to + column * shape_.scale_pitch() * 4, mine + at.offset + column * column_rows() * 4,
                common * 4);
  if (region == Region::kRecvScales && columns_ != 0) return;
  for (std::size_t block = 0; block < blocks_; ++block) {
    std::byte* const rows = to + block * region_block_ * at.row_bytes;
    std::memcpy(rows, mine + at.offset + block * own_block_ * at.row_bytes, common * at.row_bytes);
    // The region has more rows than the memory.
    const int mark = region == Region::kRecvTopkWeights ? 0 : 0xff;
    const bool marked =
        marks && region != Region::kRecvX && region != Region::kRecvScales && common < region_block_;
    if (marked) std::memset(rows + common * at.row_bytes, mark, (region_block_ - common) * at.row_bytes);
  }
}

std::size_t CallerMemory::column_rows() const {
  const bool expert = shape_.layout == abi::Layout::kExpert;
  return abi::align_up(expert ? own_block_ : std::min(own_block_, region_block_), 4);
}

void CallerMemory::poison(Region region, std::byte* mine) const {
  const Place& at = place(region);
  std::memset(mine + at.offset, kPoison, at.rows * at.row_bytes);
}

std::string CallerMemory::changes(const std::byte* before, const std::byte* after,
                                  std::uint32_t written) const {
  std::vector<bool> may(bytes_);
  for (std::size_t i = 0; i < abi::kNumRegions; ++i) {
    const Place& at = places_[i];
    if ((named_ & written) >> i & 1)
      std::fill_n(may.begin() + static_cast<std::ptrdiff_t>(at.offset), at.rows * at.row_bytes, true);
  }
  for (std::size_t i = 0; i < bytes_; ++i) {
    if (before[i] == after[i] || may[i]) continue;
    std::size_t last = 0;
    for (std::size_t region = 0; region < abi::kNumRegions; ++region) {
      if ((named_ >> region & 1) != 0 && places_[region].offset <= i) last = region;
    }
    return "byte " + std::to_string(i) +
           " of the caller's memory was written to: " + std::to_string(i - places_[last].offset) +
           " behind the begin of region " + std::to_string(last) + ", which has " +
           std::to_string(places_[last].rows * places_[last].row_bytes);
  }
  return "";
}

}  // namespace epd::test
