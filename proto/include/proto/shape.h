// The values on which the ranks of a group agree. Every field is compared at join: a mismatch is refused with
// the field's name and both values.
#pragma once

#include <array>
#include <cstdint>
#include <type_traits>

namespace epd::abi {

inline constexpr std::uint32_t kMaxRanks = 1024;
inline constexpr std::uint32_t kMaxExperts = 4096;
inline constexpr std::uint32_t kMaxTokens = 65536;
inline constexpr std::uint32_t kMaxHidden = 16384;
inline constexpr std::uint32_t kHiddenMultiple = 8;
inline constexpr std::uint32_t kMaxTopk = 32;
inline constexpr std::uint32_t kMaxDepth = 16;
inline constexpr std::uint32_t kDefaultDepth = 4;
inline constexpr std::uint32_t kScaleBlock =
    128;  // elements under one FP8 scale; a row's last may have fewer
inline constexpr std::uint32_t kMaxGroupName = 63;
inline constexpr std::uint32_t kMaxAlignment = 256;  // of an expert's first row, in rows
inline constexpr std::uint32_t kMaxBiases = 2;       // added in combine
inline constexpr std::uint32_t kMaxMoreFormats = 3;  // row formats of a group beyond its first
inline constexpr std::uint32_t kMaxFormats = 1 + kMaxMoreFormats;
inline constexpr std::uint32_t kMaxHandles = 4096;         // routings kept beside those of the slots
inline constexpr std::uint32_t kOpaqueMultiple = 16;       // bytes
inline constexpr std::uint32_t kMaxOpaqueBytes = 65536;    // of one row
inline constexpr std::uint32_t kMaxRecvRows = 0x7fffffff;  // of recv_x; row numbers are int32
inline constexpr std::int32_t kMinPriority = -8;  // of a rank's operations on its device; 0 unless asked
inline constexpr std::int32_t kMaxPriority = 7;

// How long the SMs of an operation may stay for the next one.
inline constexpr std::uint32_t kMaxLingerUs = 50'000;

enum class Payload : std::uint32_t {
  kBf16 = 0,     // rows travel as bf16
  kFp8Cast = 1,  // input is bf16, the engine casts to e4m3 with one scale per 1x128 block
  kFp8 = 2,      // input is e4m3 with its scales; both travel as they are
  kOpaque = 3,   // input rows are opaque_bytes that mean nothing to epd
};

// How the scales of e4m3 rows are stored.
enum class ScaleFormat : std::uint32_t {
  kFloat32 = 0,
  kFloat32Pow2 = 1,  // kFp8Cast only: float32, rounded up to a power of two
  kUe8m0 = 2,  // the exponent byte of a power of two, 4 packed to an int32; the last word is filled with 0
};

// The format of the rows of a dispatch.
struct RowFormat {
  Payload payload = Payload::kBf16;
  ScaleFormat scale_format = ScaleFormat::kFloat32;
  bool operator==(const RowFormat&) const = default;
};

// Where the scales of received rows lie.
enum class ScaleLayout : std::uint32_t {
  kRowMajor = 0,     // with their row: [rows,scale_bytes]
  kColumnMajor = 1,  // [scale_words][scale_pitch] for all rows; layout expert: for each expert's block
};

// How source_ranges says which rows of an expert came from which rank.
enum class RangeFormat : std::uint32_t {
  kRows = 0,      // two int32: the first row, the number of rows
  kPacked64 = 1,  // one int64: first << 32 | number; the first counts from the expert's first row
};

// How received rows lie.
enum class Layout : std::uint32_t {
  kCompact = 0,  // one row per (token, rank), by source rank, then token
  kPacked = 1,   // one row per (token, local expert), by expert; groups begin aligned
  kExpert = 2,   // the same rows, each expert in a block of its own of expert_capacity() rows
};

enum class IndexType : std::uint32_t { kInt32 = 0, kInt64 = 1 };

// Where the ranks of a group may be.
enum class Span : std::uint32_t {
  kNode = 0,     // on one node
  kCluster = 1,  // on any node of the cluster
};

enum class LossPolicy : std::uint32_t {
  kFailFast = 0,
  kDegrade = 1,
  kDegradeLate = 2,  // and a rank is lost that an operation has waited for until its deadline
};
// Does the group continue without lost ranks?
constexpr bool degrades(LossPolicy policy) {
  return policy != LossPolicy::kFailFast;
}

// The fields of epd_group_config_t on which ranks agree: proto/fields.py says what each is. Words of 32 bits.
struct GroupShape {
  // [fields.py: GroupShape]
  std::uint32_t num_ranks = 0;
  std::uint32_t num_experts = 0;
  std::uint32_t max_tokens = 0;
  std::uint32_t hidden = 0;
  std::uint32_t topk = 0;
  std::uint32_t depth = kDefaultDepth;
  Payload payload = {};
  IndexType index_type = {};
  LossPolicy policy = {};
  Layout layout = {};
  ScaleFormat scale_format = {};
  std::uint32_t expert_alignment = 1;
  std::uint32_t opaque_bytes = 0;
  std::uint32_t num_biases = 0;
  std::uint32_t num_handles = 0;
  std::uint32_t max_recv_rows = 0;
  std::uint32_t sum_ranks = 0;
  Span span = {};
  ScaleLayout scale_layout = {};
  RangeFormat range_format = {};
  std::uint32_t num_more_formats = 0;
  std::array<RowFormat, kMaxMoreFormats> more_formats{};
  std::uint32_t shared_regions = 0;
  // [end]

