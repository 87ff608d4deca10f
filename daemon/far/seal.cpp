#include "far/seal.h"

#include "common/status.h"
#include "kernels/crc32c.h"
#include "proto/far_statistics.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <numeric>

namespace epd::far {

using abi::FarCheck;
using abi::FarHeader;
using abi::FarType;
using kernels::crc32c;

// ---- checksums

namespace {

std::uint32_t crc_of(const FarHeader& header) {
  return crc32c(std::as_bytes(std::span(&header, 1)).first(offsetof(FarHeader, header_crc)));
}

// For a batch, the CRC of its records' CRCs, which are at the ends of the records. Whoever moves the records
// makes and checks those.
std::uint32_t crc_of(const FarHeader& header, std::span<const std::byte> body, FarCheck check) {
  const bool batch =
      header.type == FarType::kRows || header.type == FarType::kAsk || header.type == FarType::kSums;
  if (batch && check != FarCheck::kCrc) return 0;
  const std::size_t stride = batch && header.records != 0 ? body.size() / header.records : 0;
  if (stride < abi::kFarCrcBytes) return crc32c(body);
  // Another core has written them, so loads are slow; prefetches overlap them.
  const std::byte* const first = body.data() + stride - abi::kFarCrcBytes;
  for (std::size_t i = 0; i < header.records; ++i) __builtin_prefetch(first + i * stride);
  std::uint32_t crc = 0;
  for (std::size_t i = 0; i < header.records; ++i) crc = crc32c({first + i * stride, abi::kFarCrcBytes}, crc);
  return crc;
}

}  // namespace

void seal(FarHeader& header, std::span<const std::byte> body, FarCheck check) {
  header.body_crc = crc_of(header, body, check);
  header.header_crc = crc_of(header);
}

bool header_is_whole(const FarHeader& header) {
  return header.header_crc == crc_of(header);
}

bool body_is_whole(const FarHeader& header, std::span<const std::byte> body, FarCheck check) {
  return header.body_crc == crc_of(header, body, check);
}

// ---- tokens

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

// ---- codes

namespace {

using Code = std::array<unsigned char, sizeof(FarHeader::mac)>;

const unsigned char* raw(std::span<const std::byte> bytes) {
  return reinterpret_cast<const unsigned char*>(bytes.data());
}

Code code_of(void* context, const FarHeader& header, std::span<const std::byte> body) {
  auto* const cipher = static_cast<EVP_CIPHER_CTX*>(context);
  unsigned char nonce[12] = {};
  std::memcpy(nonce, &header.number, sizeof(header.number));
  nonce[8] = header.type == abi::FarType::kGreeting ? 1 : 0;
  Code code;
  int bytes = 0;
  bool good = EVP_EncryptInit_ex(cipher, nullptr, nullptr, nullptr, nonce) == 1;
  const auto covered = std::as_bytes(std::span(&header, 1)).first(offsetof(FarHeader, mac));
  for (const std::span<const std::byte> part : {covered, body}) {
    if (!part.empty())
      good =
          good && EVP_EncryptUpdate(cipher, nullptr, &bytes, raw(part), static_cast<int>(part.size())) == 1;
  }
  good = good && EVP_EncryptFinal_ex(cipher, code.data(), &bytes) == 1;
  EPD_CHECK(good && EVP_CIPHER_CTX_ctrl(cipher, EVP_CTRL_AEAD_GET_TAG, static_cast<int>(code.size()),
                                        code.data()) == 1);
  return code;
}

}  // namespace

void MacKey::Free::operator()(void* context) const {
  EVP_CIPHER_CTX_free(static_cast<EVP_CIPHER_CTX*>(context));
}

MacKey::MacKey(const EpochKey& key, EngineId from, EngineId to, std::uint64_t began_ns)
    : context_(EVP_CIPHER_CTX_new()) {
  constexpr std::uint64_t kLabel = 0x3163616d64706531;  // of this use of the epoch's key
  const std::array<std::uint64_t, 4> direction{kLabel, from, to, began_ns};
  unsigned char derived[EVP_MAX_MD_SIZE];
  const bool good = context_ != nullptr &&
                    HMAC(EVP_sha256(), key.data(), sizeof(key), raw(std::as_bytes(std::span(direction))),
                         sizeof(direction), derived, nullptr) != nullptr &&
                    EVP_EncryptInit_ex(static_cast<EVP_CIPHER_CTX*>(context_.get()), EVP_aes_128_gcm(),
                                       nullptr, derived, nullptr) == 1;
  OPENSSL_cleanse(derived, sizeof(derived));
  EPD_CHECK(good);
}

void MacKey::sign(FarHeader& header, std::span<const std::byte> body) const {
  const Code code = code_of(context_.get(), header, body);
  std::memcpy(header.mac, code.data(), code.size());
}

bool MacKey::verify(const FarHeader& header, std::span<const std::byte> body) const {
  const Code code = code_of(context_.get(), header, body);
  return CRYPTO_memcmp(header.mac, code.data(), code.size()) == 0;
}

// ---- judge

const char* drop_name(Drop drop) {
  static_assert(kNumDrops == abi::kNumFarDrops);
  const auto index = static_cast<std::uint32_t>(drop);
  return index < kNumDrops ? abi::kFarDropNames[index] : "unknown";
}

std::uint64_t DropCounts::total() const {
  return std::accumulate(counts_.begin(), counts_.end(), std::uint64_t{0});
}

bool DropCounts::any_fault() const {
  for (std::uint32_t i = 0; i < kNumDrops; ++i) {
    if (counts_[i] != 0 && !happens(static_cast<Drop>(i))) return true;
  }
  return false;
}

std::string DropCounts::text() const {
  std::string text;
  for (std::uint32_t i = 0; i < kNumDrops; ++i) {
    if (counts_[i] == 0) continue;
    if (!text.empty()) text += ", ";
    text += std::string(drop_name(static_cast<Drop>(i))) + ' ' + std::to_string(counts_[i]);
  }
  return text.empty() ? "none" : text;
}

FarSizes::FarSizes(const abi::GroupShape& shape, std::uint32_t most_ranks, std::uint32_t bytes,
                   std::uint32_t window_bytes) {
  for (std::uint32_t i = 0; i < shape.num_formats(); ++i) {
    const abi::GroupShape of = shape.with_format(i);
    row_stride[i] =
        static_cast<std::uint32_t>(abi::far_row_bytes(of.row_bytes() + of.scale_bytes(), of.topk));
  }
  ask_stride = static_cast<std::uint32_t>(abi::far_ask_bytes(shape.topk));
  const std::uint64_t sum_bytes = std::uint64_t{shape.hidden} * 2;
  sum_stride[0] = static_cast<std::uint32_t>(abi::far_sum_bytes(sum_bytes, 0));
  sum_stride[1] = static_cast<std::uint32_t>(abi::far_sum_bytes(sum_bytes, shape.topk));
  const std::uint32_t sums = std::min(shape.topk, most_ranks);  // of a token, at one node
  batch_bytes = std::max(
      {bytes, *std::max_element(row_stride.begin(), row_stride.end()), ask_stride, sum_stride[1] * sums});
  window = std::max(2u, window_bytes / std::max(1u, bytes));
}

}  // namespace epd::far
