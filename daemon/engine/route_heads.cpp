#include "route_heads.h"

namespace epd {

const RouteHeads::Head* RouteHeads::find(std::uint32_t record, std::uint64_t op_index,
                                         const std::byte* arena) {
  Head& head = heads_[record];
  if (head.handle != op_index + 1) {
    if (arena == nullptr) return nullptr;
    const Head found = saved(record, arena);
    if (found.handle != op_index + 1) return nullptr;
    head = found;
  }
  return &head;
}

std::uint32_t RouteHeads::saved_dropped(std::uint32_t record, const std::byte* arena) const {
  const Head found = saved(record, arena);
  return found.handle != 0 ? found.num_dropped : 0;
}

RouteHeads::Head RouteHeads::saved(std::uint32_t record, const std::byte* arena) const {
  Head head{};
  launcher_.read(&head, arena + layout_.routing_of(record), sizeof(head));
  return head;
}

}  // namespace epd
