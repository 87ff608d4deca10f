// Compares the announcements of ranks about an operation, and describes a difference.
#pragma once

#include "proto/exchange.h"
#include "proto/operation.h"
#include "proto/wire.h"

#include <cstdint>
#include <optional>
#include <span>
#include <string>

namespace epd::engine {

// The first rank whose announcement differs from that of `own`, and a sentence with the field and both
// values; or nothing. A rank whose `active_since` is 0 is masked: its old announcement is not compared.
struct Disagreement {
  std::uint32_t rank;
  std::string text;
};
std::optional<Disagreement> disagreement(std::span<const abi::OpAnnouncement> announcements,
                                         std::uint32_t own, std::uint64_t op_index,
                                         std::span<const std::uint64_t> active_since);

const char* op_name(abi::Op op);

}  // namespace epd::engine
