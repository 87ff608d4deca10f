#include "far_proxy.h"

#include "base/clock.h"
#include "base/log.h"

#include <poll.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <unistd.h>
#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <future>
#include <string>
#include <system_error>
#include <utility>

namespace epd::engine {
namespace {

constexpr std::uint64_t kCopied = std::uint64_t{1}
                                  << 63;           // marks a hold of a body that was copied to be aligned
constexpr std::size_t kMostUntold = 64;            // with so many events pending, nothing more is received
constexpr std::uint64_t kDeafNs = 20'000'000;      // between two looks whether the port is there
constexpr std::uint64_t kDroppedNs = 100'000'000;  // between two events about what the transport has dropped

}  // namespace

Result<std::unique_ptr<FarProxy>> FarProxy::start(Open open, std::uint64_t spin_ns,
                                                  std::function<void()> notify) {
  UniqueFd bell(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!bell.valid()) return errno_status("eventfd");
  std::unique_ptr<FarProxy> proxy(new FarProxy(std::move(bell), spin_ns, std::move(notify)));
  std::promise<Status> opened;
  const auto run = [self = proxy.get(), &opened, &open] {
    Result<std::unique_ptr<transport::Transport>> made = open();
    if (!made.ok()) {
      opened.set_value(made.status());
      return;
    }
    self->transport_ = std::move(made).value();
    self->address_ = self->transport_->address();
    self->carrier_ = self->transport_->carrier();
    opened.set_value({});
    self->run();
    self->transport_.reset();
  };
  try {
    proxy->thread_ = std::thread(run);
  } catch (const std::system_error& error) {
    return resource_exhausted(std::string("no thread for the network: ") + error.what());
  }
  if (Status status = opened.get_future().get(); !status.ok()) return status;
  return proxy;
}

FarProxy::FarProxy(UniqueFd bell, std::uint64_t spin_ns, std::function<void()> notify)
    : bell_(std::move(bell)), spin_ns_(spin_ns), notify_(std::move(notify)) {}

FarProxy::~FarProxy() {
  stop_.store(true, std::memory_order_relaxed);
  wake();
  if (thread_.joinable()) thread_.join();
}

// ---- the loop's

void FarProxy::connect(far::EngineId engine, transport::Address address) {
  const Connection connection = ++last_connection_;
  connections_[engine] = connection;
  order({ToThread::Kind::kConnect, engine, connection, nullptr, {}, std::move(address)});
}

void FarProxy::close(far::EngineId engine) {
  if (connections_.erase(engine) != 0) order({ToThread::Kind::kClose, engine, 0, nullptr, {}, {}});
}

bool FarProxy::send(std::unique_ptr<far::Message>& message) {
  const auto connection = connections_.find(message->engine);
  if (connection == connections_.end()) {
    message.reset();
    return true;
  }
  if (!unsent_orders_.empty()) return false;
  ToThread command{ToThread::Kind::kSend, message->engine, connection->second, std::move(message), {}, {}};
  if (!push(command)) {
    message = std::move(command.message);
    return false;
  }
  wake();
  return true;
}

void FarProxy::release(const far::Body& body) {
  if (body.hold != 0) order({ToThread::Kind::kRelease, 0, 0, nullptr, body, {}});
}

void FarProxy::order(ToThread command) {
  if (!unsent_orders_.empty() || !push(command)) unsent_orders_.push_back(std::move(command));
  wake();
}

// False: the ring is full. The loop is notified when it has space.
bool FarProxy::push(ToThread& command) {
  if (to_thread_.push(command)) return true;
  ring_was_full_.store(true, std::memory_order_seq_cst);
  return to_thread_.push(command);  // the thread may have made space before it could see that
}

void FarProxy::send_orders() {
  bool moved = false;
  while (!unsent_orders_.empty() && push(unsent_orders_.front())) {
    unsent_orders_.pop_front();
    moved = true;
  }
  if (moved) wake();
}

void FarProxy::wake() {
  // Pairs with the fence of sleep(): either the thread sees what was published, or this function sees that it
  // sleeps.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (!sleeping_.load(std::memory_order_relaxed)) return;
  const std::uint64_t one = 1;
  if (::write(bell_.get(), &one, sizeof(one)) < 0 && errno != EAGAIN)
    ::sched_yield();  // the thread wakes by itself
}

bool FarProxy::next(Event& event) {
  send_orders();
  ToLoop told;
  while (to_loop_.pop(told)) {
    if (told.away != nullptr) {
      told.away.reset();
      continue;
    }
    if (told.event.kind == Event::Kind::kDropped) {
      event = std::move(told.event);
      return true;
    }
    const auto connection = connections_.find(told.event.engine);
    if (connection == connections_.end() || connection->second != told.connection) {
      release(told.event.body);
      continue;
    }
    if (told.event.kind == Event::Kind::kDown) connections_.erase(connection);
    event = std::move(told.event);
    return true;
  }
  return false;
}

// ---- the thread's

void FarProxy::run() {
  const MonotonicClock clock;
  std::uint64_t idle_since_ns = clock.now_ns();
  while (!stop_.load(std::memory_order_relaxed)) {
    bool worked = take_orders();
    worked |= send_waiting();
    worked |= progress();
    const std::uint64_t now_ns = clock.now_ns();
    worked |= tell_dropped(now_ns);
    worked |= tell_loop();
    look_whether_deaf(now_ns);
    if (worked) {
      idle_since_ns = now_ns;
    } else if (now_ns - idle_since_ns < spin_ns_.load(std::memory_order_relaxed)) {
      ::sched_yield();
    } else {
      sleep();
    }
  }
}

bool FarProxy::take_orders() {
  ToThread command;
  bool any = false;
  for (int i = 0; i < 64 && to_thread_.pop(command); ++i) {
    carry_out(command);
    any = true;
  }
  std::atomic_thread_fence(std::memory_order_seq_cst);  // pairs with push(): either this thread sees the
                                                        // room, or push() sees the wish
  if (any && ring_was_full_.load(std::memory_order_relaxed) && ring_was_full_.exchange(false)) notify_();
  return any;
}

void FarProxy::carry_out(ToThread& command) {
  switch (command.kind) {
    case ToThread::Kind::kConnect: return connect_peer(command);
    case ToThread::Kind::kRelease: return release_body(command.body);
    case ToThread::Kind::kClose: return forget(command.engine);
    case ToThread::Kind::kSend: return send_to_peer(command);
  }
}

void FarProxy::connect_peer(const ToThread& command) {
  forget(command.engine);
  Result<transport::PeerId> peer = transport_->connect(command.address);
  if (!peer.ok()) {
    tell_down(command.engine, command.connection, peer.status());
    return;
  }
  peers_[command.engine] = {*peer, command.connection, false, {}};
  engines_[*peer] = command.engine;
}

void FarProxy::release_body(const far::Body& body) {
  if ((body.hold & kCopied) != 0) {
    aligned_.erase(body.hold);
  } else {
    transport_->release({body.data, body.bytes, body.hold});
  }
}

void FarProxy::send_to_peer(ToThread& command) {
  const auto found = peers_.find(command.engine);
  if (found == peers_.end() || found->second.connection != command.connection) {  // the loop has been told
    untold_.push_back({std::move(command.message), {}, 0});
    return;
  }
  Peer& peer = found->second;
  Status status =
      peer.waiting.empty() ? send_one(peer, command.message) : Status(StatusCode::kWouldBlock, "others wait");
  if (status.code() == StatusCode::kWouldBlock) {
    peer.waiting.push_back(std::move(command.message));
  } else if (!status.ok()) {
    tell_down(command.engine, command.connection, status);
    forget(command.engine);
  }
}

// Drops messages that wait for the peer's room, and reports them as sent.
void FarProxy::forget(far::EngineId engine) {
  const auto peer = peers_.find(engine);
  if (peer == peers_.end()) return;
  for (auto& message : peer->second.waiting) untold_.push_back({std::move(message), {}, 0});
  (void)transport_->close(peer->second.id);  // also if it is down
  engines_.erase(peer->second.id);
  peers_.erase(peer);
}

// WOULD_BLOCK: there is no space. OK: the message is under way. Any other status: message and peer are lost.
Status FarProxy::send_one(const Peer& peer, std::unique_ptr<far::Message>& message) {
  const std::uint64_t cookie = ++last_;
  Status status =
      transport_->send(peer.id, std::as_bytes(std::span(&message->header, 1)), message->bytes(), cookie);
  if (status.code() == StatusCode::kWouldBlock) return status;
  if (status.ok()) {
    sent_[cookie] = std::move(message);
  } else {
    untold_.push_back({std::move(message), {}, 0});
  }
  return status;
}

bool FarProxy::send_waiting() {
  bool any = false;
  for (auto next = peers_.begin(); next != peers_.end();) {
    const auto entry = next++;
    Peer& peer = entry->second;
    Status status;
    while (status.ok() && !peer.waiting.empty()) {
      status = send_one(peer, peer.waiting.front());
      if (status.code() == StatusCode::kWouldBlock) break;
      peer.waiting.pop_front();
      any = true;
    }
    if (status.ok() || status.code() == StatusCode::kWouldBlock) continue;
    tell_down(entry->first, peer.connection, status);
    forget(entry->first);
  }
  return any;
}

bool FarProxy::progress() {
  if (untold_.size() >= kMostUntold) return false;
  std::array<transport::Event, 16> events;
  const std::size_t count = transport_->progress(events);
  for (transport::Event& event : std::span(events).first(count)) take(event);
  return count != 0;
}

void FarProxy::take(transport::Event& event) {
  switch (event.kind) {
    case transport::EventKind::kSent:
      if (const auto sent = sent_.find(event.cookie); sent != sent_.end()) {
        untold_.push_back({std::move(sent->second), {}, 0});
        sent_.erase(sent);
      }
      return;
    case transport::EventKind::kDown:
      if (const auto engine = engines_.find(event.peer); engine != engines_.end()) {
        const far::EngineId number = engine->second;
        tell_down(number, peers_.at(number).connection, event.status);
        forget(number);
      }
      return;
    case transport::EventKind::kFlushed: return;
    case transport::EventKind::kReceived: break;
  }
  const auto engine = engines_.find(event.peer);
  if (engine == engines_.end()) {
    transport_->release(event.body);
    return;
  }
  Peer& from = peers_.at(engine->second);
  if (!from.heard) tell_connected(engine->second, from);
  ToLoop told;
  told.event.engine = engine->second;
  told.connection = from.connection;
  told.event.header = event.header;
  told.event.body = {event.body.data, event.body.bytes, event.body.hold};
  if (reinterpret_cast<std::uintptr_t>(event.body.data) % abi::kFarRecordAlign != 0) {
    std::vector<Line> copy((event.body.bytes + sizeof(Line) - 1) / sizeof(Line));
    std::memcpy(copy.data(), event.body.data, event.body.bytes);
    transport_->release(event.body);
    told.event.body.hold = kCopied | ++last_;
    told.event.body.data = copy.data()->bytes;
    aligned_[told.event.body.hold] = std::move(copy);
  }
  untold_.push_back(std::move(told));
}

void FarProxy::tell_connected(far::EngineId engine, Peer& peer) {
  peer.heard = true;
  Result<transport::Facts> facts = transport_->facts(peer.id);
  if (!facts.ok()) return;
  ToLoop told;
  told.event.kind = Event::Kind::kConnected;
  told.event.engine = engine;
  told.event.facts = std::make_unique<transport::Facts>(std::move(facts).value());
  told.connection = peer.connection;
  untold_.push_back(std::move(told));
}

void FarProxy::tell_down(far::EngineId engine, Connection connection, const Status& status) {
  ToLoop told;
  told.event.kind = Event::Kind::kDown;
  told.event.engine = engine;
  told.event.status = status;
  told.connection = connection;
  untold_.push_back(std::move(told));
}

// The thread wakes up often enough by itself.
bool FarProxy::tell_dropped(std::uint64_t now_ns) {
  const transport::Counters counters = transport_->counters();
  if (counters.dropped_unknown == told_dropped_.dropped_unknown &&
      counters.dropped_malformed == told_dropped_.dropped_malformed)
    return false;
  if (now_ns < told_dropped_ns_ + kDroppedNs) return false;
  ToLoop told;
  told.event.kind = Event::Kind::kDropped;
  told.event.strangers = counters.dropped_unknown - told_dropped_.dropped_unknown;
  told.event.malformed = counters.dropped_malformed - told_dropped_.dropped_malformed;
  untold_.push_back(std::move(told));
  told_dropped_ = counters;
  told_dropped_ns_ = now_ns;
  return true;
}

bool FarProxy::tell_loop() {
  bool any = false;
  while (!untold_.empty() && to_loop_.push(untold_.front())) {
    untold_.pop_front();
    any = true;
  }
  if (any) notify_();
  return any;
}

void FarProxy::look_whether_deaf(std::uint64_t now_ns) {
  if (deaf() || now_ns < looked_deaf_ns_ + kDeafNs) return;
  looked_deaf_ns_ = now_ns;
  if (!transport_->deaf()) return;
  log_event(LogLevel::kError, "listener lost",
            {{"reason",
              "the network library has closed its port, as it does when a descriptor is missing for a "
              "connection"}});
  deaf_.store(true, std::memory_order_relaxed);
}

// If something waits for room in a ring or at the transport, the thread looks again after a millisecond.
// While a ring is full the transport is not armed: it may have events that nobody could take.
void FarProxy::sleep() {
  sleeping_.store(true, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  const bool full = !untold_.empty();
  const bool pressed = full || std::any_of(peers_.begin(), peers_.end(),
                                           [](const auto& peer) { return !peer.second.waiting.empty(); });
  if (to_thread_.empty() && !stop_.load(std::memory_order_relaxed) && (full || transport_->arm())) {
    pollfd waiting[] = {{bell_.get(), POLLIN, 0}, {transport_->wait_fd(), POLLIN, 0}};
    sleeps_.fetch_add(1, std::memory_order_relaxed);
    ::poll(waiting, full ? 1 : 2, pressed ? 1 : transport::kMaxSleepMs);
    std::uint64_t rung = 0;
    if (waiting[0].revents != 0 && ::read(bell_.get(), &rung, sizeof(rung)) < 0) ::sched_yield();
  }
  sleeping_.store(false, std::memory_order_relaxed);
}

}  // namespace epd::engine
