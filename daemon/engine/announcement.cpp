#include "announcement.h"

namespace epd::engine {

const char* op_name(abi::Op op) {
  switch (op) {
    case abi::Op::kNoop: return "noop";
    case abi::Op::kDispatch: return "dispatch";
    case abi::Op::kCombine: return "combine";
    case abi::Op::kNone: break;
  }
  return "none";
}

namespace {

std::string routing_name(std::uint64_t tag) {
  if (tag == 0) return "new";
  return "that of dispatch " + std::to_string(abi::index_of_tag(tag)) + " in epoch " +
         std::to_string(abi::epoch_of_tag(tag));
}

}  // namespace

std::optional<Disagreement> disagreement(std::span<const abi::OpAnnouncement> announcements,
                                         std::uint32_t own, std::uint64_t op_index,
                                         std::span<const std::uint64_t> active_since) {
  const abi::OpAnnouncement& mine = announcements[own];
  const auto differ = [&](std::uint32_t rank, const std::string& field, const std::string& here,
                          const std::string& there) {
    return Disagreement{rank, "operation " + std::to_string(op_index) + ": " + field + " is " + here +
                                  " on rank " + std::to_string(own) + " and " + there + " on rank " +
                                  std::to_string(rank) +
                                  "; all ranks must submit the same operations in the same order"};
  };
  for (std::uint32_t rank = 0; rank < announcements.size(); ++rank) {
    if (active_since[rank] == 0) continue;
    const abi::OpAnnouncement& other = announcements[rank];
    if (other.op != mine.op) {
      return differ(rank, "op", op_name(static_cast<abi::Op>(mine.op)),
                    op_name(static_cast<abi::Op>(other.op)));
    }
    if (other.slot != mine.slot)
      return differ(rank, "slot", std::to_string(mine.slot), std::to_string(other.slot));
    if (other.format != mine.format)
      return differ(rank, "row_format", std::to_string(mine.format), std::to_string(other.format));
    if (!abi::same_routing(mine.routing, other.routing)) {
      return differ(rank, "routing", routing_name(mine.routing), routing_name(other.routing));
    }
  }
  return std::nullopt;
}

}  // namespace epd::engine
