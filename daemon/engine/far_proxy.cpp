#include "far_proxy.h"

#include "base/clock.h"

#include <poll.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <unistd.h>
#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <future>
#include <utility>

namespace epd {
namespace {

constexpr std::uint64_t kCopied = std::uint64_t{1} << 63;  // a hold of a body that was moved to be aligned
constexpr std::size_t kMostUntold = 64;                    // then nothing more is received

}  // namespace

Result<std::unique_ptr<FarProxy>> FarProxy::start(Open open, std::uint64_t spin_ns,
                                                  std::function<void()> notify) {
  UniqueFd bell(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!bell.valid()) return errno_status("eventfd");
  std::unique_ptr<FarProxy> proxy(new FarProxy(std::move(bell), spin_ns, std::move(notify)));
  std::promise<Status> opened;
  proxy->thread_ = std::thread([self = proxy.get(), &opened, &open] {
    Result<std::unique_ptr<transport::Transport>> made = open();
    if (!made.ok()) {
      opened.set_value(made.status());
      return;
    }
    self->transport_ = std::move(made).value();
    self->address_ = self->transport_->address();
    opened.set_value({});
    self->run();
    self->transport_.reset();
  });
  if (Status status = opened.get_future().get(); !status.ok()) return status;
  return proxy;
}

FarProxy::FarProxy(UniqueFd bell, std::uint64_t spin_ns, std::function<void()> notify)
    : bell_(std::move(bell)), spin_ns_(spin_ns), notify_(std::move(notify)) {}

FarProxy::~FarProxy() {
  stop_.store(true, std::memory_order_relaxed);
  wake();
  thread_.join();
}

// ---- the loop's

void FarProxy::connect(far::EngineId engine, transport::Address address) {
  order({ToThread::Kind::kConnect, engine, nullptr, {}, std::move(address)});
}
void FarProxy::close(far::EngineId engine) {
  order({ToThread::Kind::kClose, engine, nullptr, {}, {}});
}

bool FarProxy::send(std::unique_ptr<far::Message>& message) {
  if (!unsent_orders_.empty()) return false;
  ToThread command{ToThread::Kind::kSend, message->engine, std::move(message), {}, {}};
  if (!to_thread_.push(command)) {
    message = std::move(command.message);
    return false;
  }
  wake();
  return true;
}

void FarProxy::release(const far::Body& body) {
  if (body.hold != 0) order({ToThread::Kind::kRelease, 0, nullptr, body, {}});
}

void FarProxy::order(ToThread command) {
  if (!unsent_orders_.empty() || !to_thread_.push(command)) unsent_orders_.push_back(std::move(command));
  wake();
}

void FarProxy::wake() {
  // Pairs with the fence of sleep(): either the thread sees what was published, or this sees it sleep.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (!sleeping_.load(std::memory_order_relaxed)) return;
  const std::uint64_t one = 1;
  if (::write(bell_.get(), &one, sizeof(one)) < 0 && errno != EAGAIN) ::sched_yield();  // it wakes by itself
}

bool FarProxy::next(Event& event) {
  bool moved = false;
  while (!unsent_orders_.empty() && to_thread_.push(unsent_orders_.front())) {
    unsent_orders_.pop_front();
    moved = true;
  }
  if (moved) wake();
  ToLoop told;
  while (to_loop_.pop(told)) {
    if (told.away != nullptr) {
      told.away.reset();
      continue;
    }
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
    worked |= tell_loop();
    if (worked) {
      idle_since_ns = clock.now_ns();
    } else if (clock.now_ns() - idle_since_ns < spin_ns_) {
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
  return any;
}

void FarProxy::carry_out(ToThread& command) {
  switch (command.kind) {
    case ToThread::Kind::kConnect: return connect_peer(command.engine, command.address);
    case ToThread::Kind::kRelease:
      if ((command.body.hold & kCopied) != 0) {
        aligned_.erase(command.body.hold);
      } else {
        transport_->release({command.body.data, command.body.bytes, command.body.hold});
      }
      return;
    case ToThread::Kind::kClose:
      if (const auto peer = peers_.find(command.engine); peer != peers_.end()) {
        for (auto& message : peer->second.waiting) untold_.push_back({std::move(message), {}});
        // NOT_FOUND: it went down before.
        (void)transport_->close(peer->second.id);
        engines_.erase(peer->second.id);
        peers_.erase(peer);
      }
      return;
    case ToThread::Kind::kSend: break;
  }
  const auto peer = peers_.find(command.engine);
  if (peer == peers_.end()) {  // it is down, and the loop is told
    untold_.push_back({std::move(command.message), {}});
  } else if (!peer->second.waiting.empty() || !send_one(peer->second, command.message)) {
    peer->second.waiting.push_back(std::move(command.message));
  }
}

void FarProxy::connect_peer(far::EngineId engine, const transport::Address& address) {
  Result<transport::PeerId> peer = transport_->connect(address);
  if (!peer.ok()) {
    tell_down(engine, peer.status());
    return;
  }
  peers_[engine].id = *peer;
  engines_[*peer] = engine;
}

// False: there is no room. A message to a peer that is down is away.
bool FarProxy::send_one(Peer& peer, std::unique_ptr<far::Message>& message) {
  const std::uint64_t cookie = ++last_;
  const Status status =
      transport_->send(peer.id, std::as_bytes(std::span(&message->header, 1)), message->bytes(), cookie);
  if (status.code() == StatusCode::kWouldBlock) return false;
  if (status.ok()) {
    sent_[cookie] = std::move(message);
  } else {
    untold_.push_back({std::move(message), {}});
  }
  return true;
}

bool FarProxy::send_waiting() {
  bool any = false;
  for (auto& [engine, peer] : peers_) {
    while (!peer.waiting.empty() && send_one(peer, peer.waiting.front())) {
      peer.waiting.pop_front();
      any = true;
    }
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
        untold_.push_back({std::move(sent->second), {}});
        sent_.erase(sent);
      }
      return;
    case transport::EventKind::kDown:
      if (const auto engine = engines_.find(event.peer); engine != engines_.end()) {
        const far::EngineId number = engine->second;
        Peer& peer = peers_.at(number);
        for (auto& message : peer.waiting) untold_.push_back({std::move(message), {}});
        peers_.erase(number);
        engines_.erase(engine);
        tell_down(number, event.status);
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
  ToLoop told;
  told.event.engine = engine->second;
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

void FarProxy::tell_down(far::EngineId engine, const Status& status) {
  ToLoop told;
  told.event.kind = Event::Kind::kDown;
  told.event.engine = engine;
  told.event.status = status;
  untold_.push_back(std::move(told));
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

void FarProxy::sleep() {
  sleeping_.store(true, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  // What waits for room in a ring, or at the transport, is looked at again after a millisecond.
  const bool pressed = !untold_.empty() || std::any_of(peers_.begin(), peers_.end(), [](const auto& peer) {
    return !peer.second.waiting.empty();
  });
  if (to_thread_.empty() && !stop_.load(std::memory_order_relaxed) && transport_->arm()) {
    pollfd waiting[] = {{bell_.get(), POLLIN, 0}, {transport_->wait_fd(), POLLIN, 0}};
    sleeps_.fetch_add(1, std::memory_order_relaxed);
    ::poll(waiting, 2, pressed ? 1 : transport::kMaxSleepMs);
    std::uint64_t rung = 0;
    if (waiting[0].revents != 0 && ::read(bell_.get(), &rung, sizeof(rung)) < 0) ::sched_yield();
  }
  sleeping_.store(false, std::memory_order_relaxed);
}

}  // namespace epd
