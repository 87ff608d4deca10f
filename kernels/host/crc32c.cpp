#include "kernels/crc32c.h"

#include "host/crc32c_fold.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_acle.h>
#include <sys/auxv.h>
#endif

namespace epd::kernels {
namespace {

constexpr std::array<std::uint32_t, 256> make_table() {
  std::array<std::uint32_t, 256> table{};
  for (std::uint32_t i = 0; i < 256; ++i) {
    table[i] = i;
    for (int bit = 0; bit < 8; ++bit) table[i] = host::times_x(table[i]);
  }
  return table;
}
constexpr std::array<std::uint32_t, 256> kTable = make_table();

std::uint32_t by_table(std::uint32_t crc, const std::byte* data, std::size_t bytes) {
  for (std::size_t i = 0; i < bytes; ++i)
    crc = crc >> 8 ^ kTable[(crc ^ std::to_integer<std::uint32_t>(data[i])) & 0xff];
  return crc;
}

[[maybe_unused]] std::uint64_t word_at(const std::byte* data) {
  std::uint64_t word = 0;
  std::memcpy(&word, data, sizeof(word));
  return word;
}

#if defined(__x86_64__)

// The instruction takes 8 bytes in each cycle and answers after three. So three stretches are worked on at
// once. A product without carries moves the CRC of one to the end of the next.
constexpr std::size_t kStretch = 1024;

// The instruction multiplies by x^32, and a product of two reflected values lacks one factor x.
constexpr std::uint32_t kByOne = host::power_of_x(8 * kStretch - 33);
constexpr std::uint32_t kByTwo = host::power_of_x(2 * 8 * kStretch - 33);

__attribute__((target("sse4.2,pclmul"))) std::uint32_t moved(std::uint64_t crc, std::uint32_t by) {
  const __m128i product = _mm_clmulepi64_si128(_mm_cvtsi64_si128(static_cast<long long>(crc)),
                                               _mm_cvtsi32_si128(static_cast<int>(by)), 0);
  return static_cast<std::uint32_t>(_mm_crc32_u64(0, static_cast<std::uint64_t>(_mm_cvtsi128_si64(product))));
}

__attribute__((target("sse4.2,pclmul"))) std::uint32_t by_instruction(std::uint32_t crc,
                                                                      const std::byte* data,
                                                                      std::size_t bytes) {
  for (; bytes >= 3 * kStretch; bytes -= 3 * kStretch, data += 3 * kStretch) {
    std::uint64_t first = crc;
    std::uint64_t second = 0;
    std::uint64_t third = 0;
    for (std::size_t i = 0; i < kStretch; i += 8) {
      first = _mm_crc32_u64(first, word_at(data + i));
      second = _mm_crc32_u64(second, word_at(data + kStretch + i));
      third = _mm_crc32_u64(third, word_at(data + 2 * kStretch + i));
    }
    crc = moved(first, kByTwo) ^ moved(second, kByOne) ^ static_cast<std::uint32_t>(third);
  }
  std::uint64_t wide = crc;
  for (; bytes >= 8; bytes -= 8, data += 8) wide = _mm_crc32_u64(wide, word_at(data));
  crc = static_cast<std::uint32_t>(wide);
  for (; bytes != 0; --bytes, ++data) crc = _mm_crc32_u8(crc, std::to_integer<std::uint8_t>(*data));
  return crc;
}

__attribute__((target("avx512f,vpclmulqdq"))) std::uint32_t by_folding(std::uint32_t crc,
                                                                       const std::byte* data,
                                                                       std::size_t bytes) {
  constexpr std::size_t kBytes = host::Crc32cFold::kBytes;
  if (bytes < 2 * kBytes) return by_instruction(crc, data, bytes);
  host::Crc32cFold fold(crc);
  for (; bytes >= kBytes; data += kBytes, bytes -= kBytes)
    fold.add({_mm512_loadu_si512(data), _mm512_loadu_si512(data + 64), _mm512_loadu_si512(data + 128),
              _mm512_loadu_si512(data + 192)});
  std::byte left[kBytes];
  fold.store(left);
  return by_instruction(by_instruction(0, left, kBytes), data, bytes);
}

void add_ways(std::vector<Crc32cWay>& ways) {
  if (__builtin_cpu_supports("sse4.2") == 0 || __builtin_cpu_supports("pclmul") == 0) return;
  ways.push_back(by_instruction);
  if (__builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("vpclmulqdq") != 0)
    ways.push_back(by_folding);
}

#elif defined(__aarch64__)

__attribute__((target("+crc"))) std::uint32_t by_instruction(std::uint32_t crc, const std::byte* data,
                                                             std::size_t bytes) {
  for (; bytes >= 8; bytes -= 8, data += 8) crc = __crc32cd(crc, word_at(data));
  for (; bytes != 0; --bytes, ++data) crc = __crc32cb(crc, std::to_integer<std::uint8_t>(*data));
  return crc;
}

void add_ways(std::vector<Crc32cWay>& ways) {
  if ((::getauxval(AT_HWCAP) & HWCAP_CRC32) != 0) ways.push_back(by_instruction);
}

#else

void add_ways(std::vector<Crc32cWay>&) {}

#endif

}  // namespace

std::vector<Crc32cWay> crc32c_ways() {
  std::vector<Crc32cWay> ways{by_table};
  add_ways(ways);
  return ways;
}

std::uint32_t crc32c(std::span<const std::byte> bytes, std::uint32_t before) {
  static const Crc32cWay fastest = crc32c_ways().back();
  return ~fastest(~before, bytes.data(), bytes.size());
}

}  // namespace epd::kernels
