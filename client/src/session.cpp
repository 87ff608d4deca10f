#include "session.h"

#include "log.h"
#include "ticket_status.h"

#include <unistd.h>
#include <algorithm>
#include <cstdint>

namespace epd::client {
namespace {

template <std::size_t N, std::size_t M>
void copy_text(char (&to)[N], const char (&from)[M]) {
  abi::set_text(to, from, abi::text_length(from));
}

std::unique_ptr<CallMedium> make_medium(const Attachment& attachment) {
  if (attachment.device != nullptr) return std::make_unique<DeviceMedium>(*attachment.device);
  return std::make_unique<HostMedium>(*attachment.segment_b.as<abi::SegmentB>(), attachment.engine_bell);
}

}  // namespace

Session::Session(Attachment attachment)
    : attachment_(std::move(attachment)),
      waits_(*attachment_.segment_a.as<abi::SegmentA>(), attachment_.client_bell, attachment_.socket, *this),
      connection_(attachment_.socket, *attachment_.segment_b.as<abi::SegmentB>(), waits_, *this),
      hooks_(waits_, *this),
      streams_(attachment_.device.get(), attachment_.wait_by, connection_, waits_, *this),
      mapper_(attachment_.device.get(), waits_, connection_),
      operations_(attachment_.welcome, waits_, connection_, hooks_, streams_, mapper_,
                  make_medium(attachment_)) {}

Status Session::prepare() {
  Status status = waits_.prepare();
  if (status.ok()) status = streams_.prepare();
  return status.ok() ? HomeProcess::make(home_) : status;
}

Status Session::in_home_process() const {
  if (home_.here()) return {};
  return invalid_argument("this is process " + std::to_string(::getpid()) + ", forked off process " +
                          std::to_string(home_.pid()) +
                          ", which attached; allowed: sessions that this process attaches itself");
}

Session::~Session() {
  const Deadline deadline = Deadline::in_ms(kLeaveMs);
  // Unblocks the streams of all groups first, because leaving one group waits for all streams of the context.
  if (groups_.size() > 1) {
    Lock lock = waits_.lock();
    note_end_locked();
    for (const auto& group : groups_) begin_leave_locked(*group);
    streams_.await_unblocks(lock);
  }
  while (!groups_.empty()) leave(groups_.back().get(), deadline);
  {
    const Lock lock = waits_.lock();
    connection_.end_locked({StatusCode::kAborted, "the session was detached"});
  }
  hooks_.stop();
  streams_.stop_watch();
  connection_.detach();
  if (given != nullptr) given->end();
}

epd_session_info_t Session::info() const {
  static constexpr char kDigits[] = "0123456789abcdef";
  const abi::Welcome& welcome = attachment_.welcome;
  epd_session_info_t info{};
  info.session_id = welcome.session_id;
  copy_text(info.device, welcome.device);
  copy_text(info.daemon, welcome.daemon);
  static_assert(sizeof(info.boot_id) == 2 * sizeof(welcome.boot_id) + 1);
  for (std::size_t i = 0; i < sizeof(welcome.boot_id); ++i) {
    info.boot_id[2 * i] = kDigits[welcome.boot_id[i] >> 4];
    info.boot_id[2 * i + 1] = kDigits[welcome.boot_id[i] & 15];
  }
  info.device_kind = static_cast<epd_device_kind_t>(welcome.device_kind);
  return info;
}

Status Session::check() {
  connection_.probe();
  const Lock lock = waits_.lock();
  connection_.note_end_locked();
  return connection_.ended();
}

void Session::on_end_locked() {
  streams_.want_unblocks_locked();
}

// The library does not know whether this rank will be a member. The hook thread reads the answer. Without it
// the next call that reads the socket does.
void Session::on_late_join_locked() {
  [[maybe_unused]] const Status started = hooks_.start_locked();
  hooks_.look_up_locked();
}

// ---- memberships ------------------------------------------------------------------------------------

Status Session::register_memory(const void* address, std::uint64_t bytes) {
  if (attachment_.device == nullptr) {
    const abi::Welcome& welcome = attachment_.welcome;
    return {StatusCode::kUnsupported, "operations on " +
                                          std::string(welcome.device, abi::text_length(welcome.device)) +
                                          " take rows from their slots alone, and memory of the caller's is "
                                          "copied; allowed: on GPUs"};
  }
  MemoryPart part;
  Status status = mapper_.find_range(address, bytes, part);
  if (!status.ok()) return status;
  std::vector<MemoryPart> known;
  {
    const Lock lock = waits_.lock();
    known = registered_.all();
  }
  const std::vector<Allocation> freed = mapper_.freed_of(known);
  {
    const Lock lock = waits_.lock();
    status = registered_.add(part, freed);
  }
  if (!status.ok()) return status;
  for (Group* group : all_groups()) {
    status = mapper_.map(*group, part, true);
    if (status.ok()) continue;
    const Lock lock = waits_.lock();
    [[maybe_unused]] const Status removed = registered_.remove(part.address, part);
    return status;
  }
  watch_memory();
  return {};
}

// The watch looks whether it has been freed.
void Session::watch_memory() {
  const Lock lock = waits_.lock();
  [[maybe_unused]] const Status started = streams_.start_watch_locked();
  streams_.kick_watch();
}

Status Session::unregister_memory(const void* address) {
  const Lock lock = waits_.lock();
  MemoryPart part;
  Status status = registered_.remove(reinterpret_cast<std::uintptr_t>(address), part);
  if (!status.ok()) return status;
  for (const auto& group : groups_) group->mapped.leave(part);
  return {};
}

// They are freed when they are left, by the caller, who uses none meanwhile.
std::vector<Group*> Session::all_groups() {
  const Lock lock = waits_.lock();
  std::vector<Group*> all;
  for (const auto& group : groups_) all.push_back(group.get());
  return all;
}

void Session::map_registered(Group& group) {
  std::vector<MemoryPart> all;
  {
    const Lock lock = waits_.lock();
    all = registered_.all();
  }
  for (const MemoryPart& part : all) {
    if (!mapper_.freed_of({part}).empty()) continue;
    const Status status = mapper_.map(group, part, true);
    if (!status.ok())
      log_line(LogLevel::kInfo, "registered memory is not mapped",
               {{"group", group.group_name}, {"reason", status.message()}});
  }
  if (!all.empty()) watch_memory();
}

Status Session::join(const epd_group_config_t& config, Group*& out) {
  const std::int64_t wait_ms = config.timeout_ms == 0 ? kLongestJoinMs : config.timeout_ms;
  const Deadline send_by = Deadline::in_ms(wait_ms);
  const Deadline reply_by = Deadline::in_ms(wait_ms + kReplyMarginMs);
  abi::Join join{};
  Status status = client::make_join(config, join);
  if (!status.ok()) return status;
  std::list<std::unique_ptr<Group>> made;
  made.push_back(std::make_unique<Group>(this, join.shape));
  Group& group = *made.front();
  group.request = join;
  Packet reply;
  status = connection_.request(
      {abi::AttachType::kJoin, abi::AttachType::kJoined, &join, sizeof(join), send_by, reply_by}, reply);
  if (!status.ok()) return status;
  status = adopt_joined(reply, group);
  if (!status.ok()) {
    connection_.leave(group.member, Deadline::in_ms(kLeaveMs));
    return status;
  }
  {
    const Lock lock = waits_.lock();
    streams_.add_locked(group);
    groups_.splice(groups_.end(), made);
  }
  map_registered(group);
  out = &group;
  return {};
}

Status Session::map_user_arena(const UniqueFd& fd, Group& group, Group* former) {
  const std::uint64_t bytes = group.arena.total_bytes;
  const std::string name = "the user arena";
  if (attachment_.device != nullptr) return attachment_.device->map(fd, bytes, group.device_user);
  if (former != nullptr) {
    Status status = map_sealed_over(former->user, fd, Access::kReadWrite, name);
    if (status.ok()) group.user = std::move(former->user);
    return status;
  }
  Result<Mapping> user = map_sealed(fd, bytes, Access::kReadWrite, name);
  if (user.ok()) group.user = std::move(*user);
  return user.status();
}

Status Session::map_board(const UniqueFd& fd, Group& group, Group* former) {
  const std::uint64_t with_waits = abi::WaitsLayout(group.shape).total_bytes;
  Mapping board;
  if (former != nullptr) {
    board = former->board.take();
    Status status = map_sealed_over(board, fd, Access::kReadOnly, "the board");
    if (!status.ok()) {
      former->board = BoardView(std::move(board), group.shape);
      return status;
    }
  } else {
    Result<Mapping> made = map_sealed(fd, with_waits, Access::kReadOnly, "the board");
    if (!made.ok()) return made.status();
    board = std::move(*made);
  }
  group.board = BoardView(std::move(board), group.shape);
  return group.board.magic_fits() ? Status() : internal_error("the board from the daemon has a wrong magic");
}

Status Session::adopt_joined(Packet& packet, Group& group, Group* former) {
  const auto answer = packet.read<abi::Joined>();
  if (!answer.ok()) return refusal(packet);
  const abi::Joined& joined = answer.value();
  group.member = joined.member;
  group.id = joined.group_id;
  group.rank = joined.rank;
  group.epoch = joined.epoch;
  group.next_index = group.first_index = joined.resume_index;
  group.comebacks = former != nullptr ? former->comebacks + 1 : 0;
  group.sum_ranks = joined.sum_ranks;
  group.shares_device = joined.shares_device != 0;
  group.default_timeout_ms = joined.default_timeout_ms;
  const std::uint64_t board_bytes = sizeof(abi::Board);
  if (joined.user_bytes != group.arena.total_bytes || joined.board_bytes != board_bytes) {
    return internal_error("the daemon made an arena of " + std::to_string(joined.user_bytes) +
                          " and a board of " + std::to_string(joined.board_bytes) + " bytes; needed: " +
                          std::to_string(group.arena.total_bytes) + " and " + std::to_string(board_bytes));
  }
  if (Status status = check_descriptors(packet); !status.ok()) return status;
  const std::size_t fds = Operations::kDescriptors;
  if (joined.rank >= group.shape.num_ranks || packet.fds.size() != fds) {
    return internal_error("the daemon's answer to join has rank " + std::to_string(joined.rank) + " and " +
                          std::to_string(packet.fds.size()) + " descriptors; needed: below " +
                          std::to_string(group.shape.num_ranks) + " and " + std::to_string(fds));
  }
  Status status = map_board(packet.fds[1], group, former);
  if (status.ok()) status = map_user_arena(packet.fds[0], group, former);
  if (status.ok()) status = streams_.make_events(group);
  if (status.ok()) status = operations_.open(group, packet);
  return status.ok() ? group.active_mask.write(group, attachment_.device.get()) : status;
}

void Session::begin_leave_locked(Group& group) {
  group.left = true;
  streams_.want_unblock_locked(group);
}

void Session::end_operations(Group& group) {
  Lock lock = waits_.lock();
  note_end_locked();
  begin_leave_locked(group);
  hooks_.await_locked(lock, group);
  operations_.forget_locked(group);
  waits_.notify_locked();
}

void Session::leave(Group* group, Deadline deadline) {
  end_operations(*group);
  connection_.leave(group->member, deadline);
  streams_.remove(*group);
  std::list<std::unique_ptr<Group>> gone;  // destroyed, and so unmapped, without the mutex
  const Lock lock = waits_.lock();
  const auto found = std::find_if(groups_.begin(), groups_.end(),
                                  [group](const auto& other) { return other.get() == group; });
  if (found != groups_.end()) gone.splice(gone.end(), groups_, found);
}

}  // namespace epd::client
