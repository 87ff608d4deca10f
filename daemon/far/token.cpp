#include "far/token.h"

#include <bit>
#include <cstring>

namespace epd::far {
namespace {

// SipHash's state (Aumasson, Bernstein 2012).
struct State {
  std::uint64_t v0, v1, v2, v3;

  void round() {
    v0 += v1;
    v1 = std::rotl(v1, 13) ^ v0;
    v0 = std::rotl(v0, 32);
    v2 += v3;
    v3 = std::rotl(v3, 16) ^ v2;
    v0 += v3;
    v3 = std::rotl(v3, 21) ^ v0;
    v2 += v1;
    v1 = std::rotl(v1, 17) ^ v2;
    v2 = std::rotl(v2, 32);
  }
  void take(std::uint64_t word) {
    v3 ^= word;
    round();
    round();
    v0 ^= word;
  }
};

}  // namespace

std::uint64_t sip_hash(const EpochKey& key, std::span<const std::byte> bytes) {
  State state{key[0] ^ 0x736f6d6570736575ull, key[1] ^ 0x646f72616e646f6dull, key[0] ^ 0x6c7967656e657261ull,
              key[1] ^ 0x7465646279746573ull};
  std::size_t at = 0;
  for (; at + 8 <= bytes.size(); at += 8) {
    std::uint64_t word = 0;
    std::memcpy(&word, bytes.data() + at, 8);
    state.take(word);
  }
  std::uint64_t last = static_cast<std::uint64_t>(bytes.size()) << 56;
  if (at < bytes.size()) std::memcpy(&last, bytes.data() + at, bytes.size() - at);
  state.take(last);
  state.v2 ^= 0xff;
  for (int i = 0; i < 4; ++i) state.round();
  return state.v0 ^ state.v1 ^ state.v2 ^ state.v3;
}

std::uint64_t message_token(const EpochKey& key, std::uint64_t from_engine, std::uint64_t to_engine) {
  const std::array<std::uint64_t, 2> engines{from_engine, to_engine};
  return sip_hash(key, std::as_bytes(std::span(engines)));
}

}  // namespace epd::far
