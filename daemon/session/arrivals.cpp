// Connections until their Hello: who is let in, and who makes room.
#include "session/session_table.h"

#include "base/event.h"
#include "porter.h"

#include <algorithm>
#include <limits>

namespace epd::session {
namespace {

constexpr int kArrivalsPerTurn = 64;
constexpr std::uint64_t kConnectionDescriptors = 2;  // its socket, its process

}  // namespace

void SessionTable::admit_all() {
  for (int i = 0; i < kArrivalsPerTurn && gate_ != nullptr; ++i) {
    std::optional<Gate::Arrival> arrival = gate_->take();
    if (!arrival) return;
    admit(std::move(*arrival));
  }
}

// The reason if this connection is one too many.
Status SessionTable::check_arrival(const PeerIdentity& peer) const {
  if (gate_ == nullptr) return {};
  const auto of_user =
      static_cast<std::size_t>(std::count_if(connections_.begin(), connections_.end(),
                                             [&](const auto& e) { return e.second.peer.uid == peer.uid; }));
  // Each connection has a porter, this one too.
  const auto ending = [](std::size_t porters, std::size_t open) {
    return porters > open ? porters - open : 0;
  };
  const auto too_many = [](const std::string& who, std::size_t count, std::size_t allowed) {
    return resource_exhausted(
        who + " " + std::to_string(count) +
        " connections that are still being closed; allowed: " + std::to_string(allowed));
  };
  if (const std::size_t count = ending(gate_->porters(peer.uid), of_user + 1); count >= kMaxEndingPerUser)
    return too_many("user " + std::to_string(peer.uid) + " has", count, kMaxEndingPerUser);
  if (const std::size_t count = ending(gate_->porters({}), connections_.size() + 1);
      count >= kMaxEnding && !is_privileged(peer.uid))
    return too_many("all users have", count, kMaxEnding);
  return {};
}

// An honest client says Hello at once, so the oldest connection without one ends. Users can't end
// connections of the privileged, who don't end theirs.
void SessionTable::make_room(const PeerIdentity& peer) {
  std::size_t of_all = 0;
  std::size_t of_user = 0;
  std::uint64_t oldest = 0;  // 0: there is none
  std::uint64_t oldest_of_user = 0;
  for (const auto& [id, other] : connections_) {
    if (other.attached) continue;
    const bool same = other.peer.uid == peer.uid;
    of_all += 1;
    of_user += same ? 1 : 0;
    if (oldest == 0 && !is_privileged(other.peer.uid)) oldest = id;
    if (oldest_of_user == 0 && same) oldest_of_user = id;
  }
  const auto make = [this](std::uint64_t id, const std::string& who, std::uint32_t allowed) {
    receive(id, 1);  // its Hello may be here
    const auto found = connections_.find(id);
    if (found == connections_.end() || found->second.attached) return;
    end_half_open(id, resource_exhausted(who + " " + std::to_string(allowed) +
                                         " connections without Hello, of which this was the oldest when one "
                                         "more came; allowed: " +
                                         std::to_string(allowed)));
  };
  if (of_user >= kMaxHalfOpenPerUser) {
    make(oldest_of_user, "user " + std::to_string(peer.uid) + " has", kMaxHalfOpenPerUser);
  } else if (of_all >= kMaxHalfOpen && !is_privileged(peer.uid) && oldest != 0) {
    make(oldest, "all users have", kMaxHalfOpen);
  }
}

void SessionTable::end_half_open(std::uint64_t id, const Status& status) {
  Session& session = connections_.at(id);
  ++total_refused_;
  note_pending(session, 0);
  refuse(id, 0, status);
  static LogLimiter late;
  static LogLimiter crowded;
  LogLimiter& limiter = status.code() == StatusCode::kDeadlineExceeded ? late : crowded;
  limiter.record(EventKind::kRefused, LogLevel::kWarning, "connection closed: no Hello",
                 {{"uid", session.peer.uid}, {"pid", session.peer.pid}, {"reason", status.message()}},
                 session.peer.uid);
  close(id, "said no Hello");
}

void SessionTable::admit(Gate::Arrival arrival) {
  if (!arrival.socket.valid()) {
    static LogLimiter limiter;
    limiter.log(LogLevel::kError, "connection lost: no descriptor is left", {{"uid", arrival.peer.uid}});
    return;
  }
  if (Status status = check_arrival(arrival.peer); !status.ok()) return turn_away(arrival, status);
  make_room(arrival.peer);
  Result<DescriptorShare> share = descriptors_.take(arrival.peer.uid, kConnectionDescriptors);
  if (!share.ok()) return turn_away(arrival, share.status());
  const std::uint64_t id = next_id_++;
  Session& session = connections_[id];
  session.id = id;
  session.socket = std::move(arrival.socket);
  session.peer = std::move(arrival.peer);
  session.descriptors = std::move(*share);
  session.accepted_ns = clock_.now_ns();
  Status status = watch(session.socket.get(), id);
  if (status.ok()) status = order(session.socket.get(), PorterOrder::kAdmit);
  if (!status.ok()) close(id, "could not be admitted");
}

void SessionTable::turn_away(const Gate::Arrival& arrival, const Status& status) {
  ++total_refused_;
  static LogLimiter limiter;
  limiter.record(EventKind::kRefused, LogLevel::kWarning, "connection refused",
                 {{"uid", arrival.peer.uid}, {"pid", arrival.peer.pid}, {"reason", status.message()}},
                 arrival.peer.uid);
  (void)send_message(arrival.socket.get(), abi::AttachType::kRefused, refusal(status));
}

void SessionTable::tick() {
  const std::uint64_t now = clock_.now_ns();
  const std::uint64_t allowed_ns = std::uint64_t{options_.limits.attach_timeout_ms} * 1'000'000;
  std::vector<std::uint64_t> due;
  for (const auto& [id, session] : connections_) {
    if (!session.attached && session.accepted_ns + allowed_ns <= now) due.push_back(id);
  }
  const Status status(StatusCode::kDeadlineExceeded,
                      "no Hello within " + std::to_string(options_.limits.attach_timeout_ms) + " ms");
  for (const std::uint64_t id : due) end_half_open(id, status);
}

std::uint64_t SessionTable::next_due_ns() const {
  std::uint64_t due = std::numeric_limits<std::uint64_t>::max();
  const std::uint64_t allowed_ns = std::uint64_t{options_.limits.attach_timeout_ms} * 1'000'000;
  for (const auto& [id, session] : connections_) {
    if (!session.attached) due = std::min(due, session.accepted_ns + allowed_ns);
  }
  return due;
}

}  // namespace epd::session
