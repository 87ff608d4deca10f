// The envelope of an address: who it names, and a checksum, so that UCX never sees bytes that no transport
// wrote.
#pragma once

#include "transport/transport.h"

#include <cstdint>
#include <span>

namespace epd::transport {

enum class AddressKind : std::uint16_t { kInProcess = 1, kUcx = 2 };

struct AddressParts {
  AddressKind kind = AddressKind::kInProcess;
  std::uint64_t transport = 0;  // random: no two transports have the same
  std::uint64_t detail = 0;     // in process: the hub; UCX: its version
  std::span<const std::byte> payload;
};

// RESOURCE_EXHAUSTED: longer than kMaxAddressBytes.
Result<Address> make_address(const AddressParts& parts);
// The payload points into `address`.
Result<AddressParts> read_address(std::span<const std::byte> address, AddressKind expected);

std::uint64_t random_id();

}  // namespace epd::transport
