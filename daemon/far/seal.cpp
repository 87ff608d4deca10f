#include "far/seal.h"

#include "base/crc32c.h"

namespace epd::far {

using abi::FarCheck;
using abi::FarHeader;
using abi::FarType;

namespace {

std::uint32_t crc_of(const FarHeader& header) {
  return crc32c(std::as_bytes(std::span(&header, 1)).first(offsetof(FarHeader, header_crc)));
}

std::uint32_t crc_of(const FarHeader& header, std::span<const std::byte> body, FarCheck check) {
  const bool batch =
      header.type == FarType::kRows || header.type == FarType::kAsk || header.type == FarType::kSums;
  return batch && check != FarCheck::kCrc ? 0 : crc32c(body);
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

}  // namespace epd::far
