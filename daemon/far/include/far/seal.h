#pragma once

#include "far/port.h"
#include "proto/far.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

namespace epd::far {

// Fills in the checksums body_crc and header_crc. All else is complete.
void seal(abi::FarHeader& header, std::span<const std::byte> body, abi::FarCheck check);

// Whether the header has come as it was sent. Called before anything of it is read.
bool header_is_whole(const abi::FarHeader& header);
// Whether the body has come as it was sent. The header is whole. Bodies that `check` leaves out are not
// checked. For a batch only the CRCs of its records are checked: whoever uses a record checks the record
// itself (kernels/far.h).
bool body_is_whole(const abi::FarHeader& header, std::span<const std::byte> body, abi::FarCheck check);

// A random key that is made for each epoch and known to its members only.
using EpochKey = std::array<std::uint64_t, 2>;

std::uint64_t sip_hash(const EpochKey& key, std::span<const std::byte> bytes);
// The token of messages from one engine to another: SipHash-2-4 of their names in the cluster, under the
// epoch's key. It stops stale, misconfigured and off-path senders, but not one that reads the data network.
std::uint64_t message_token(const EpochKey& key, std::uint64_t from_engine, std::uint64_t to_engine);

// Authentication codes of messages: AES-128-GMAC (NIST SP 800-38D). Without the epoch's key nobody can make,
// change or reflect a message unnoticed.
// Each direction between two engines has its own key, and a new one when its sender begins the epoch again:
// HMAC-SHA256 of both engines and the time of that beginning, under the epoch's key. A nonce is a message's
// number and its series, so none occurs twice under a key.
class MacKey {
 public:
  // The key of messages from one engine to another. `began_ns`: when the sender began the epoch.
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
