// One launch of libepd's kernels: it copies the caller's memory in, begins an operation, waits for
// its end, and copies out. Each part may be missing. Plain data, also for device code.
#pragma once

#include "proto/arena.h"
#include "proto/call_words.h"

#include <cstddef>
#include <cstdint>

namespace epd::stream_kernels {

// How the rows of a piece are counted.
enum class Rows : std::uint8_t {
  kGiven,     // Piece::rows
  kTokens,    // n
  kReceived,  // in each block as many as Copies::counts say
  kUnused,    // the other rows of each block of the caller's
};

// Rows to copy. Those of a block lie close together.
struct Piece {
  std::uint8_t* to = nullptr;
  const std::uint8_t* from = nullptr;  // null: `fill` is written
  std::uint32_t row_bytes = 0;
  std::uint32_t rows = 0;      // kGiven
  std::uint32_t renumber = 0;  // int32 of a block, of which 1, or the first of each pair, is a row's number
  Rows counted = Rows::kGiven;
  std::uint8_t fill = 0;
  std::uint16_t columns = 0;  // of words, one of each row in each (column-major scales); 0: rows lie together
};
static_assert(sizeof(Piece) == 32);

// From one column to the next, where a block has so many rows (abi::GroupShape::scale_pitch).
constexpr std::uint64_t column_rows(std::uint32_t block) {
  return (std::uint64_t{block} + 3) / 4 * 4;
}

inline constexpr std::uint32_t kMostPiecesIn = 5;    // of a combine
inline constexpr std::uint32_t kMostPiecesOut = 12;  // of a dispatch: its outputs, and unused rows of three

// Parts of small operations are so small that many blocks share them, and so large that all threads of a
// block have as many loads under way as they can. Those of large ones are so large that what blocks say to
// each other costs little: 256 blocks with parts of 32 KiB copied 1.9 TB/s, read and written, with 128
// KiB 2.5, by the times of whole calls (2 x H100, 2026-11-25, an engine with 24 SMs).
inline constexpr std::uint32_t kLeastPart = 32 << 10;
inline constexpr std::uint32_t kPartsOfABlock = 2;  // where parts are larger

// All that an operation copies between the caller's memory and its slot's regions. `own` is the caller's.
struct Copies {
  const std::int32_t* counts = nullptr;  // [blocks]: the rows received in each; null: no piece has such rows
  std::uint32_t blocks = 0;              // of received rows: 1, layout expert: one for each local expert
  std::uint32_t room = 0;                // rows of a block, there and here: no more are copied
  std::uint32_t own_block = 0;           // rows from block to block
  std::uint32_t region_block = 0;
  std::uint32_t received_in = 0;  // 1: received rows are inputs: as many are copied as there is room for. 0:
                                  // outputs: if there are more, none is copied
  std::uint32_t most_tokens = 0;  // n is no more than that
  std::uint32_t num_tokens = 0;
  std::uint32_t num_in = 0;
  std::uint32_t num_out = 0;
  const std::uint32_t* num_tokens_at = nullptr;  // not null: in place of num_tokens
  std::uint32_t large = 0;                       // 1: of a large operation
  Piece in[kMostPiecesIn];
  Piece out[kMostPiecesOut];

