// Arguments of the kernels in ceiling.cuh, for device and host code.
#pragma once

#include <cstdint>

namespace epd::gpu_test {

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
