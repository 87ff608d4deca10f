// What the GEMM's kernel and its host code agree on.
#pragma once

#include <cstdint>

namespace epd::bench {

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

}  // namespace epd::bench