  constexpr bool any() const { return num_in + num_out != 0; }
  // So many blocks copy that they must not wait for the operation: they would hold the GPU.
  constexpr bool many() const { return large != 0; }
};

enum class Wait : std::uint8_t {
  kNothing,
  kCall,      // until the call that this step has made has ended
  kLastCall,  // until the last call on the slot has
};

// A step that copies nothing. A kernel begins the later, the more it is given (StagedStep). It reads its
// parameters by lines of 64 bytes. What most calls need lies in the first one, which begins 16 bytes before
// them (sm_90).
struct Step {
  abi::CallWords* words = nullptr;
  const std::uint32_t* call_tokens_at = nullptr;  // not null: n of the call, which has 0
  abi::CallHalves call;                           // its epoch is 0
  std::uint64_t limit_ns = 0;                     // of the wait
  bool calls = false;                             // makes the call
  Wait wait = Wait::kNothing;
  std::uint8_t slot = 0;  // kLastCall
  abi::RowPlaces places;  // with abi::kFlagPlaces
};
static_assert(offsetof(Step, places) == 48);

// A step that may copy. Its kernels have names of their own, because a kernel that can copy begins 3 us
// later, also if it copies nothing (2 x H100, 2026-11-25).
struct StagedStep : Step {
  abi::StagingWords* staging = nullptr;  // of the slot; null: nothing is copied
  Copies copies;
};
static_assert(sizeof(StagedStep) % 8 == 0);

// A step that copies a few inputs, of so many words of 8 bytes, and no outputs: the choices and weights of an
// operation whose rows lie in registered memory. One small block copies them, so it needs no StagingWords,
// and its parameters are short.
struct FewWords {
  std::uint64_t* to = nullptr;
  const std::uint64_t* from = nullptr;
  std::uint32_t count = 0;
};
inline constexpr std::uint32_t kMostFewPieces = 3;
inline constexpr std::uint32_t kMostFewWords = 2048;  // of all pieces
struct FewStep : Step {
  FewWords in[kMostFewPieces];
};

// Whether the step is one, and which.
inline bool few_of(const StagedStep& step, FewStep& few) {
  const Copies& c = step.copies;
  if (step.staging == nullptr || !step.calls || c.num_out != 0 || c.num_in == 0 || c.num_in > kMostFewPieces)
    return false;
  static_cast<Step&>(few) = step;
  std::uint64_t all = 0;
  for (std::uint32_t i = 0; i < c.num_in; ++i) {
    const Piece& piece = c.in[i];
    if (piece.counted == Rows::kTokens ? c.num_tokens_at != nullptr : piece.counted != Rows::kGiven)
      return false;
    const std::uint32_t tokens = c.num_tokens < c.most_tokens ? c.num_tokens : c.most_tokens;
    const std::uint64_t bytes =
        std::uint64_t{piece.counted == Rows::kTokens ? tokens : piece.rows} * piece.row_bytes;
    const auto places =
        reinterpret_cast<std::uintptr_t>(piece.to) | reinterpret_cast<std::uintptr_t>(piece.from);
    if ((places | bytes) % sizeof(std::uint64_t) != 0 || piece.renumber != 0 || piece.columns != 0)
      return false;
    all += bytes / sizeof(std::uint64_t);
    if (all > kMostFewWords) return false;
    few.in[i] = {reinterpret_cast<std::uint64_t*>(piece.to),
                 reinterpret_cast<const std::uint64_t*>(piece.from),
                 static_cast<std::uint32_t>(bytes / sizeof(std::uint64_t))};
  }
  return true;
}

// The kernels, one for each kind of operation, and two more for each kind that copies: all do what the step
// says, and differ in the name that a profiler shows (epd::dispatch). A C++ compiler gives them these names.
// In order: dispatch, combine, barrier, which copy nothing; two that copy few words; two that copy pieces.
enum class Copying : std::uint8_t { kNothing, kFew, kPieces };
inline constexpr std::uint32_t kNumKernels = 7;
inline constexpr const char* kKernelNames[kNumKernels] = {
    "_ZN3epd8dispatchENS_14stream_kernels4StepE",      "_ZN3epd7combineENS_14stream_kernels4StepE",
    "_ZN3epd7barrierENS_14stream_kernels4StepE",       "_ZN3epd8dispatchENS_14stream_kernels7FewStepE",
    "_ZN3epd7combineENS_14stream_kernels7FewStepE",    "_ZN3epd8dispatchENS_14stream_kernels10StagedStepE",
    "_ZN3epd7combineENS_14stream_kernels10StagedStepE"};
inline constexpr const char* kKernelTitles[kNumKernels] = {"epd::dispatch", "epd::combine", "epd::barrier",
                                                           "epd::dispatch", "epd::combine", "epd::dispatch",
                                                           "epd::combine"};
constexpr std::uint32_t kernel_of(abi::Op op, Copying copying) {
  const std::uint32_t kind = op == abi::Op::kDispatch ? 0 : op == abi::Op::kCombine ? 1 : 2;
  if (copying == Copying::kNothing || kind == 2) return kind;
  return kind + (copying == Copying::kFew ? 3 : 5);
}
constexpr Copying copying_of(std::uint32_t kernel) {
  return kernel < 3 ? Copying::kNothing : kernel < 5 ? Copying::kFew : Copying::kPieces;
}

// How a step is launched: by one thread, or, if it copies, by blocks of many.
struct Launch {
  std::uint32_t blocks = 1;
  std::uint32_t threads = 1;
  std::uint32_t shared_bytes = 0;
};
inline constexpr std::uint32_t kCopyThreads = 512;
inline constexpr std::uint32_t kLoadsAtOnce = 4;  // of a thread that copies, before its first store
inline constexpr std::uint32_t kCallThreads =
    32;  // of a FewStep: the warp that makes the call copies nothing
inline constexpr std::uint32_t kFewThreads = kCallThreads + 256;
inline constexpr std::uint32_t kMostCopyBlocks = 128;
// Blocks that also wait for the operation hold SMs meanwhile. A GPU keeps as many free of operations.
inline constexpr std::uint32_t kMostCopyBlocksThatWait = 32;
inline constexpr std::uint32_t kMostCopyBlocksOfMany = 256;  // of a large operation, which do not wait
inline constexpr std::uint32_t kSharedWords = 24 + 12 * kMostPiecesOut;  // bytes of SharedWords

constexpr std::uint64_t most_bytes(const Copies& c, const Piece* pieces, std::uint32_t count) {
  std::uint64_t bytes = 0;
  for (std::uint32_t i = 0; i < count; ++i) {
    const Piece& piece = pieces[i];
    std::uint64_t rows = piece.rows;
    if (piece.counted == Rows::kTokens) rows = c.num_tokens_at != nullptr ? c.most_tokens : c.num_tokens;
    if (piece.counted == Rows::kReceived) rows = std::uint64_t{c.blocks} * c.room;
    if (piece.counted == Rows::kUnused) rows = std::uint64_t{c.blocks} * c.own_block;
    bytes += rows * piece.row_bytes;
  }
  return bytes;
}

constexpr std::uint64_t most_bytes(const Copies& c) {
  const std::uint64_t in = most_bytes(c, c.in, c.num_in);
  const std::uint64_t out = most_bytes(c, c.out, c.num_out);
  return in < out ? out : in;
}
constexpr std::uint32_t most_blocks(const StagedStep& step) {
  if (step.copies.large != 0) return kMostCopyBlocksOfMany;
  return step.wait != Wait::kNothing ? kMostCopyBlocksThatWait : kMostCopyBlocks;
}

constexpr Launch launch_of(const FewStep&) {
  return {1, kFewThreads, 0};
}
constexpr Launch launch_of(const StagedStep& step) {
  const Copies& c = step.copies;
  if (step.staging == nullptr) return {};
  const std::uint64_t parts = (most_bytes(c) + kLeastPart - 1) / kLeastPart;
  const std::uint32_t most = most_blocks(step);
  Launch launch;
  launch.blocks = parts == 0 ? 1 : parts < most ? static_cast<std::uint32_t>(parts) : most;
  launch.threads = kCopyThreads;
  // The step, SharedWords, and what is behind them.
  launch.shared_bytes = sizeof(StagedStep) + kSharedWords + 4 * (kCopyThreads + c.blocks);
  return launch;
}

}  // namespace epd::stream_kernels
