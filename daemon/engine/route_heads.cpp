#include "route_heads.h"

#include <tuple>

namespace epd::engine {
namespace {

// Compares two dispatches on one record. Handles only grow within an epoch.
bool is_older(const RouteHeads::Head& a, const RouteHeads::Head& b) {
  return std::tie(a.epoch, a.handle) < std::tie(b.epoch, b.handle);
}

}  // namespace

// There may be thousands of heads, and a copy from a GPU takes some ten microseconds. So all are copied at
// once.
std::vector<RouteHeads::Standing> RouteHeads::standing(std::uint64_t next, std::byte* arena) const {
  std::vector<Head> heads(std::size_t{2} * num_records_);
  launcher_.read_rows(heads.data(), arena + layout_.routing, sizeof(Head), layout_.half_bytes, heads.size());
  std::vector<Standing> all(num_records_);
  for (std::uint32_t i = 0; i < heads.size(); ++i) {
    const Head& head = heads[i];
    Standing& last = all[i / 2];
    if (head.handle != 0 && abi::not_before(head.handle, next + 1)) {
      launcher_.clear(half_at(arena, i / 2, i % 2), sizeof(Head));
    } else if (head.epoch != 0 && is_older(last.head, head)) {
      last = {head, i % 2};
    }
  }
  return all;
}

}  // namespace epd::engine
