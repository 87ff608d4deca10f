#include "route_heads.h"

#include <tuple>

namespace epd::engine {
namespace {

// Of two dispatches on one record. Handles only grow within an epoch.
bool is_older(const RouteHeads::Head& a, const RouteHeads::Head& b) {
  return std::tie(a.epoch, a.handle) < std::tie(b.epoch, b.handle);
}

}  // namespace

RouteHeads::Record& RouteHeads::load(std::uint32_t record, const std::byte* arena) {
  Record& entry = records_[record];
  if (std::exchange(entry.loaded, true)) return entry;
  for (std::size_t half = 0; half < entry.halves.size(); ++half) {
    launcher_.read(&entry.halves[half], arena + layout_.routing_of(record) + layout_.half_bytes * half,
                   sizeof(Head));
  }
  return entry;
}

RouteHeads::Place RouteHeads::begin(std::uint32_t record, const Head& head, std::byte* arena) {
  Record& entry = load(record, arena);
  std::size_t half = is_older(entry.halves[1], entry.halves[0]) ? 1 : 0;  // the older
  // What is there of this dispatch or of later ones is from before a break: it is done again now, must not be
  // found twice, and goes before what still stands.
  const bool stands = !abi::not_before(entry.halves[half].handle, head.handle);
  if (stands && abi::not_before(entry.halves[1 - half].handle, head.handle)) half = 1 - half;
  entry.halves[half] = head;
  auto making = std::make_shared<char>();
  entry.making = making;
  return {head, half_at(arena, record, half), static_cast<std::uint32_t>(half), std::move(making)};
}

RouteHeads::Place RouteHeads::find(std::uint32_t record, std::uint64_t op_index, std::byte* arena) {
  const Record& entry = load(record, arena);
  for (std::size_t half = 0; half < entry.halves.size(); ++half) {
    if (is_of(entry.halves[half].handle, op_index))
      return {entry.halves[half], half_at(arena, record, half), static_cast<std::uint32_t>(half), {}};
  }
  return {};
}

void RouteHeads::update(std::uint32_t record, const Head& head) {
  for (Head& known : records_[record].halves) {
    if (known.handle == head.handle) known = head;
  }
}

void RouteHeads::forget(std::uint32_t record, std::uint64_t op_index) {
  for (Head& known : records_[record].halves) {
    if (is_of(known.handle, op_index)) known = {};
  }
}

// There may be thousands, and a copy takes some ten microseconds: all in one.
void RouteHeads::load_all(const std::byte* arena) {
  std::vector<std::array<Head, 2>> heads(records_.size());
  launcher_.read_rows(heads.data(), arena + layout_.routing, sizeof(Head), layout_.half_bytes,
                      heads.size() * 2);
  for (std::size_t record = 0; record < heads.size(); ++record) records_[record] = {true, heads[record], {}};
}

std::vector<RouteHeads::Standing> RouteHeads::standing(std::uint64_t next, std::byte* arena) {
  load_all(arena);
  std::vector<Standing> all(records_.size());
  for (std::uint32_t record = 0; record < all.size(); ++record)
    all[record] = standing_in(record, next, arena);
  return all;
}

RouteHeads::Standing RouteHeads::standing_in(std::uint32_t record, std::uint64_t next, std::byte* arena) {
  const Record& entry = load(record, arena);
  Standing last;
  for (std::uint32_t half = 0; half < entry.halves.size(); ++half) {
    const Head& head = entry.halves[half];
    if (head.handle != 0 && abi::not_before(head.handle, next + 1)) {
      launcher_.clear(half_at(arena, record, half), sizeof(Head));
    } else if (head.epoch != 0 && is_older(last.head, head)) {
      last = {head, half};
    }
  }
  return last;
}

std::uint32_t RouteHeads::saved_dropped(std::uint32_t record, std::byte* arena) {
  const Record& entry = load(record, arena);
  const Head& last = is_older(entry.halves[0], entry.halves[1]) ? entry.halves[1] : entry.halves[0];
  return last.handle != 0 ? last.num_dropped : 0;
}

}  // namespace epd::engine
