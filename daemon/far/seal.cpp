#include "far/seal.h"

#include "kernels/crc32c.h"

namespace epd::far {

using abi::FarCheck;
using abi::FarHeader;
using abi::FarType;
using kernels::crc32c;

namespace {

std::uint32_t crc_of(const FarHeader& header) {
  return crc32c(std::as_bytes(std::span(&header, 1)).first(offsetof(FarHeader, header_crc)));
}

// Of a batch the CRC of its records' CRCs, at the ends of the records. Whoever moves the records makes and
// checks those.
std::uint32_t crc_of(const FarHeader& header, std::span<const std::byte> body, FarCheck check) {
  const bool batch =
      header.type == FarType::kRows || header.type == FarType::kAsk || header.type == FarType::kSums;
  if (batch && check != FarCheck::kCrc) return 0;
  const std::size_t stride = batch && header.records != 0 ? body.size() / header.records : 0;
  if (stride < abi::kFarCrcBytes) return crc32c(body);
  // Another core has written them, so they come slowly, but all at once.
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

}  // namespace epd::far
