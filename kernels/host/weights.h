// Sums of a token's weights, in order of k from +0.0. Internal.
#pragma once

#include <bit>
#include <cstdint>

namespace epd::kernels::host {

// The only NaN of a sum of weights. Which payload survives an addition depends on the compiler. Rounding this
// one to bf16 by an integer addition cannot carry out of it.
inline constexpr std::uint32_t kCanonicalNan = 0x7fc00000u;

inline float canonical(float weight) {
  return weight == weight ? weight : std::bit_cast<float>(kCanonicalNan);
}

// Returns the sum over the choices that name `expert`.
inline float weight_of_expert(const std::int32_t* choices, const float* weights, std::uint32_t topk,
                              std::uint32_t expert) {
  float sum = 0.0f;
  for (std::uint32_t k = 0; k < topk; ++k) {
    if (static_cast<std::uint32_t>(choices[k]) == expert) sum += weights[k];
  }
  return canonical(sum);
}

// Returns the sum over the choices that live on the rank whose first expert is `first_expert`.
inline float weight_of_rank(const std::int32_t* choices, const float* weights, std::uint32_t topk,
                            std::uint32_t first_expert, std::uint32_t experts_per_rank) {
  float sum = 0.0f;
  for (std::uint32_t k = 0; k < topk; ++k) {
    if (static_cast<std::uint32_t>(choices[k]) - first_expert < experts_per_rank) sum += weights[k];
  }
  return canonical(sum);
}

}  // namespace epd::kernels::host
