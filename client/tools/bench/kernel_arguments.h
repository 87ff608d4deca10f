// Constants and arguments that epbench's kernels share with their host code.
#pragma once

#include <cstdint>

namespace epd::gpu_test {

// The start barrier, at which streams wait for each other.
// One counter for each device, or one for all: [devices], how often each device has come to the start
// barrier.
inline constexpr std::uint32_t kMaxBarrierDevices = 32;
inline constexpr std::uint32_t kBarrierThreads = 32;
inline constexpr std::uint64_t kGateNs = 20'000'000'000;  // then it gives up: streams go on, each by itself
struct BarrierLines {
  std::uint64_t* at[kMaxBarrierDevices];
  std::uint32_t count;
};

// Plain copies, whose speed is the ceiling.
inline constexpr std::uint32_t kProbeRow = 14336;
inline constexpr std::uint32_t kProbeWarps = 14;
inline constexpr std::uint32_t kMaxProbeTargets = 8;
inline constexpr std::uint32_t kProbeThreads = kProbeWarps * 32;
inline constexpr std::uint32_t kProbeShared = kProbeWarps * kProbeRow;  // bytes, dynamic
inline constexpr std::uint32_t kPullPiece = kProbeRow / 4;              // bytes at a time, as combine pulls

struct ProbeTargets {
  std::uint8_t* at[kMaxProbeTargets];
  std::uint32_t count;
  std::uint32_t rows_each;
};

}  // namespace epd::gpu_test

namespace epd::bench {

// The GEMM.
inline constexpr std::uint32_t kGemmTile = 128;  // rows and columns of C to a CTA; M and N are multiples
inline constexpr std::uint32_t kGemmDepth =
    32;  // of A and B that are in shared memory at a time; K is a multiple
inline constexpr std::uint32_t kGemmThreads = 256;

// Values from one product's matrix to the next one's.
struct GemmStrides {
  std::uint64_t a = 0;
  std::uint64_t b = 0;
  std::uint64_t c = 0;
};

// Attention.
inline constexpr std::uint32_t kHeadSize = 128;  // values of a head
inline constexpr std::uint32_t kAttentionThreads = 256;

// Decode: a CTA reads so many tokens of one head of one sequence; a sequence's length is a multiple.
inline constexpr std::uint32_t kSplitTokens = 512;

// Prefill: queries of a CTA, of which each warp has 16, and keys that are in shared memory at a time. The
// number of tokens is a multiple of both.
inline constexpr std::uint32_t kQueries = 128;
inline constexpr std::uint32_t kKeys = 32;

inline constexpr std::uint32_t kRandomThreads = 256;
inline constexpr std::uint32_t kRandomCtas = 1024;

}  // namespace epd::bench
