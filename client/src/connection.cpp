#include "connection.h"

#include <poll.h>
#include <sys/socket.h>
#include <algorithm>
#include <chrono>
#include <new>

namespace epd::client {

// A request in progress. The thread that reads the socket finds it by its id.
class ReplyWaiter final : public Waiter {
 public:
  ReplyWaiter(const Connection& connection, Packet& reply) : connection_(connection), reply_(reply) {}
  bool ready() override { return arrived_ || !connection_.ended().ok(); }
  bool arrived() const { return arrived_; }
  void take(Packet& packet) {
    reply_ = std::move(packet);
    arrived_ = true;
  }

 private:
  const Connection& connection_;
  Packet& reply_;
  bool arrived_ = false;
};

// An entry in the table of requests. With the mutex.
class Connection::Expected {
 public:
  Expected(Connection& connection, std::uint32_t id, ReplyWaiter& waiter) : connection_(connection), id_(id) {
    connection_.requests_.emplace(id, &waiter);
  }
  ~Expected() {
    const auto found = connection_.requests_.find(id_);
    if (found != connection_.requests_.end() && found->second != nullptr) connection_.requests_.erase(found);
  }
  Expected(const Expected&) = delete;
  Expected& operator=(const Expected&) = delete;

 private:
  Connection& connection_;
  const std::uint32_t id_;
};

void Connection::look_at_socket() noexcept {
  const Lock lock = waits_.lock();
  try {
    take_packets_locked();
  } catch (const std::bad_alloc&) {
    end_locked({StatusCode::kResourceExhausted, "out of memory"});  // a short text needs no allocation
  }
}

void Connection::take_packets_locked() {
  Packet packet;
  Status error;
  // The loop is bounded, so a daemon that never stops sending can't hold the lock for ever.
  for (int i = 0; i < 64 && ended_.ok(); ++i) {
    const ReceiveResult received = receive(socket_, packet, error);
    if (received == ReceiveResult::kNothing) break;
    if (received == ReceiveResult::kPacket) {
      route_locked(packet);
      continue;
    }
    note_end_locked();
    end_locked(received == ReceiveResult::kMalformed
                   ? error
                   : daemon_lost("the daemon closed the connection: it has stopped or died; attach again"));
  }
  send_owed_leaves_locked();
}

void Connection::route_locked(Packet& packet) {
  const std::uint32_t id = packet.header.request_id;
  const auto found = requests_.find(id);
  if (ReplyWaiter* waiter = found != requests_.end() ? found->second : nullptr; waiter != nullptr) {
    requests_.erase(found);
    waiter->take(packet);
    waiter->wake.notify_one();
    waits_.kick();  // the waiter may be the leader, asleep, if this is another thread
    return;
  }
  if (found != requests_.end()) requests_.erase(found);
  const auto joined = packet.read<abi::Joined>();
  const abi::AttachType type = type_of(packet);
  if (type == abi::AttachType::kJoined && joined.ok()) {
    if (joined.value().kept == 0) owed_leaves_.push_back(joined.value().member);
  } else if (type == abi::AttachType::kGoodbye || (type == abi::AttachType::kRefused && id == 0)) {
    note_end_locked();
    end_locked(refusal(packet));
  }
}

bool Connection::awaits_late_join_locked() const {
  return ended_.ok() && std::any_of(requests_.begin(), requests_.end(),
                                    [](const auto& request) { return request.second == nullptr; });
}

// A full socket holds requests, whose replies will come. What does not fit now is sent when the next packet
// arrives.
void Connection::send_owed_leaves_locked() {
  while (!owed_leaves_.empty()) {
    const abi::Leave leave{owed_leaves_.back(), 0};
    const Status sent = send(socket_, abi::AttachType::kLeave, new_request_id_locked(), leave);
    if (!sent.ok()) return;
    owed_leaves_.pop_back();
  }
}

// The library does not know whether this rank is a member or will be. If so, it leaves again. The hook thread
// reads the reply, because no other call may ever read the socket.
void Connection::give_up_join_locked(std::uint32_t id) {
  requests_[id] = nullptr;
  events_.on_late_join_locked();
}

std::uint32_t Connection::new_request_id_locked() {
  do {
    ++last_request_id_;
  } while (last_request_id_ == 0 || requests_.count(last_request_id_) != 0);
  return last_request_id_;
}

Status Connection::send_request(Lock& lock, const Request& request, std::uint32_t id) {
  for (;;) {
    note_end_locked();
    if (!ended_.ok()) return ended_;
    Status status = send(socket_, request.type, id, request.body, request.body_bytes, request.fds);
    if (status.code() == StatusCode::kDaemonLost) {
      take_packets_locked();  // the daemon may have said why
      return ended_.ok() ? status : ended_;
    }
    if (status.code() != StatusCode::kWouldBlock) return status;
    lock.unlock();
    const bool writable = wait_writable(socket_, request.send_by);
    lock.lock();
    if (!writable) {
      return {StatusCode::kDeadlineExceeded,
              "the daemon does not read its socket, which is full of earlier requests; nothing was sent"};
    }
  }
}

Status Connection::request(const Request& request, Packet& reply) {
  ReplyWaiter waiter(*this, reply);
  Lock lock = waits_.lock();
  const std::uint32_t id = new_request_id_locked();
  const Expected expected(*this, id, waiter);
  Status status = send_request(lock, request, id);
  if (!status.ok()) return status;
  waits_.wait(lock, waiter, request.reply_by);
  if (waiter.arrived()) return type_of(reply) == request.reply_type ? Status() : refusal(reply);
  if (!ended_.ok()) return ended_;
  if (request.type == abi::AttachType::kJoin) give_up_join_locked(id);
  return {StatusCode::kDeadlineExceeded, "the daemon did not answer in time"};
}

bool Connection::tell_locked(abi::AttachType type, const void* body, std::size_t body_bytes) {
  return ended_.ok() && send(socket_, type, new_request_id_locked(), body, body_bytes, {}).ok();
}

void Connection::leave(std::uint32_t member, Deadline deadline) {
  const abi::Leave leave{member, 0};
  Packet reply;
  // The result does not matter: a daemon that does not answer will see the connection close.
  [[maybe_unused]] const Status status = request(
      {abi::AttachType::kLeave, abi::AttachType::kLeft, &leave, sizeof(leave), deadline, deadline}, reply);
}

// ---- the end ---------------------------------------------------------------------------------------

void Connection::end_locked(Status status) {
  if (!ended_.ok()) return;
  ended_ = std::move(status);
  events_.on_end_locked();
  waits_.notify_locked();
  waits_.kick();
}

bool Connection::serving() const {
  return b_.state.load(std::memory_order_acquire) == static_cast<std::uint32_t>(abi::SessionState::kServing);
}

void Connection::note_end_locked() {
  if (!ended_.ok()) return;
  if (b_.state.load(std::memory_order_acquire) != static_cast<std::uint32_t>(abi::SessionState::kEnded)) {
    return;
  }
  StatusCode code = checked_code(b_.end_status.load(std::memory_order_relaxed));
  if (code == StatusCode::kOk) code = StatusCode::kAborted;
  std::string text;
  try {
    text.assign(b_.message, abi::text_length(b_.message));
    if (text.empty()) text = "the daemon ended this session";
  } catch (const std::bad_alloc&) {
    text.clear();  // the caller gets the status alone
  }
  end_locked({code, std::move(text)});
}

void Connection::probe() {
  {
    const Lock lock = waits_.lock();
    const SteadyClock::time_point now = SteadyClock::now();
    if (!ended_.ok() || now - last_probe_ < std::chrono::milliseconds(1)) return;
    last_probe_ = now;
  }
  pollfd entry{socket_.get(), POLLIN | POLLRDHUP, 0};
  if (::poll(&entry, 1, 0) > 0) look_at_socket();
}

// Perhaps no thread waits that would notice the daemon's end, so look.
Status Connection::blocked(Lock& lock, std::string why) {
  lock.unlock();
  probe();
  lock.lock();
  return ended_.ok() ? would_block(std::move(why)) : ended_;
}

}  // namespace epd::client
