// What the ranks of a group agree on. Every field is compared at join: a mismatch is refused with
// the field's name and both values.
#pragma once

#include <cstdint>
#include <type_traits>

namespace epd::abi {

inline constexpr std::uint32_t kMaxRanks = 1024;
inline constexpr std::uint32_t kMaxExperts = 4096;
inline constexpr std::uint32_t kMaxTokens = 65536;
inline constexpr std::uint32_t kMaxHidden = 16384;
inline constexpr std::uint32_t kHiddenMultiple = 128;
inline constexpr std::uint32_t kMaxTopk = 32;
inline constexpr std::uint32_t kMaxDepth = 16;
inline constexpr std::uint32_t kDefaultDepth = 4;
inline constexpr std::uint32_t kScaleBlock = 128;  // elements under one FP8 scale
inline constexpr std::uint32_t kMaxGroupName = 63;
inline constexpr std::int32_t kMinPriority = -8;  // of a rank's operations on its device; 0 unless asked
inline constexpr std::int32_t kMaxPriority = 7;

enum class Payload : std::uint32_t {
  kBf16 = 0,     // rows travel as bf16
  kFp8Cast = 1,  // input is bf16, the engine casts to e4m3 with one float32 scale per 1x128 block
};

enum class IndexType : std::uint32_t { kInt32 = 0, kInt64 = 1 };

enum class LossPolicy : std::uint32_t { kFailFast = 0, kDegrade = 1 };

struct GroupShape {
  std::uint32_t num_ranks;    // R: 1..1024
  std::uint32_t num_experts;  // E: a multiple of R, <= 4096
  std::uint32_t max_tokens;   // T, per rank and call: 1..65536
  std::uint32_t hidden;       // H: a multiple of 128, <= 16384
  std::uint32_t topk;         // K: 1..32
  std::uint32_t depth;        // buffer slots, and so operations in flight: 1..16
  Payload payload;
  IndexType index_type;
  LossPolicy policy;

  constexpr std::uint32_t experts_per_rank() const { return num_experts / num_ranks; }
  constexpr std::uint32_t max_recv_rows() const { return num_ranks * max_tokens; }
  constexpr std::uint32_t index_bytes() const { return index_type == IndexType::kInt64 ? 8 : 4; }
  constexpr std::uint32_t scales_per_row() const {
    return payload == Payload::kFp8Cast ? hidden / kScaleBlock : 0;
  }
  // Bytes of one received row, without its scales.
  constexpr std::uint32_t row_bytes() const { return payload == Payload::kFp8Cast ? hidden : hidden * 2; }
  bool operator==(const GroupShape&) const = default;
};
static_assert(sizeof(GroupShape) == 36 && std::is_trivially_copyable_v<GroupShape>);

}  // namespace epd::abi
