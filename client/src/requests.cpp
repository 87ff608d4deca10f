// Session: join and leave, and everything else that comes over the attach socket.
#include "session.h"

#include <algorithm>
#include <new>

namespace epd::client {
namespace {

// The daemon has the deadline of a join; this much more for its answer to arrive.
constexpr std::int64_t kReplyMarginMs = 5'000;
// When the daemon's own default is in force, which the client does not know.
constexpr std::int64_t kLongestJoinMs = 600'000;

}  // namespace

// A request in progress. Whoever reads the socket finds it by its id.
class ReplyWaiter final : public Waiter {
 public:
  ReplyWaiter(const Session& session, Packet& reply) : session_(session), reply_(reply) {}
  bool ready() override { return arrived_ || !session_.ended_.ok(); }
  bool arrived() const { return arrived_; }
  void take(Packet& packet) {
    reply_ = std::move(packet);
    arrived_ = true;
  }

 private:
  const Session& session_;
  Packet& reply_;
  bool arrived_ = false;
};

// An entry in the table of requests; with the mutex.
class Session::Expected {
 public:
  Expected(Session& session, std::uint32_t id, ReplyWaiter& waiter) : session_(session), id_(id) {
    session_.requests_.emplace(id, &waiter);
  }
  ~Expected() {
    const auto found = session_.requests_.find(id_);
    if (found != session_.requests_.end() && found->second != nullptr) session_.requests_.erase(found);
  }
  Expected(const Expected&) = delete;
  Expected& operator=(const Expected&) = delete;