  constexpr std::uint32_t num_formats() const { return 1 + num_more_formats; }
  constexpr RowFormat format(std::uint32_t i) const {
    return i == 0 ? RowFormat{payload, scale_format} : more_formats[i - 1];
  }
  // The group as it would be with format i alone.
  constexpr GroupShape with_format(std::uint32_t i) const {
    GroupShape alone = *this;
    alone.payload = format(i).payload;
    alone.scale_format = format(i).scale_format;
    alone.num_more_formats = 0;
    alone.more_formats = {};
    return alone;
  }
  // The largest of what `of` returns for with_format() of each format.
  template <typename Of>
  constexpr auto most_of_formats(Of of) const {
    auto most = of(with_format(0));
    for (std::uint32_t i = 1; i < num_formats(); ++i) {
      const auto other = of(with_format(i));
      if (other > most) most = other;
    }
    return most;
  }

  // Whether a combine adds up the rows of all ranks in one sum: nothing is rounded in between.
  constexpr bool sums_all_ranks() const { return sum_ranks == 0 || sum_ranks == num_ranks; }
  constexpr std::uint32_t experts_per_rank() const { return num_experts / num_ranks; }
  constexpr bool per_expert() const { return layout != Layout::kCompact; }
  constexpr std::uint32_t index_bytes() const { return index_type == IndexType::kInt64 ? 8 : 4; }
  // Choices that a received row carries.
  constexpr std::uint32_t choices_per_row() const { return per_expert() ? 1 : topk; }
  // Routings that the engine keeps: one per slot, then those with a life of their own.
  constexpr std::uint32_t num_routes() const { return depth + num_handles; }
  // Whether one of the formats has scales.
  constexpr bool has_scales() const {
    return most_of_formats([](const GroupShape& s) { return s.is_fp8(); });
  }

  // ---- of format 0; with_format() tells it of another
  constexpr bool is_fp8() const { return payload == Payload::kFp8Cast || payload == Payload::kFp8; }
  // Bytes of the scales of one row, as delivered.
  constexpr std::uint32_t scale_bytes() const {
    if (!is_fp8()) return 0;
    const std::uint32_t scales = (hidden + kScaleBlock - 1) / kScaleBlock;
    return scale_format == ScaleFormat::kUe8m0 ? (scales + 3) / 4 * 4 : scales * 4;
  }
  // Bytes of one row's scales as the caller gives them.
  constexpr std::uint32_t x_scales_bytes() const { return payload == Payload::kFp8 ? scale_bytes() : 0; }
  constexpr std::uint32_t scale_words() const { return scale_bytes() / 4; }
  constexpr bool scale_columns() const { return is_fp8() && scale_layout == ScaleLayout::kColumnMajor; }
  // Bytes of one row without its scales: as given, as delivered.
  constexpr std::uint32_t x_bytes() const { return payload == Payload::kFp8Cast ? hidden * 2 : row_bytes(); }
  constexpr std::uint32_t row_bytes() const {
    if (payload == Payload::kOpaque) return opaque_bytes;
    return is_fp8() ? hidden : hidden * 2;
  }
  // ---- of all formats
  constexpr std::uint64_t worst_rows() const { return std::uint64_t{num_ranks} * max_tokens; }
  // Layout expert: rows in the block of each expert.
  constexpr std::uint64_t expert_capacity() const {
    return max_recv_rows != 0 ? max_recv_rows : worst_rows();
  }
  // Rows of recv_x and y.
  constexpr std::uint64_t recv_rows() const {
    if (layout == Layout::kExpert) return experts_per_rank() * expert_capacity();
    if (max_recv_rows != 0) return max_recv_rows;
    if (layout == Layout::kCompact) return worst_rows();
    const std::uint32_t choices = topk < experts_per_rank() ? topk : experts_per_rank();
    return worst_rows() * choices + std::uint64_t{experts_per_rank()} * (expert_alignment - 1);
  }
  // Column-major scales: rows that share a matrix, and words from one scale of a row to its next. TMA wants
  // multiples of 16 bytes.
  constexpr std::uint64_t scale_block_rows() const {
    return layout == Layout::kExpert ? expert_capacity() : recv_rows();
  }
  constexpr std::uint64_t scale_pitch() const { return (scale_block_rows() + 3) / 4 * 4; }
  bool operator==(const GroupShape&) const = default;
};
static_assert(std::is_trivially_copyable_v<GroupShape>);

}  // namespace epd::abi
