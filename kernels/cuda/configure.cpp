// Divides an operation's work among CTAs and warps, and their shared memory. Also gives access to the image
// of the kernels.
#include "cuda/common/layout.h"
#include "kernels/cuda.h"

#include <algorithm>

// Defined in image.S.
extern "C" {
extern const std::byte epd_cuda_image[];
extern const std::byte epd_cuda_image_end[];
extern const bool epd_cuda_image_checks;
}

namespace epd::kernels::cuda {
namespace {

constexpr std::uint32_t round_to(std::uint32_t value, std::uint32_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

constexpr std::uint32_t kMaxWarps = kMaxThreads / 32;
constexpr std::uint32_t kMetadataWarps = 2;            // dispatch: the least number of metadata warps
constexpr std::uint32_t kLowLatencyMetadataWarps = 4;  // the same, with the signal warp
constexpr std::uint32_t kCombineStage = 8 * 1024;      // bytes of a combine's stage
constexpr std::uint32_t kPieceUnit = 512;              // bytes: 16 for each lane

// Sets the offsets of the shared memory before the stages.
void set_header(const HeaderLayout& layout, kernels::Operation& op) {
  op.division.header = layout;
  op.division.header_bytes = layout.bytes;
}

// High-throughput dispatch. A stage holds one row with its scales. With a cast it also holds x, so that the
// next x can be loaded while the row is stored.
void divide_dispatch(kernels::Operation& op) {
  const RowFormat& format = op.shape.format;
  op.division.stages = 1;
  op.division.stage_bytes =
      round_to(format.row_bytes + format.scale_bytes, 128) + (format.cast ? format.x_bytes : 0);
  op.division.stage_bytes = round_to(op.division.stage_bytes, 128);
}

// High-throughput combine. A stage holds a piece of every row that a token may have.
void divide_combine(kernels::Operation& op) {
  const Shape& shape = op.shape;
  const std::uint32_t rows = (shape.per_expert ? shape.topk : std::min(shape.topk, shape.num_ranks)) + 2;
  const std::uint32_t wanted = rows - (op.bias[0] == nullptr) - (op.bias[1] == nullptr);
  const std::uint32_t row_bytes = shape.hidden * 2;
  const std::uint32_t most = std::max(kCombineStage / wanted / kPieceUnit * kPieceUnit, kPieceUnit);
  const std::uint32_t pieces = (row_bytes + most - 1) / most;
  op.division.chunk_bytes = std::min(round_to((row_bytes + pieces - 1) / pieces, kPieceUnit), row_bytes);
  op.division.stage_bytes = round_to(op.division.chunk_bytes * wanted, 128);
}

// Low-latency dispatch. A stage holds a row with choices and weights, as an inbox slot does. With a cast,
// room for x follows, which later holds two received rows. Without a cast each copy warp has one stage.
bool divide_low_latency_dispatch(std::uint32_t room, kernels::Operation& op) {
  const Shape& shape = op.shape;
  const RowFormat& format = shape.format;
  WorkDivision& division = op.division;
  division.set_words = (op.inbox.max_tokens + 31) / 32;
  division.plan = {shape.num_ranks, shape.num_experts, op.inbox.max_tokens};
  division.inbox_row = {format.row_bytes, format.scale_bytes, shape.topk};
  const std::uint32_t row = division.inbox_pitch = round_to(division.inbox_row.bytes, 128);
  division.stage_bytes = format.cast ? row + std::max(2 * row, round_to(format.x_bytes, 128)) : row;
  const auto fits = [&](std::uint32_t stages) {
    division.warps = std::min((format.cast ? 2 : 1) * stages, kMaxWarps - kLowLatencyMetadataWarps);
    division.stages = format.cast ? stages : 1;
    set_header({Kind::kDispatch, shape, op.inbox.max_tokens, num_barriers(op), division.ctas}, op);
    return division.header_bytes + stages * division.stage_bytes <= room;
  };
  std::uint32_t stages = std::min(room / division.stage_bytes, kMaxWarps - kLowLatencyMetadataWarps);
  while (stages > 0 && !fits(stages)) --stages;
  division.stages_divisor = Divisor(stages);
  // Steps of whole blocks; the last one also casts the rest of the row.
  division.row_steps = std::max(1u, (format.hidden / 128 + kCastStepBlocks - 1) / kCastStepBlocks);
  division.row_steps_divisor = Divisor(division.row_steps);
  if (stages == 0 || division.ctas == 1) return stages > 0;
  // If there are several CTAs, CTA 0 copies no rows. Its stages hold the counts of all ranks and the
  // placement.
  const std::uint32_t placement = 3 * shape.num_experts + 2 * shape.experts_per_rank + shape.num_ranks + 2;
  return division.header_bytes + (shape.num_experts * shape.num_ranks + placement) * 4 <= room;
}

// Low-latency combine. A stage holds the pieces of rows that a warp adds up next. The signal warp adds up
// nothing.
bool divide_low_latency_combine(std::uint32_t room, kernels::Operation& op) {
  if (op.shape.hidden > abi::kMaxHidden) return false;
  op.division.stages = 1;
  op.division.stage_bytes = kSummedAhead * kSummedAtOnce * 16;
  op.division.header_bytes = 0;
  op.division.warps = std::min(room / op.division.stage_bytes, kMaxWarps - 1);
  op.division.pieces_divisor = Divisor(num_pieces(op.shape.hidden));
  return op.division.warps > 0;
}

}  // namespace

std::size_t workspace_bytes(const Shape& shape, std::uint32_t max_sms) {
  const std::size_t targets = shape.per_expert ? shape.num_experts : shape.num_ranks;
  return kWorkspaceHead + (shape.num_ranks + shape.num_experts + max_sms * targets) * sizeof(std::uint32_t);
}

bool configure(Kind kind, std::size_t max_shared_bytes, std::uint32_t sms, kernels::Operation& op) {
  WorkDivision& division = op.division;
  if (op.shape.num_ranks > kMaxRanks || max_shared_bytes <= kStaticBytes) return false;
  const std::uint32_t tokens = op.inbox.max_tokens;
  const abi::PlanWords plan(op.shape.num_ranks, op.shape.num_experts, tokens);
  op.shape.experts_per_rank = op.shape.num_experts / op.shape.num_ranks;
  op.shape.experts_per_rank_divisor = Divisor(op.shape.experts_per_rank);
  op.shape.num_ranks_divisor = Divisor(op.shape.num_ranks);
  op.shape.other_ranks_divisor = Divisor(op.shape.num_ranks - 1);
  op.shape.count_words_divisor = Divisor(plan.count_words);
  const auto room = static_cast<std::uint32_t>(max_shared_bytes) - kStaticBytes;
  division.ctas = sms;
  division.senders_divisor = Divisor(sms - 1);
  division.threads = kMaxThreads;
  division.shared_bytes = room / 128 * 128;
  if (is_low_latency(op)) {
    return kind == Kind::kDispatch ? divide_low_latency_dispatch(division.shared_bytes, op)
                                   : divide_low_latency_combine(division.shared_bytes, op);
  }
  if (kind == Kind::kDispatch) {
    divide_dispatch(op);
  } else {
    divide_combine(op);
  }
  std::uint32_t stages = room / division.stage_bytes;
  while (stages > 0 &&
         HeaderLayout(kind, op.shape, tokens, stages, sms).bytes + stages * division.stage_bytes > room)
    --stages;
  if (stages < 1) return false;
  division.stages = std::clamp(division.stages, 1u, stages);
  const std::uint32_t metadata_warps = kind == Kind::kDispatch ? kMetadataWarps : 0;
  division.warps = std::min(stages / division.stages, kMaxWarps - metadata_warps);
  set_header({kind, op.shape, tokens, division.warps * division.stages, sms}, op);
  return true;
}

std::span<const std::byte> image() {
  return {epd_cuda_image, epd_cuda_image_end};
}
bool image_checks_ranges() {
  return epd_cuda_image_checks;
}

}  // namespace epd::kernels::cuda
