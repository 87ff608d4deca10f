// Common framing of the two SOCK_SEQPACKET protocols: attach (client and supervisor) and link
// (supervisor and engine). One packet is one message: a WireHeader, then a fixed-size struct.
// Descriptors travel beside it as SCM_RIGHTS, in the order that each message documents.
#pragma once

#include "proto/session.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace epd::abi {

inline constexpr std::uint32_t kWireMagic = 0x57445045;  // "EPDW"
inline constexpr std::uint32_t kAbiVersion = 3;
inline constexpr std::uint32_t kAbiVersionMin = 3;
inline constexpr std::size_t kMaxMessageBytes = 2048;
inline constexpr std::size_t kMaxMessageFds = 24;  // even: padding after an odd one would let in one more
inline constexpr std::size_t kTextBytes = 512;
inline constexpr std::size_t kDeviceNameBytes = 32;

enum class DeviceKind : std::uint32_t { kHost = 0, kCuda = 1 };

struct WireHeader {
  std::uint32_t magic;
  std::uint16_t type;
  std::uint16_t num_fds;
  std::uint32_t bytes;       // of the whole packet
  std::uint32_t request_id;  // echoed in the reply; 0 = not a reply
};
static_assert(sizeof(WireHeader) == 16);

// Copies text into a fixed field, always zero-terminated, cut if too long.
template <std::size_t N>
void set_text(char (&field)[N], const char* text, std::size_t length) {
  const std::size_t n = length < N - 1 ? length : N - 1;
  std::memcpy(field, text, n);
  std::memset(field + n, 0, N - n);
}

// Length of a field that may lack its terminator.
template <std::size_t N>
std::size_t text_length(const char (&field)[N]) {
  std::size_t n = 0;
  while (n < N && field[n] != '\0') ++n;
  return n;
}

namespace detail {
constexpr std::uint64_t mix(std::uint64_t hash, std::uint64_t value) {
  for (int i = 0; i < 8; ++i) {
    hash ^= (value >> (8 * i)) & 0xff;
    hash *= 0x100000001b3ull;
  }
  return hash;
}
}  // namespace detail

}  // namespace epd::abi
