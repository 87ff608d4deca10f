// Authentication codes of messages: AES-128-GMAC (NIST SP 800-38D). Who does not know the epoch's key can't
// make, change or turn round a message without being noticed.
//
// Each direction between two engines has a key of its own, also after one of them begins the epoch again:
// HMAC-SHA256 of both engines and of the time of that beginning, under the epoch's key. A nonce is a
// message's number and its series, so none comes twice under a key.
#pragma once

#include "far/port.h"
#include "far/token.h"

#include <cstddef>
#include <memory>
#include <span>

namespace epd::far {

class MacKey {
 public:
  // For messages from one engine to another. `began_ns`: when the sender began the epoch.
  MacKey(const EpochKey& key, EngineId from, EngineId to, std::uint64_t began_ns);

  // Fills in `mac`. All fields before it are complete.
  void sign(abi::FarHeader& header, std::span<const std::byte> body) const;
  bool verify(const abi::FarHeader& header, std::span<const std::byte> body) const;

 private:
  struct Free {
    void operator()(void* context) const;
  };
  std::unique_ptr<void, Free> context_;  // EVP_CIPHER_CTX
};

}  // namespace epd::far
