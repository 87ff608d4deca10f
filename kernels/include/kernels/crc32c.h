// CRC-32C (Castagnoli), as iSCSI and ext4 use it: finds every error of up to 32 adjacent bits, and every
// error of up to three bits in as many bytes as a message has. It finds accidents; anybody can compute it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace epd::kernels {

// `before`: the CRC of the bytes that come before these.
std::uint32_t crc32c(std::span<const std::byte> bytes, std::uint32_t before = 0);

// The ways in which this processor can compute it, the fastest last. They take and return the complement of
// the CRC.
using Crc32cWay = std::uint32_t (*)(std::uint32_t before, const std::byte* data, std::size_t bytes);
std::vector<Crc32cWay> crc32c_ways();

}  // namespace epd::kernels
