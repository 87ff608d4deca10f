#include "group.h"

#include "session_port.h"

#include <algorithm>
#include <cstring>

namespace epd {

std::byte* Member::user(std::uint32_t slot, abi::Region region) const {
  return group.ranks[rank].user.bytes() + group.user_layout.at(slot, region);
}

void Member::publish_next_index() const {
  board().next_index.store(next_index(), std::memory_order_release);
}

void Member::publish_state(abi::GroupState state, const abi::Break& cause) const {
  abi::Board& b = board();
  const std::uint32_t change = b.change.load(std::memory_order_relaxed) | 1u;
  b.change.store(change, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  b.state.store(static_cast<std::uint32_t>(state), std::memory_order_relaxed);
  b.epoch.store(group.epoch, std::memory_order_relaxed);
  b.resume_index.store(group.resume_index, std::memory_order_relaxed);
  b.cause.store(static_cast<std::uint32_t>(cause.cause), std::memory_order_relaxed);
  b.culprit_rank.store(cause.culprit_rank, std::memory_order_relaxed);
  for (std::size_t word = 0; word < std::size(b.active); ++word) {
    std::uint64_t bits = 0;
    for (std::size_t r = word * 64; r < std::min<std::size_t>(word * 64 + 64, group.shape.num_ranks); ++r)
      bits |= std::uint64_t{group.active_since[r] != 0} << (r % 64);
    b.active[word].store(bits, std::memory_order_relaxed);
  }
  abi::set_text(b.message, cause.text, abi::text_length(cause.text));
  b.change.store(change + 1, std::memory_order_release);
  if (session != nullptr) session->ring();
}

void Member::publish_message(std::uint32_t slot, std::uint64_t ticket, const std::string& text) const {
  abi::BoardSlot& place = board().slots[slot];
  place.message_ticket.store(0, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  abi::set_text(place.message, text.data(), text.size());
  place.message_ticket.store(ticket, std::memory_order_release);
}

void Member::publish_counts(std::uint32_t slot, std::uint64_t ticket,
                            const std::vector<std::int32_t>& offsets,
                            const std::vector<std::int32_t>& experts) const {
  const abi::BoardLayout layout(group.shape);
  std::byte* base = board_mapping.bytes();
  abi::BoardSlot& place = board().slots[slot];
  std::memcpy(base + layout.rank_offsets(slot), offsets.data(), offsets.size() * sizeof(std::int32_t));
  std::memcpy(base + layout.expert_counts(group.shape, slot), experts.data(),
              experts.size() * sizeof(std::int32_t));
  place.num_recv_rows = static_cast<std::uint32_t>(offsets.back());
  place.counts_ticket.store(ticket, std::memory_order_release);
  if (session != nullptr) session->ring();
}

Route* Member::find_route(std::uint32_t slot, std::uint64_t handle) {
  Route& route = routes[slot];
  if (route.handle != handle + 1 && !load_route(slot, handle, route)) return nullptr;
  group.drop_lost(route);
  return &route;
}

bool Member::load_route(std::uint32_t slot, std::uint64_t handle, Route& route) const {
  const abi::GroupShape& s = group.shape;
  kernels::RoutingInput input;
  input.topk = s.topk;
  input.num_ranks = s.num_ranks;
  input.num_experts = s.num_experts;
  if (handle < first_index) {
    kernels::build_routing_plan(input, route.plan);
    route.base_rows.assign(s.num_ranks, 0);
    route.epoch = group.epoch;
    route.handle = handle + 1;
    return true;
  }
  const auto& layout = group.exchange_layout;
  std::byte* saved = group.ranks[rank].exchange.bytes() + layout.routing_of(slot);
  const auto* record = reinterpret_cast<const abi::RoutingRecord*>(saved);
  if (record->handle != handle + 1) return false;
  input.topk_idx = saved + layout.topk;
  input.num_tokens = record->num_tokens;
  if (kernels::build_routing_plan(input, route.plan).bad) return false;
  route.plan.num_dropped = record->num_dropped;
  const auto* base = reinterpret_cast<const std::uint32_t*>(saved + layout.base_rows);
  route.base_rows.assign(base, base + s.num_ranks);
  route.epoch = record->epoch;
  route.handle = handle + 1;
  return true;
}

std::uint32_t Member::saved_dropped(std::uint32_t slot) const {
  const std::byte* saved = group.ranks[rank].exchange.bytes() + group.exchange_layout.routing_of(slot);
  const auto* record = reinterpret_cast<const abi::RoutingRecord*>(saved);
  return record->handle != 0 ? record->num_dropped : 0;
}

void Member::save_route(std::uint32_t slot) const {
  const Route& route = routes[slot];
  const auto& layout = group.exchange_layout;
  std::byte* saved = group.ranks[rank].exchange.bytes() + layout.routing_of(slot);
  auto* record = reinterpret_cast<abi::RoutingRecord*>(saved);
  std::atomic_ref(record->handle).store(0, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  record->epoch = route.epoch;
  record->num_tokens = route.plan.num_tokens();
  record->num_dropped = route.plan.num_dropped;
  std::memcpy(saved + layout.base_rows, route.base_rows.data(),
              route.base_rows.size() * sizeof(std::uint32_t));
  std::copy(route.plan.topk.begin(), route.plan.topk.end(),
            reinterpret_cast<std::int32_t*>(saved + layout.topk));
  std::atomic_ref(record->handle).store(route.handle, std::memory_order_release);
}

void Group::set_shape(const abi::GroupShape& new_shape) {
  shape = new_shape;
  user_layout = abi::UserArenaLayout(shape);
  exchange_layout = abi::ExchangeArenaLayout(shape);
  ranks.resize(shape.num_ranks);
  active_since.assign(shape.num_ranks, 0);
}

void Group::set_active(std::uint32_t rank, std::uint64_t since) {
  active_since[rank] = since;
  changed_epoch = std::max(changed_epoch, since != 0 ? since : epoch + 1);
  const bool any_masked =
      std::any_of(active_since.begin(), active_since.end(), [](auto s) { return s == 0; });
  masked.clear();
  for (std::size_t r = 0; any_masked && r < active_since.size(); ++r) masked.push_back(active_since[r] == 0);
  if (since != 0) return;
  ranks[rank] = {};
  std::erase_if(peers, [this](const auto& peer) {
    for (std::uint32_t r = 0; r < shape.num_ranks; ++r) {
      if (active(r) && ranks[r].device_index == peer->device_index) return false;
    }
    return true;
  });
}

void Group::drop_lost(Route& route) const {
  if (route.epoch >= changed_epoch) return;
  std::vector<std::uint8_t> gone(shape.num_ranks);
  for (std::uint32_t rank = 0; rank < shape.num_ranks; ++rank) gone[rank] = !serves(rank, route.epoch);
  kernels::drop_ranks(gone, shape.num_experts, route.plan);
}

void Group::ring_peers() const {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  for (const auto& peer : peers) {
    if (peer->page.as<abi::EnginePage>()->sleep.sleeping.load(std::memory_order_relaxed) != 0) {
      ring_eventfd(peer->bell.get());
    }
  }
}

std::string Group::check_complete() const {
  for (std::uint32_t rank = 0; rank < shape.num_ranks; ++rank) {
    if (active(rank) && !ranks[rank].user.valid())
      return "rank " + std::to_string(rank) + " was not announced";
  }
  if (members.empty()) return "no member on this device";
  return "";
}

}  // namespace epd
