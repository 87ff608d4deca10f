// e / (E/R) without a division instruction. Internal.
#pragma once

#include <cstdint>

namespace epd::kernels::host {

// Exact for any 32-bit dividend and a divisor below 2^31: the error of the reciprocal, at most
// dividend / 2^63, stays below 1 / divisor.
class RankOfExpert {
 public:
  explicit RankOfExpert(std::uint32_t experts_per_rank)
      : reciprocal_((std::uint64_t{1} << 63) / experts_per_rank + 1) {}

  std::uint32_t operator()(std::uint32_t expert) const {
    __extension__ using Wide = unsigned __int128;
    return static_cast<std::uint32_t>((Wide{reciprocal_} * expert) >> 63);
  }

 private:
  std::uint64_t reciprocal_;
};

}  // namespace epd::kernels::host
