// The host's part of the CUDA kernels; the kernels themselves need a GPU (tests/gpu).
#include "kernels/cuda.h"

#include "cuda/common/range.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <string_view>

namespace epd::kernels::cuda {
namespace {

constexpr std::size_t kHopperBytes = std::size_t{227} * 1024;

Operation operation(bool per_expert, std::uint32_t hidden = 7168) {
  Operation op;
  op.shape.num_ranks = 8;
  op.shape.num_experts = 256;
  op.shape.topk = 8;
  op.shape.hidden = hidden;
  op.shape.per_expert = per_expert;
  op.shape.format = {true, ScaleFormat::kFloat32, hidden, hidden * 2, hidden, hidden / 128 * 4};
  return op;
}

TEST(CudaImage, IsAFatBinaryOfAllKernels) {
  const std::span<const std::byte> image = cuda::image();
  ASSERT_GT(image.size(), 4096u);
  constexpr std::array<unsigned char, 4> kMagic = {0x50, 0xed, 0x55, 0xba};  // 0xBA55ED50
  EXPECT_EQ(std::memcmp(image.data(), kMagic.data(), kMagic.size()), 0);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(image.data()) % 16, 0u);
  const std::string_view bytes(reinterpret_cast<const char*>(image.data()), image.size());
  for (const char* const name : kKernelNames) {
    const std::string_view whole(name, std::strlen(name) + 1);
    EXPECT_NE(bytes.find(whole), std::string_view::npos) << name;
  }
}

TEST(CudaImage, ChecksNoRanges) {
  const std::span<const std::byte> image = cuda::image();
  const std::string_view bytes(reinterpret_cast<const char*>(image.data()), image.size());
  EXPECT_EQ(bytes.find("allowed: "), std::string_view::npos);
  EXPECT_FALSE(cuda::image_checks_ranges());
  int evaluated = 0;
  EPD_BELOW(++evaluated, 0);
  EPD_BELOW_OR_NONE(++evaluated, 0);
  EPD_AT_MOST(++evaluated, 0);
  EXPECT_EQ(evaluated, 0);
}

TEST(CudaConfigure, DividesWhatThereIs) {
  for (const Kind kind : {Kind::kDispatch, Kind::kCombine}) {
    for (const bool per_expert : {false, true}) {
      for (const std::uint32_t sms : {1u, 24u, 132u}) {
        Operation op = operation(per_expert);
        ASSERT_TRUE(configure(kind, kHopperBytes, sms, op)) << per_expert << " " << sms;
        const WorkDivision& division = op.division;
        EXPECT_EQ(division.ctas, sms);
        EXPECT_LE(division.threads, kMaxThreads);
        EXPECT_LE(division.shared_bytes + kStaticBytes, kHopperBytes);
        EXPECT_LE(division.header_bytes + division.warps * division.stages * division.stage_bytes,
                  division.shared_bytes);
        EXPECT_EQ(division.header_bytes % 128, 0u);
        EXPECT_EQ(division.stage_bytes % 128, 0u);
        EXPECT_GE(division.stages, 1u);
        EXPECT_GE(division.warps, 1u);
        EXPECT_LT(division.warps, division.threads / 32 + (kind == Kind::kCombine));
      }
    }
  }
}

// Kernels multiply by these in place of a division.
TEST(CudaConfigure, ReciprocalsDivide) {
  for (std::uint32_t ranks = 1; ranks <= kMaxRanks; ++ranks) {
    for (const std::uint32_t experts : {1u, 2u, 7u, 32u}) {  // of each rank
      Operation op = operation(true);
      op.shape.num_ranks = ranks;
      op.shape.num_experts = ranks * experts;
      op.shape.topk = ranks;
      op.inbox.max_tokens = 128;
      const std::uint32_t sms = ranks + 1;
      ASSERT_TRUE(configure(Kind::kCombine, kHopperBytes, sms, op)) << ranks << " " << experts;
      const std::uint32_t pieces = (7168 + 1023) / 1024;
      for (std::uint32_t n = 0; n < 512 * 32; n += 1 + n / 97) {
        EXPECT_EQ(n / op.shape.experts_per_rank_divisor, n / experts);
        EXPECT_EQ(n / op.shape.num_ranks_divisor, n / ranks);
        EXPECT_EQ(n / op.shape.other_ranks_divisor, n / std::max(ranks - 1, 1u));
        EXPECT_EQ(n / op.shape.count_words_divisor, n / ((experts + 3) / 4));
        EXPECT_EQ(n / op.division.senders_divisor, n / (sms - 1));
        EXPECT_EQ(n / op.division.pieces_divisor, n / pieces);
      }
      ASSERT_TRUE(configure(Kind::kDispatch, kHopperBytes, sms, op)) << ranks << " " << experts;
      EXPECT_EQ(op.division.row_steps, 7168u / 128 / 8);
      for (std::uint32_t n = 0; n < 128; ++n) {
        EXPECT_EQ(n / op.division.stages_divisor, n / op.division.stages);
        EXPECT_EQ(n / op.division.row_steps_divisor, n / op.division.row_steps);
      }
    }
  }
}

TEST(CudaConfigure, LowLatencyLeavesWarpsThatCopyNothing) {
  for (const std::size_t bytes : {kHopperBytes, std::size_t{163} * 1024}) {
    for (const std::uint32_t sms : {1u, 2u, 32u}) {
      for (const std::uint32_t tokens : {1u, 128u, 256u}) {
        Operation op = operation(true);
        op.inbox.max_tokens = tokens;
        const std::uint32_t words = (tokens + 31) / 32 * (256 + 2 * 8) + (sms == 1 ? 8 * 256 : 0);
        ASSERT_TRUE(configure(Kind::kDispatch, bytes, sms, op)) << sms << " " << tokens;
        const std::uint32_t row = 7168 + 224 + 2 * 32;  // as it lies in its slot
        EXPECT_LE(op.division.warps + 2, kMaxThreads / 32) << "metadata and signal warps";
        EXPECT_LE(op.division.warps, 2 * op.division.stages) << "two rows land in each stage";
        EXPECT_GE(op.division.stage_bytes, row + std::max(2 * row, 14336u)) << "behind one that leaves, or x";
        EXPECT_GE(op.division.header_bytes, words * 4) << "sets of tokens";
        EXPECT_LE(op.division.header_bytes + op.division.stages * op.division.stage_bytes,
                  op.division.shared_bytes);
        op.shape.format = {false, ScaleFormat::kFloat32, 7168, 14336, 14336, 0};
        ASSERT_TRUE(configure(Kind::kDispatch, bytes, sms, op)) << sms << " " << tokens;
        EXPECT_EQ(op.division.stages, 1u) << "of each warp";
        EXPECT_LE(op.division.header_bytes + op.division.warps * op.division.stage_bytes,
                  op.division.shared_bytes);
        ASSERT_TRUE(configure(Kind::kCombine, bytes, sms, op)) << sms << " " << tokens;
        EXPECT_LT(op.division.warps, kMaxThreads / 32) << "the signal warp";
        EXPECT_GE(op.division.stage_bytes, 2 * 2048u) << "a piece that is added up, and the next";
        EXPECT_LE(op.division.header_bytes + op.division.warps * op.division.stage_bytes,
                  op.division.shared_bytes);
        op.shape.hidden = abi::kMaxHidden + 128;
        EXPECT_FALSE(configure(Kind::kCombine, bytes, sms, op)) << "more pieces than there are tags";
      }
    }
  }
}

// As large as abi::InboxLayout allows them.
TEST(CudaConfigure, HoldsTheMetadataOfEveryInbox) {
  struct Limit {
    std::uint32_t ranks, experts, tokens;
  };
  for (const Limit limit :
       {Limit{4, 2048, 128}, Limit{32, 256, 512}, Limit{2, 512, 512}, Limit{16, 512, 512}}) {
    for (const std::size_t bytes : {kHopperBytes, std::size_t{163} * 1024}) {
      for (const std::uint32_t sms : {1u, 16u}) {
        Operation op = operation(true);
        op.shape.num_ranks = limit.ranks;
        op.shape.num_experts = limit.experts;
        op.inbox.max_tokens = limit.tokens;
        EXPECT_TRUE(configure(Kind::kDispatch, bytes, sms, op)) << limit.experts << " " << sms;
        EXPECT_TRUE(configure(Kind::kCombine, bytes, sms, op)) << limit.experts << " " << sms;
      }
    }
  }
}

TEST(CudaConfigure, RefusesWhatDoesNotFit) {
  Operation op = operation(false);
  EXPECT_FALSE(configure(Kind::kDispatch, kStaticBytes, 8, op));
  EXPECT_FALSE(configure(Kind::kDispatch, kStaticBytes + 1024, 8, op));
  EXPECT_FALSE(configure(Kind::kCombine, kStaticBytes + 1024, 8, op));
  op = operation(false, 128 * 1024);  // a row and its cast: 384 KiB
  EXPECT_FALSE(configure(Kind::kDispatch, kHopperBytes, 8, op));
  EXPECT_TRUE(configure(Kind::kCombine, kHopperBytes, 8, op));  // takes rows in pieces
  op = operation(false);
  op.shape.num_ranks = 2 * kMaxRanks;
  EXPECT_FALSE(configure(Kind::kDispatch, kHopperBytes, 8, op));
}

TEST(CudaWorkspace, GrowsWithTheCtas) {
  const Shape shape = operation(true).shape;
  EXPECT_EQ(workspace_bytes(shape, 24) - workspace_bytes(shape, 23), shape.num_experts * 4u);
}

}  // namespace
}  // namespace epd::kernels::cuda