 private:
  Session& session_;
  const std::uint32_t id_;
};

void Session::look_at_socket() noexcept {
  const Lock lock(mutex_);
  try {
    take_packets_locked();
  } catch (const std::bad_alloc&) {
    end_locked({StatusCode::kResourceExhausted, "out of memory"});  // short: allocates nothing
  }
}

void Session::take_packets_locked() {
  Packet packet;
  Status error;
  // Bounded, so that a daemon that never stops can't hold the lock for good.
  for (int i = 0; i < 64 && ended_.ok(); ++i) {
    const ReceiveResult received = receive(attachment_.socket, packet, error);
    if (received == ReceiveResult::kNothing) break;
    if (received == ReceiveResult::kPacket) {
      route_locked(packet);
      continue;
    }
    note_ended_locked();
    end_locked(received == ReceiveResult::kMalformed
                   ? error
                   : daemon_lost("the daemon closed the connection: it has stopped or died; attach again"));
  }
  send_owed_leaves_locked();
}

void Session::route_locked(Packet& packet) {
  const std::uint32_t id = packet.header.request_id;
  const auto found = requests_.find(id);
  if (ReplyWaiter* waiter = found != requests_.end() ? found->second : nullptr; waiter != nullptr) {
    requests_.erase(found);
    waiter->take(packet);
    waiter->wake.notify_one();
    kick();  // it may be the leader, and this thread another that took the packet from under its eyes
    return;
  }
  if (found != requests_.end()) requests_.erase(found);
  const auto joined = packet.read<abi::Joined>();
  const abi::AttachType type = type_of(packet);
  if (type == abi::AttachType::kJoined && joined.ok()) {
    owed_leaves_.push_back(joined.value().member);
  } else if (type == abi::AttachType::kGoodbye || (type == abi::AttachType::kRefused && id == 0)) {
    note_ended_locked();
    end_locked(refusal(packet));
  }
}

bool Session::awaits_late_join_locked() const {
  return ended_.ok() && std::any_of(requests_.begin(), requests_.end(),
                                    [](const auto& request) { return request.second == nullptr; });
}

// What a full socket does not take now goes with the next packet that comes: replies to what fills it.
void Session::send_owed_leaves_locked() {
  while (!owed_leaves_.empty()) {
    const abi::Leave leave{owed_leaves_.back(), 0};
    const Status sent = send(attachment_.socket, abi::AttachType::kLeave, new_request_id_locked(), leave);
    if (!sent.ok()) return;
    owed_leaves_.pop_back();
  }
}

// Whether this rank is a member, or will be, nobody knows here. If it turns out to be, it leaves again; the
// hook thread sees to that, for no call of the caller's may ever come.
void Session::give_up_join_locked(std::uint32_t id) {
  requests_[id] = nullptr;
  // Without the thread whatever call looks at the socket next does it.
  [[maybe_unused]] const Status started = start_hooks_locked();
  hook_wake_.notify_one();
}

std::uint32_t Session::new_request_id_locked() {
  do {
    ++last_request_id_;
  } while (last_request_id_ == 0 || requests_.count(last_request_id_) != 0);
  return last_request_id_;
}

Status Session::send_request(Lock& lock, const Request& request, std::uint32_t id) {
  for (;;) {
    note_ended_locked();
    if (!ended_.ok()) return ended_;
    Status status = send(attachment_.socket, request.type, id, request.body, request.body_bytes, request.fds);
    if (status.code() == StatusCode::kDaemonLost) {
      take_packets_locked();  // tells why
      return ended_.ok() ? status : ended_;
    }
    if (status.code() != StatusCode::kWouldBlock) return status;
    lock.unlock();
    const bool writable = wait_writable(attachment_.socket, request.send_by);
    lock.lock();
    if (!writable) {
      return {StatusCode::kDeadlineExceeded,
              "the daemon does not read its socket, which is full of earlier requests; nothing was sent"};
    }
  }
}

Status Session::request(const Request& request, Packet& reply) {
  ReplyWaiter waiter(*this, reply);
  Lock lock(mutex_);
  const std::uint32_t id = new_request_id_locked();
  const Expected expected(*this, id, waiter);
  Status status = send_request(lock, request, id);
  if (!status.ok()) return status;
  wait(lock, waiter, request.reply_by);
  if (waiter.arrived()) return type_of(reply) == request.reply_type ? Status() : refusal(reply);
  if (!ended_.ok()) return ended_;
  if (request.type == abi::AttachType::kJoin) give_up_join_locked(id);
  return {StatusCode::kDeadlineExceeded, "the daemon did not answer in time"};
}

Status Session::join(const epd_group_config_t& config, Group*& out) {
  const std::int64_t wait_ms = config.timeout_ms == 0 ? kLongestJoinMs : config.timeout_ms;
  const Deadline send_by = Deadline::in_ms(wait_ms);
  const Deadline reply_by = Deadline::in_ms(wait_ms + kReplyMarginMs);
  abi::Join join{};
  OwnMemory own;
  Status status = make_join(config, join, own);
  if (!status.ok()) return status;
  std::list<std::unique_ptr<Group>> made;
  made.push_back(std::make_unique<Group>(*this, join.shape, std::move(own)));
  Group& group = *made.front();
  Packet reply;
  status = request({abi::AttachType::kJoin, abi::AttachType::kJoined, &join, sizeof(join), send_by, reply_by,
                    group.own.fds},
                   reply);
  if (!status.ok()) return status;
  status = adopt_joined(reply, group);
  if (status.ok()) status = open_calls(group);
  if (!status.ok()) {
    send_leave(group.member, Deadline::in_ms(kLeaveMs));
    return status;
  }
  const Lock lock(mutex_);
  groups_.splice(groups_.end(), made);
  out = &group;
  return {};
}

Status Session::map_user_arena(const UniqueFd& fd, Group& group) {
  const std::uint64_t bytes = group.arena.total_bytes;
  if (attachment_.device != nullptr) return attachment_.device->map(fd, bytes, group.device_user);
  Result<Mapping> user = map_sealed(fd, bytes, Access::kReadWrite, "the user arena");
  if (user.ok()) group.user = std::move(*user);
  return user.status();
}

Status Session::adopt_joined(Packet& packet, Group& group) {
  const auto answer = packet.read<abi::Joined>();
  if (!answer.ok()) return refusal(packet);
  const abi::Joined& joined = answer.value();
  group.member = joined.member;
  group.rank = joined.rank;
  group.epoch = joined.epoch;
  group.next_index = group.first_index = joined.resume_index;
  group.sum_ranks = joined.sum_ranks;
  group.default_timeout_ms = joined.default_timeout_ms;
  const std::uint64_t board_bytes = abi::BoardLayout(group.shape).total_bytes;
  if (joined.user_bytes != group.arena.total_bytes || joined.board_bytes != board_bytes) {
    return internal_error("the daemon made an arena of " + std::to_string(joined.user_bytes) +
                          " and a board of " + std::to_string(joined.board_bytes) + " bytes; needed: " +
                          std::to_string(group.arena.total_bytes) + " and " + std::to_string(board_bytes));
  }
  const bool calls = attachment_.welcome.resident != 0 && attachment_.device != nullptr;
  const std::size_t fds = calls ? 3 : 2;
  if (joined.rank >= group.shape.num_ranks || packet.fds.size() != fds) {
    return internal_error("the daemon's answer to join has rank " + std::to_string(joined.rank) + " and " +
                          std::to_string(packet.fds.size()) + " descriptors; needed: below " +
                          std::to_string(group.shape.num_ranks) + " and " + std::to_string(fds));
  }
  Status status = map_user_arena(packet.fds[0], group);
  if (!status.ok()) return status;
  Result<Mapping> board = map_sealed(packet.fds[1], board_bytes, Access::kReadOnly, "the board");
  if (!board.ok()) return board.status();
  group.board = BoardView(std::move(*board), group.shape);
  if (calls) {
    DeviceMemory results;
    status =
        attachment_.device->map_host(packet.fds[2], abi::ResultsLayout(group.shape).total_bytes, results);
    if (!status.ok()) return status;
    group.calls.open(std::move(results), group.shape);
  }
  return group.board.magic_fits() ? Status() : internal_error("the board from the daemon has a wrong magic");
}

void Session::send_leave(std::uint32_t member, Deadline deadline) {
  const abi::Leave leave{member, 0};
  Packet reply;
  // Whatever comes of it: a daemon that does not answer will see the connection close.
  [[maybe_unused]] const Status status = request(
      {abi::AttachType::kLeave, abi::AttachType::kLeft, &leave, sizeof(leave), deadline, deadline}, reply);
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
