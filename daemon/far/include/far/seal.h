// Checksums of messages: whether one has come as it was sent.
#pragma once

#include "proto/far.h"

#include <cstddef>
#include <span>

namespace epd::far {

// Fills in body_crc and header_crc. All else is complete.
void seal(abi::FarHeader& header, std::span<const std::byte> body, abi::FarCheck check);

// Before anything is read of it.
bool header_is_whole(const abi::FarHeader& header);
// Of a header that is whole. Bodies that `check` leaves out are taken as they are. Of a batch only the CRCs
// of its records are checked: each record is by whoever uses it (kernels/far.h).
bool body_is_whole(const abi::FarHeader& header, std::span<const std::byte> body, abi::FarCheck check);

}  // namespace epd::far
