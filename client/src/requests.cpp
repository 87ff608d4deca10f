// Session: join and leave, and everything else that comes over the attach socket.
#include "session.h"

#include <algorithm>

namespace epd::client {
namespace {

// The daemon has the deadline of a join; this much more for its answer to arrive.
constexpr std::int64_t kReplyMarginMs = 5'000;
// When the daemon's own default is in force, which the client does not know.
constexpr std::int64_t kLongestJoinMs = 600'000;

}  // namespace

bool Session::take_packets(std::uint32_t id, Packet& reply) {
  std::string error;
  for (int i = 0; i < 64; ++i) {
    const Received received = receive(attachment_.socket, reply, error);
    if (received == Received::kNothing) return false;
    if (received == Received::kPacket) {
      const std::uint32_t answers = reply.header.request_id;
      if (id != 0 && answers == id) return true;
      if (answers != 0 && answers == unanswered_) unanswered_ = 0;
      const abi::AttachType type = reply.type();
      if (type != abi::AttachType::kGoodbye && (type != abi::AttachType::kRefused || answers != 0)) continue;
    }
    const Lock lock(mutex_);
    note_ended_locked();
    switch (received) {
      case Received::kPacket: end_locked(refusal(reply)); break;
      case Received::kMalformed: end_locked(internal_error(error)); return false;
      default:
        end_locked(daemon_lost("the daemon closed the connection: it has stopped or died; attach again"));
        return false;
    }
  }
  return false;
}

bool Session::look_at_socket(bool hang_up) {
  // A request in progress reads the socket itself and would miss what is taken here. It returns at
  // once when the connection is gone, so then it is worth waiting for.
  std::unique_lock<std::mutex> lock(request_mutex_, std::defer_lock);
  if (hang_up) {
    lock.lock();
  } else if (!lock.try_lock()) {
    return false;
  }
  Packet unasked;
  take_packets(0, unasked);
  return true;
}

Status Session::await_reply(std::uint32_t id, Deadline deadline, Packet& reply) {
  for (;;) {
    if (take_packets(id, reply)) return {};
    {
      const Lock lock(mutex_);
      if (!ended_.ok()) return ended_;
    }
    if (!wait_readable(attachment_.socket, deadline)) {
      return {StatusCode::kDeadlineExceeded, "the daemon did not answer in time"};
    }
  }
}

Status Session::request(const Request& request, Packet& reply) {
  const auto exchange = [&]() -> Status {
    const std::lock_guard<std::mutex> request_lock(request_mutex_);
    // One request at a time: an answer that an earlier call gave up on comes first.
    while (unanswered_ != 0) {
      const std::uint32_t earlier = unanswered_;
      Status status = await_reply(earlier, request.deadline, reply);
      if (!status.ok()) return status;
      unanswered_ = 0;
    }
    const std::uint32_t id = ++last_request_id_;
    Status status = send(attachment_.socket, request.type, id, request.body, request.body_bytes, request.fds);
    // If the connection is gone, reading tells why.
    if (!status.ok() && status.code() != StatusCode::kDaemonLost) return status;
    status = await_reply(id, request.deadline, reply);
    if (status.code() == StatusCode::kDeadlineExceeded) unanswered_ = id;
    return status;
  };
  Status status = exchange();
  kick();  // the leader may have left the socket alone meanwhile
  if (!status.ok()) return status;
  return reply.type() == request.reply_type ? Status() : refusal(reply);
}

Status Session::join(const epd_group_config_t& config, Group*& out) {
  abi::Join join{};
  OwnMemory own;
  Status status = make_join(config, join, own);
  if (status.ok() && join.commands != 0) status = can_command();
  if (!status.ok()) return status;
  auto group = std::make_unique<Group>(*this, join.shape, std::move(own));
  const std::int64_t wait_ms = config.timeout_ms == 0 ? kLongestJoinMs : config.timeout_ms + kReplyMarginMs;
  Packet reply;
  status = request({abi::AttachType::kJoin, abi::AttachType::kJoined, &join, sizeof(join),
                    Deadline::in_ms(wait_ms), group->own.fds},
                   reply);
  if (status.code() == StatusCode::kDeadlineExceeded && reply.num_fds == 0 && reply.body_bytes == 0) {
    // Not even a refusal: whether this rank is a member now is unknown, so the session is over.
    const Lock lock(mutex_);
    end_locked(daemon_lost("the daemon did not answer a join within " + std::to_string(wait_ms) + " ms"));
    return ended_;
  }
  if (!status.ok()) return status;
  group->commands.by_stream = join.commands != 0;
  status = adopt_joined(reply, *group);
  if (status.ok()) status = open_commands(*group);
  if (!status.ok()) {
    send_leave(group->member, Deadline::in_ms(kLeaveMs));
    return status;
  }
  const Lock lock(mutex_);
  groups_.push_back(std::move(group));
  out = groups_.back().get();
  return {};
}

Status Session::map_user_arena(const UniqueFd& fd, Group& group) {
  const std::uint64_t bytes = group.arena.total_bytes;
  if (attachment_.device != nullptr) return attachment_.device->map(fd, bytes, group.device_user);
  return Mapping::map(fd, bytes, Access::kReadWrite, "the user arena", group.user);
}

Status Session::adopt_joined(Packet& packet, Group& group) {
  abi::Joined joined{};
  if (!packet.read(joined)) return refusal(packet);
  group.member = joined.member;
  group.rank = joined.rank;
  group.epoch = joined.epoch;
  group.next_index = group.first_index = joined.resume_index;
  group.default_timeout_ms = joined.default_timeout_ms;
  const std::uint64_t board_bytes = abi::BoardLayout(group.shape).total_bytes;
  if (joined.user_bytes != group.arena.total_bytes || joined.board_bytes != board_bytes) {
    return internal_error("the daemon made an arena of " + std::to_string(joined.user_bytes) +
                          " and a board of " + std::to_string(joined.board_bytes) + " bytes; needed: " +
                          std::to_string(group.arena.total_bytes) + " and " + std::to_string(board_bytes));
  }
  if (joined.rank >= group.shape.num_ranks || packet.num_fds != 2) {
    return internal_error("the daemon's answer to join has rank " + std::to_string(joined.rank) + " and " +
                          std::to_string(packet.num_fds) + " descriptors; needed: below " +
                          std::to_string(group.shape.num_ranks) + " and 2");
  }
  Status status = map_user_arena(packet.fds[0], group);
  if (!status.ok()) return status;
  Mapping board;
  status = Mapping::map(packet.fds[1], joined.board_bytes, Access::kReadOnly, "the board", board);
  if (!status.ok()) return status;
  group.board = BoardView(std::move(board), group.shape);
  return group.board.magic_fits() ? Status() : internal_error("the board from the daemon has a wrong magic");
}

void Session::send_leave(std::uint32_t member, Deadline deadline) {
  {
    const Lock lock(mutex_);
    note_ended_locked();
    if (!ended_.ok()) return;
  }
  const abi::Leave leave{member, 0};
  Packet reply;
  // Whatever comes of it: a daemon that does not answer will see the connection close.
  [[maybe_unused]] const Status status =
      request({abi::AttachType::kLeave, abi::AttachType::kLeft, &leave, sizeof(leave), deadline, {}}, reply);
}

void Session::leave(Group* group, Deadline deadline) {
  {
    Lock lock(mutex_);
    drain_locked();
    group->left = true;
    abort_locked(StatusCode::kAborted, "this rank has left the group", group);
    want_release_locked(*group);
    await_hooks_locked(lock, *group);
    for (auto it = operations_.begin(); it != operations_.end();) {
      it = it->second.group == group ? operations_.erase(it) : std::next(it);
    }
    notify_ready_locked(nullptr);
  }
  send_leave(group->member, deadline);
  await_release(*group);
  std::list<std::unique_ptr<Group>> gone;  // unmapped without the lock
  const Lock lock(mutex_);
  const auto found = std::find_if(groups_.begin(), groups_.end(),
                                  [group](const auto& other) { return other.get() == group; });
  if (found != groups_.end()) gone.splice(gone.end(), groups_, found);
}

}  // namespace epd::client
