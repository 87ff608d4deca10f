#include "shared.h"

#include <array>
#include <cstring>
#include <random>

namespace epd::transport {

// ---- rules

namespace {

constexpr std::uint64_t kMostBodyBytes = 1ull << 30;

std::string peer_name(PeerId peer) {
  return "peer " + std::to_string(peer);
}

}  // namespace

Header::Header(std::span<const std::byte> bytes) : size_(static_cast<std::uint32_t>(bytes.size())) {
  EPD_CHECK(bytes.size() <= kMaxHeaderBytes);
  if (!bytes.empty()) std::memcpy(bytes_.data(), bytes.data(), bytes.size());
}

Status check_message(const Limits& limits, std::size_t header_bytes, std::uint64_t body_bytes) {
  if (header_bytes > kMaxHeaderBytes) {
    return invalid_argument("header has " + std::to_string(header_bytes) +
                            " bytes; allowed: " + std::to_string(kMaxHeaderBytes));
  }
  if (body_bytes > limits.max_body_bytes) {
    return invalid_argument("body has " + std::to_string(body_bytes) +
                            " bytes; allowed: " + std::to_string(limits.max_body_bytes));
  }
  return {};
}

Status check_limits(const Limits& limits) {
  if (limits.max_body_bytes > kMostBodyBytes) {
    return invalid_argument("max_body_bytes is " + std::to_string(limits.max_body_bytes) +
                            "; allowed: 0 .. " + std::to_string(kMostBodyBytes));
  }
  if (limits.max_sends == 0) return invalid_argument("max_sends is 0; allowed: 1 and more");
  return {};
}

Status no_such_peer(PeerId peer) {
  return not_found("no " + peer_name(peer));
}
Status too_many_sends(PeerId peer, const Limits& limits) {
  return would_block(peer_name(peer) + " has " + std::to_string(limits.max_sends) +
                     " sends under way, as many as are allowed");
}
Status flush_under_way(PeerId peer) {
  return would_block(peer_name(peer) + " has a flush under way");
}
Status own_address() {
  return invalid_argument("transport address is this transport's own");
}
Status already_connected(PeerId peer) {
  return invalid_argument("transport address is that of " + peer_name(peer) + ", which has not been closed");
}
Status peer_is_down(PeerId peer) {
  return {StatusCode::kAborted, peer_name(peer) + " is down"};
}
Status peer_closed(PeerId peer) {
  return {StatusCode::kAborted, peer_name(peer) + " was closed"};
}

// ---- address

namespace {

constexpr std::uint32_t kMagic = 0x54445045;  // "EPDT"
constexpr std::uint16_t kFormat = 1;

struct Envelope {
  std::uint32_t magic = kMagic;
  std::uint16_t format = kFormat;
  std::uint16_t kind = 0;
  std::uint64_t transport = 0;
  std::uint64_t detail = 0;
  std::uint64_t payload_bytes = 0;
};
static_assert(sizeof(Envelope) == 32);
constexpr std::size_t kChecksumBytes = sizeof(std::uint64_t);
constexpr std::size_t kLeastBytes = sizeof(Envelope) + kChecksumBytes;

std::uint64_t checksum(std::span<const std::byte> bytes) {  // FNV-1a
  std::uint64_t sum = 14695981039346656037ull;
  for (std::byte byte : bytes) sum = (sum ^ static_cast<std::uint64_t>(byte)) * 1099511628211ull;
  return sum;
}

const char* kind_name(std::uint16_t kind) {
  switch (static_cast<AddressKind>(kind)) {
    case AddressKind::kInProcess: return "in-process";
    case AddressKind::kUcx: return "ucx";
  }
  return "unknown";
}

std::string hex(std::uint64_t value) {
  std::array<char, 20> text{};
  std::snprintf(text.data(), text.size(), "0x%llx", static_cast<unsigned long long>(value));
  return text.data();
}

}  // namespace

Result<Address> make_address(const AddressParts& parts) {
  const std::size_t bytes = kLeastBytes + parts.payload.size();
  if (bytes > kMaxAddressBytes) {
    return resource_exhausted("a transport's address has " + std::to_string(bytes) +
                              " bytes; allowed: " + std::to_string(kMaxAddressBytes));
  }
  Envelope envelope;
  envelope.kind = static_cast<std::uint16_t>(parts.kind);
  envelope.transport = parts.transport;
  envelope.detail = parts.detail;
  envelope.payload_bytes = parts.payload.size();
  Address address(bytes);
  std::memcpy(address.data(), &envelope, sizeof(envelope));
  if (!parts.payload.empty()) {
    std::memcpy(address.data() + sizeof(envelope), parts.payload.data(), parts.payload.size());
  }
  const std::uint64_t sum = checksum(std::span(address).first(bytes - kChecksumBytes));
  std::memcpy(address.data() + bytes - kChecksumBytes, &sum, kChecksumBytes);
  return address;
}

Result<AddressParts> read_address(std::span<const std::byte> address, AddressKind expected) {
  if (address.size() < kLeastBytes || address.size() > kMaxAddressBytes) {
    return invalid_argument("transport address has " + std::to_string(address.size()) + " bytes; allowed: " +
                            std::to_string(kLeastBytes) + " .. " + std::to_string(kMaxAddressBytes));
  }
  Envelope envelope;
  std::memcpy(&envelope, address.data(), sizeof(envelope));
  if (envelope.magic != kMagic) {
    return invalid_argument("transport address begins with " + hex(envelope.magic) + "; expected " +
                            hex(kMagic));
  }
  if (envelope.format != kFormat) {
    return Status(StatusCode::kVersionMismatch, "transport address is of format " +
                                                    std::to_string(envelope.format) + "; expected " +
                                                    std::to_string(kFormat));
  }
  if (envelope.kind != static_cast<std::uint16_t>(expected)) {
    return invalid_argument("transport address is of kind " + std::to_string(envelope.kind) + " (" +
                            kind_name(envelope.kind) + "); expected " +
                            std::to_string(static_cast<std::uint16_t>(expected)) + " (" +
                            kind_name(static_cast<std::uint16_t>(expected)) + ")");
  }
  if (envelope.payload_bytes != address.size() - kLeastBytes) {
    return invalid_argument("transport address says that " + std::to_string(envelope.payload_bytes) +
                            " bytes follow; it has " + std::to_string(address.size() - kLeastBytes));
  }
  std::uint64_t sum = 0;
  std::memcpy(&sum, address.data() + address.size() - kChecksumBytes, kChecksumBytes);
  const std::uint64_t found = checksum(address.first(address.size() - kChecksumBytes));
  if (sum != found) {
    return invalid_argument("transport address has the checksum " + hex(sum) + "; its bytes give " +
                            hex(found));
  }
  return AddressParts{expected, envelope.transport, envelope.detail,
                      address.subspan(sizeof(Envelope), envelope.payload_bytes)};
}

std::uint64_t random_id() {
  std::random_device device;
  return (static_cast<std::uint64_t>(device()) << 32) | device();
}

}  // namespace epd::transport
