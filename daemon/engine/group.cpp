#include "group.h"

#include "calls.h"
#include "session_port.h"

#include <algorithm>
#include <cstring>

namespace epd::engine {

namespace {

// A sleeping engine's loop makes a round each second, and as soon as its bell rings.
constexpr std::uint64_t kSilentNs = 2'000'000'000;
constexpr std::uint64_t kDeafNs = 200'000'000;

}  // namespace

void GroupRankMemory::place_regions(const abi::GroupShape& shape) {
  layout_ = abi::UserArenaLayout(shape);
  for (std::size_t i = 0; i < abi::kNumRegions; ++i) {
    places_[i] = {};
    if (abi::region_bytes(shape, static_cast<abi::Region>(i)) == 0) continue;
    places_[i] = {reinterpret_cast<std::uint8_t*>(user->bytes() + layout_.offset[i]), layout_.slot_bytes};
  }
}

void GroupRankMemory::set_active(std::uint64_t since) {
  view = {};
  if (since == 0) return;
  view.exchange = reinterpret_cast<std::uint8_t*>(exchange->bytes());
  view.since = since;
  view.recv_x = region(abi::Region::kRecvX);
  view.recv_scales = region(abi::Region::kRecvScales);
  view.recv_topk_idx = region(abi::Region::kRecvTopkIdx);
  view.recv_topk_weights = region(abi::Region::kRecvTopkWeights);
  view.recv_src = region(abi::Region::kRecvSrc);
  view.y = region(abi::Region::kY);
  view.y_weights = region(abi::Region::kYWeights);
}

Member::Member(Group& in_group, std::uint32_t rank_there, std::uint32_t its_number, SessionPort* served,
               Mapping board_memory)
    : group(in_group),
      rank(rank_there),
      number(its_number),
      session(served),
      board_mapping(std::move(board_memory)),
      next_number(in_group.resume_index) {}

Member::~Member() = default;

void Member::stop() {
  stopped_ = true;
  if (calls != nullptr) calls->stop();
}

std::byte* Member::user(std::uint32_t slot, abi::Region region) const {
  return group.ranks[rank].at(slot, region);
}

abi::RankWaits Member::waits() const {
  return abi::RankWaits::in(board_mapping.bytes(), group.shape);
}

std::byte* Member::exchange() const {
  return group.ranks[rank].exchange->bytes();
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
  if (group.life.is(GroupPhase::kReleased)) b.released.store(group.epoch, std::memory_order_relaxed);
  b.cause.store(static_cast<std::uint32_t>(cause.cause), std::memory_order_relaxed);
  b.failed_rank.store(cause.failed_rank, std::memory_order_relaxed);
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

Group::Group(const abi::GroupBegin& message, std::unique_ptr<FarSide> far_side)
    : id(message.group_id),
      name(message.name, abi::text_length(message.name)),
      shape(message.shape),
      exchange_layout(shape),
      sms(message.sms),
      linger_us(message.own_linger != 0 ? std::optional(message.linger_us) : std::nullopt),
      priority(message.priority),
      epoch(message.epoch),
      resume_index(message.resume_index),
      life(message.broken != 0),
      ranks(shape.num_ranks),
      active_since(shape.num_ranks),
      far(std::move(far_side)) {}

bool Group::settled() const {
  return std::all_of(members.begin(), members.end(),
                     [](const auto& member) { return member->calls == nullptr || member->calls->halted(); });
}

Member* Group::member(std::uint32_t rank) const {
  const auto found = std::find_if(members.begin(), members.end(),
                                  [rank](const auto& member) { return member->rank == rank; });
  return found != members.end() ? found->get() : nullptr;
}

void Group::set_active(std::uint32_t rank, std::uint64_t since) {
  active_since[rank] = since;
  changed_epoch = std::max(changed_epoch, since != 0 ? since : epoch + 1);
  const bool any_masked =
      std::any_of(active_since.begin(), active_since.end(), [](auto s) { return s == 0; });
  masked.clear();
  for (std::size_t r = 0; any_masked && r < active_since.size(); ++r) masked.push_back(active_since[r] == 0);
  if (since != 0 && is_near(rank)) {
    ranks[rank].set_active(since);
    return;
  }
  ranks[rank] = {};
  std::erase_if(peers, [this](const auto& peer) {
    for (std::uint32_t r = 0; r < shape.num_ranks; ++r) {
      if (active(r) && is_near(r) && ranks[r].device_index == peer->device_index) return false;
    }
    return true;
  });
}

void Group::ring_peers() const {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  for (const auto& peer : peers) {
    if (peer->page.as<abi::EnginePage>()->sleep.sleeping.load(std::memory_order_relaxed) != 0) {
      ring_eventfd(peer->bell.get());
    }
  }
}

std::uint64_t Group::stands_still_ms(std::uint32_t rank, std::uint64_t now_ns, std::uint64_t bell_ns) const {
  for (const auto& peer : peers) {
    if (!is_near(rank) || peer->device_index != ranks[rank].device_index) continue;
    const std::uint64_t beat = peer->page.as<abi::EnginePage>()->heartbeat_ns.load(std::memory_order_relaxed);
    const std::uint64_t patience_ns = beat < bell_ns ? kDeafNs : kSilentNs;
    return beat != 0 && now_ns > beat + patience_ns ? (now_ns - beat) / 1'000'000 : 0;
  }
  return 0;
}

std::string Group::check_complete() const {
  for (std::uint32_t rank = 0; rank < shape.num_ranks; ++rank) {
    if (active(rank) && is_near(rank) && ranks[rank].user == nullptr)
      return "rank " + std::to_string(rank) + " was not announced";
  }
  if (members.empty() && refused.empty()) return "no member on this device";
  return "";
}

}  // namespace epd::engine
