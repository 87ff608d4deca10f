// Counter-based pseudo-random numbers: value i of a stream needs no other, so every process can make any
// other process's data again from the seed.
#pragma once

#include <cstdint>

namespace epd::kit {

// Bijective mixing of 64 bits (the finaliser of splitmix64).
constexpr std::uint64_t mix64(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

// A seed for a part of something seeded.
constexpr std::uint64_t derive(std::uint64_t seed, std::uint64_t part) {
  return mix64(seed + 0x9e3779b97f4a7c15ull * (part + 1));
}

class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(mix64(seed)) {}
  std::uint64_t next() { return mix64(state_ += 0x9e3779b97f4a7c15ull); }
  // [0, bound), bound > 0.
  std::uint32_t below(std::uint32_t bound) {
    return static_cast<std::uint32_t>((static_cast<unsigned __int128>(next()) * bound) >> 64);
  }
  // [0, 1)
  double unit() { return static_cast<double>(next() >> 11) * 0x1.0p-53; }
  // Near enough to a normal distribution for weights: mean 0, variance 1.
  float normal() {
    const std::uint64_t bits = next();
    const auto sum =
        static_cast<float>((bits & 0xffff) + (bits >> 16 & 0xffff) + (bits >> 32 & 0xffff) + (bits >> 48));
    return (sum * 0x1.0p-16f - 2.0f) * 1.7320508f;
  }

 private:
  std::uint64_t state_;
};

}  // namespace epd::kit
