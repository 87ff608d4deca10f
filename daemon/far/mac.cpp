#include "far/mac.h"

#include "common/status.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <array>
#include <cstring>

namespace epd::far {

using abi::FarHeader;

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

}  // namespace epd::far
