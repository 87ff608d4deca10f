#include "arena_store.h"

#include "proto/arena.h"
#include "proto/group_bytes.h"
#include "proto/wire.h"

#include <sys/stat.h>
#include <algorithm>

namespace epd::supervisor {

using abi::Board;

namespace {

constexpr std::uint64_t kMemberDescriptors = 4;  // two arenas, the board, results

constexpr std::uint64_t kFirstEpoch = 1;

void write_first_board(Board& board) {
  board.magic = abi::kBoardMagic;
  board.version = abi::kAbiVersion;
  board.state.store(static_cast<std::uint32_t>(abi::GroupState::kForming));
  board.epoch.store(kFirstEpoch);
  board.failed_rank.store(-1);
}

std::uint64_t touched_bytes(int memfd) {
  constexpr std::uint64_t kBlock = 512;  // see stat(2)
  struct stat info {};
  return ::fstat(memfd, &info) == 0 ? static_cast<std::uint64_t>(info.st_blocks) * kBlock : 0;
}

}  // namespace

abi::CloseStreams MemberArenas::streams() const {
  const abi::UserArenaLayout layout(wanted.shape);
  return {layout.total_bytes, layout.calls};
}

std::uint64_t MemberArenas::next_index() const {
  return board_map->as<Board>()->next_index.load(std::memory_order_acquire);
}

// Subtracts, so that no sum can overflow.
Status ArenaStore::check_quota(const MemberArenas& wanted, Quota of_user) const {
  if (fillers_.contains(wanted.uid) && limits_.max_bytes_of_filler < of_user.limit)
    of_user = {limits_.max_bytes_of_filler, "a quarter of the memory, which this user had filled"};
  const std::uint64_t bytes = wanted.bytes;
  const auto refuse = [bytes](const std::string& who, std::uint64_t used, const Quota& quota) {
    return resource_exhausted("this rank needs " + std::to_string(bytes) + " bytes of arenas and " + who +
                              " " + std::to_string(used) + "; allowed: " + std::to_string(quota.limit) +
                              " (" + quota.source + ")");
  };
  if (total_bytes_ > limits_.max_bytes || wanted.host_bytes > limits_.max_bytes - total_bytes_)
    return refuse("all users have", total_bytes_, {limits_.max_bytes, "limits.max_arena_bytes"});
  const auto found = users_.find(wanted.uid);
  const User user = found == users_.end() ? User{} : found->second;
  if (user.bytes <= of_user.limit && bytes <= of_user.limit - user.bytes) return {};
  return refuse("user " + std::to_string(wanted.uid) + " has", user.bytes, of_user);
}

// This is real memory, unlike an arena, which is only promised. So the worst case is counted, and nothing
// fails later.
Status ArenaStore::check_routing_quota(const MemberArenas& wanted, const Quota& of_user) const {
  const auto check = [&wanted](const std::string& who, std::uint64_t used, const Quota& quota) -> Status {
    if (used <= quota.limit && wanted.routing_bytes <= quota.limit - used) return {};
    return resource_exhausted(
        "the engine may need " + std::to_string(wanted.routing_bytes) +
        " bytes for the routings of this rank (max_tokens, topk, depth, num_handles) and " + who + " " +
        std::to_string(used) + "; allowed: " + std::to_string(quota.limit) + " (" + quota.source + ")");
  };
  Status status =
      check("all users have", total_routing_bytes_, {limits_.max_routing_bytes, "limits.max_routing_bytes"});
  if (!status.ok()) return status;
  const auto found = users_.find(wanted.uid);
  const User user = found == users_.end() ? User{} : found->second;
  return check("user " + std::to_string(wanted.uid) + " has", user.routing_bytes, of_user);
}

Status ArenaStore::acquire(std::pair<std::uint64_t, std::uint32_t> member, std::uint32_t uid,
                           const UserQuotas& quotas, const device::DeviceName& device,
                           const WantedMemory& wanted) {
  MemberArenas made;
  made.uid = uid;
  made.device = device;
  made.wanted = wanted;
  const bool host = device.kind == abi::DeviceKind::kHost;
  const abi::GroupBytes needed(wanted.shape, host);
  made.bytes = needed.rank;
  made.host_bytes = needed.host_quota;
  made.routing_bytes = needed.routing_quota;
  Status status = check_quota(made, quotas.arena_bytes);
  if (status.ok()) status = check_routing_quota(made, quotas.routing_bytes);
  if (status.ok()) status = mappings_.add(member, uid, device);
  if (status.ok()) {
    status = make(made, device);
    if (!status.ok()) mappings_.remove(member);
  }
  if (!status.ok()) return status;
  total_bytes_ += made.host_bytes;
  total_routing_bytes_ += made.routing_bytes;
  users_[uid].bytes += made.bytes;
  users_[uid].routing_bytes += made.routing_bytes;
  arenas_[member] = std::move(made);
  return {};
}

Status ArenaStore::make(MemberArenas& made, const device::DeviceName& device) const {
  const abi::GroupBytes needed(made.wanted.shape, device.kind == abi::DeviceKind::kHost);
  Result<DescriptorShare> share = descriptors_.take(made.uid, kMemberDescriptors);
  if (!share.ok()) return share.status();
  Result<UniqueFd> user = device::make_arena_memory(device, "epd-user-arena", needed.user_arena);
  if (!user.ok()) return user.status();
  Result<UniqueFd> exchange = device::make_arena_memory(device, "epd-exchange-arena", needed.exchange_arena);
  if (!exchange.ok()) return exchange.status();
  Result<UniqueFd> results = device::make_results_memory(device, needed.results);
  if (!results.ok()) return results.status();
  Result<UniqueFd> board = make_sealed_memfd("epd-board", needed.board);
  if (!board.ok()) return board.status();
  Result<Mapping> map = Mapping::map(board->get(), needed.board, Access::kReadWrite);
  if (!map.ok()) return map.status();
  write_first_board(*map->as<Board>());
  made.descriptors = std::move(*share);
  made.user = std::move(*user);
  made.exchange = std::move(*exchange);
  made.board = std::move(*board);
  made.results = std::move(*results);
  made.board_map = std::make_shared<const Mapping>(std::move(*map));
  return {};
}

void ArenaStore::drop_idle_user(std::uint32_t uid) {
  const auto user = users_.find(uid);
  if (user != users_.end() && user->second.bytes == 0) users_.erase(user);
}

void ArenaStore::release(std::uint64_t group_id, std::uint32_t rank) {
  const auto found = arenas_.find({group_id, rank});
  if (found == arenas_.end()) return;
  total_bytes_ -= found->second.host_bytes;
  const std::uint32_t uid = found->second.uid;
  users_.at(uid).bytes -= found->second.bytes;
  total_routing_bytes_ -= found->second.routing_bytes;
  users_.at(uid).routing_bytes -= found->second.routing_bytes;
  if (found->second.given_up && found->second.device.kind == abi::DeviceKind::kHost) {
    closer_.empty_and_close(std::move(found->second.user));
  } else {
    closer_.close(std::move(found->second.user));
  }
  closer_.close(std::move(found->second.exchange));  // no client maps it
  closer_.close(std::move(found->second.results));
  mappings_.remove({group_id, rank});
  keep_waits(group_id, found->second);
  arenas_.erase(found);
  const auto other = arenas_.lower_bound({group_id, 0});
  if (other == arenas_.end() || other->first.first != group_id) gone_waits_.erase(group_id);
  drop_idle_user(uid);
}

void ArenaStore::give_up(std::uint64_t session) {
  for (auto& [member, arenas] : arenas_) {
    if (arenas.wanted.session == session) arenas.given_up = true;
  }
}

void ArenaStore::give_up(std::uint64_t group_id, std::uint32_t rank) {
  const auto found = arenas_.find({group_id, rank});
  if (found != arenas_.end()) found->second.given_up = true;
}

std::optional<ArenaStore::Fullest> ArenaStore::fullest() const {
  if (closer_.waiting(Closer::kDaemon) != 0) return std::nullopt;
  struct Use {
    std::uint64_t bytes = 0;
    std::map<std::uint64_t, std::uint64_t> sessions;
  };
  std::map<std::uint32_t, Use> users;
  for (const auto& [member, arenas] : arenas_) {
    if (arenas.device.kind != abi::DeviceKind::kHost) continue;
    const std::uint64_t bytes = touched_bytes(arenas.user.get()) + touched_bytes(arenas.exchange.get());
    users[arenas.uid].bytes += bytes;
    users[arenas.uid].sessions[arenas.wanted.session] += bytes;
  }
  const auto most = std::max_element(users.begin(), users.end(), [](const auto& a, const auto& b) {
    return a.second.bytes < b.second.bytes;
  });
  if (most == users.end() || most->second.bytes == 0) return std::nullopt;
  Fullest fullest{most->first, most->second.bytes, {}};
  for (const auto& [session, bytes] : most->second.sessions) fullest.sessions.emplace_back(bytes, session);
  std::sort(fullest.sessions.rbegin(), fullest.sessions.rend());
  return fullest;
}

// So that what is told of the others never falls.
void ArenaStore::keep_waits(std::uint64_t group_id, const MemberArenas& of) {
  std::vector<WaitSum>& sums = gone_waits_[group_id];
  sums.resize(of.wanted.shape.num_ranks);
  add_waits(sums, *of.board_map, of.wanted.shape);
}

std::vector<WaitSum> ArenaStore::gone_waits(std::uint64_t group_id) const {
  const auto found = gone_waits_.find(group_id);
  return found == gone_waits_.end() ? std::vector<WaitSum>() : found->second;
}

const MemberArenas* ArenaStore::find(std::uint64_t group_id, std::uint32_t rank) const {
  const auto found = arenas_.find({group_id, rank});
  return found == arenas_.end() ? nullptr : &found->second;
}

void ArenaStore::mark_lost(std::uint64_t group_id, std::uint32_t rank, const std::string& text,
                           StatusCode cause, std::int32_t failed_rank) {
  const MemberArenas* arenas = find(group_id, rank);
  if (arenas == nullptr) return;
  auto* board = arenas->board_map->as<Board>();
  const auto lost = static_cast<std::uint32_t>(abi::GroupState::kLost);
  const std::uint32_t change = board->change.load(std::memory_order_acquire);
  if (change % 2 == 0 && board->state.load() == lost) return;
  const std::uint32_t odd = change | 1;  // its engine may have died while it wrote
  board->change.store(odd, std::memory_order_seq_cst);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  board->state.store(lost);
  board->cause.store(static_cast<std::uint32_t>(cause));
  board->failed_rank.store(failed_rank);
  abi::set_text(board->message, text.data(), text.size());
  board->change.store(odd + 1, std::memory_order_release);
}

}  // namespace epd::supervisor
