// The token of a message: SipHash-2-4 of the two engines under the epoch's key. It stops stale, misconfigured
// and off-path senders. It does not stop whoever reads the data network.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace epd::far {

// Random; made for each epoch and told to its members only.
using EpochKey = std::array<std::uint64_t, 2>;

std::uint64_t sip_hash(const EpochKey& key, std::span<const std::byte> bytes);
// Of messages from one engine to another. Engines are named by what the whole cluster knows of them.
std::uint64_t message_token(const EpochKey& key, std::uint64_t from_engine, std::uint64_t to_engine);

}  // namespace epd::far
