#include "in_process_transport.h"

#include "common/fd.h"
#include "shared.h"

#include <unistd.h>
#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>

namespace epd::transport {
namespace {

class InProcess;

// Lies in the receiver's inbox. The body stays the sender's until the receiver has copied it.
struct Message {
  InProcess* from = nullptr;
  PeerId peer = 0;  // the receiver, as the sender calls it
  std::uint64_t cookie = 0;
  bool flush = false;
  Header header;
  std::span<const std::byte> body;
};

struct Peer {
  std::uint64_t transport = 0;  // the other side's
  std::uint32_t sends = 0;      // flushes too
  bool flushing = false;
  bool down = false;
};

using Memory = std::unique_ptr<std::byte[]>;

}  // namespace

// The mutex guards the map and everything of all transports but their holds.
struct Hub {
  std::mutex mutex;
  std::map<std::uint64_t, InProcess*> transports;
  const std::uint64_t id = random_id();
};

namespace {

class InProcess final : public Transport {
 public:
  InProcess(std::shared_ptr<Hub> hub, std::uint64_t id, Address address, const Limits& limits, UniqueFd event)
      : hub_(std::move(hub)),
        id_(id),
        address_(std::move(address)),
        limits_(limits),
        event_(std::move(event)) {}
  ~InProcess() override;

  const Address& address() const override { return address_; }
  const Limits& limits() const override { return limits_; }
  std::string carrier() const override { return "in-process"; }
  Result<PeerId> connect(std::span<const std::byte> address) override;
  Status close(PeerId peer) override;
  Status send(PeerId peer, std::span<const std::byte> header, std::span<const std::byte> body,
              std::uint64_t cookie) override;
  Status flush(PeerId peer, std::uint64_t cookie) override;
  void release(const Body& body) override;
  std::size_t progress(std::span<Event> events) override;
  int wait_fd() const override { return event_.get(); }
  bool arm() override;
  Counters counters() const override { return counters_; }
  bool deaf() const override { return false; }
  Result<Facts> facts(PeerId peer) const override;

 private:
  // All of these with the lock held.
  std::map<PeerId, Peer>::iterator peer_of(std::uint64_t transport);
  InProcess* find(std::uint64_t transport) const;
  Status post(PeerId peer, Message message);
  void push(Event event);
  // The message is away: its sender hears of it.
  void settle(const Message& message, Status status);
  void receive(const Message& message, Event& event, bool& received);
  // The other side has ended.
  void lose(std::uint64_t transport);

  const std::shared_ptr<Hub> hub_;
  const std::uint64_t id_;
  const Address address_;
  const Limits limits_;
  const UniqueFd event_;
  std::map<PeerId, Peer> peers_;
  PeerId last_peer_ = 0;
  std::deque<Message> inbox_;
  std::deque<Event> events_;
  Counters counters_;  // the owner's alone
  Holds<Memory> holds_;
};

std::map<PeerId, Peer>::iterator InProcess::peer_of(std::uint64_t transport) {
  return std::find_if(peers_.begin(), peers_.end(),
                      [transport](const auto& entry) { return entry.second.transport == transport; });
}

InProcess* InProcess::find(std::uint64_t transport) const {
  const auto found = hub_->transports.find(transport);
  return found == hub_->transports.end() ? nullptr : found->second;
}

void InProcess::push(Event event) {
  events_.push_back(std::move(event));
  ring_eventfd(event_.get());
}

Result<PeerId> InProcess::connect(std::span<const std::byte> address) {
  Result<AddressParts> parts = read_address(address, AddressKind::kInProcess);
  if (!parts.ok()) return parts.status();
  if (parts->detail != hub_->id) return invalid_argument("transport address is of another network");
  if (parts->transport == id_) return own_address();
  const std::lock_guard lock(hub_->mutex);
  const auto known = peer_of(parts->transport);
  if (known != peers_.end()) return already_connected(known->first);
  const PeerId id = ++last_peer_;
  peers_[id].transport = parts->transport;
  if (find(parts->transport) == nullptr) lose(parts->transport);
  return id;
}

Status InProcess::post(PeerId peer, Message message) {
  const std::lock_guard lock(hub_->mutex);
  const auto found = peers_.find(peer);
  if (found == peers_.end()) return no_such_peer(peer);
  if (found->second.down) return peer_is_down(peer);
  if (found->second.flushing) return flush_under_way(peer);
  if (found->second.sends >= limits_.max_sends) return too_many_sends(peer, limits_);
  InProcess* to = find(found->second.transport);
  EPD_CHECK(to != nullptr);  // else the peer would be down
  ++found->second.sends;
  found->second.flushing = message.flush;
  message.from = this;
  message.peer = peer;
  to->inbox_.push_back(message);
  ring_eventfd(to->event_.get());
  return {};
}

Status InProcess::send(PeerId peer, std::span<const std::byte> header, std::span<const std::byte> body,
                       std::uint64_t cookie) {
  if (Status status = check_message(limits_, header.size(), body.size()); !status.ok()) return status;
  Message message;
  message.cookie = cookie;
  message.header = Header(header);
  message.body = body;
  Status status = post(peer, message);
  if (status.ok()) ++counters_.accepted;
  return status;
}

Status InProcess::flush(PeerId peer, std::uint64_t cookie) {
  Message message;
  message.cookie = cookie;
  message.flush = true;
  return post(peer, message);
}

void InProcess::settle(const Message& message, Status status) {
  const auto peer = message.from->peers_.find(message.peer);
  if (peer != message.from->peers_.end()) {
    --peer->second.sends;
    if (message.flush) peer->second.flushing = false;
  }
  Event event;
  event.kind = message.flush ? EventKind::kFlushed : EventKind::kSent;
  event.peer = message.peer;
  event.cookie = message.cookie;
  event.status = std::move(status);
  message.from->push(std::move(event));
}

void InProcess::receive(const Message& message, Event& event, bool& received) {
  const auto peer = peer_of(message.from->id_);
  if (peer == peers_.end() || peer->second.down) {
    ++counters_.dropped_unknown;
    return;
  }
  if (message.body.size() > limits_.max_body_bytes) {
    ++counters_.dropped_malformed;
    return;
  }
  ++counters_.received;
  received = true;
  event = Event();
  event.peer = peer->first;
  event.header = message.header;
  if (message.body.empty()) return;
  Memory memory(new std::byte[message.body.size()]);
  std::memcpy(memory.get(), message.body.data(), message.body.size());
  event.body.data = memory.get();
  event.body.bytes = message.body.size();
  event.body.hold = holds_.add(std::move(memory));
}

std::size_t InProcess::progress(std::span<Event> events) {
  const std::lock_guard lock(hub_->mutex);
  std::size_t count = 0;
  // Messages first: kDown, which is in the other queue, is a peer's last event.
  while (count < events.size() && !inbox_.empty()) {
    const Message message = inbox_.front();
    inbox_.pop_front();
    if (!message.flush) {
      bool received = false;
      receive(message, events[count], received);
      if (received) ++count;
    }
    settle(message, {});
  }
  while (count < events.size() && !events_.empty()) {
    events[count++] = std::move(events_.front());
    events_.pop_front();
  }
  return count;
}

bool InProcess::arm() {
  const std::lock_guard lock(hub_->mutex);
  if (!inbox_.empty() || !events_.empty()) return false;
  std::uint64_t rung = 0;
  (void)!::read(event_.get(), &rung, sizeof(rung));
  return true;
}

void InProcess::release(const Body& body) {
  if (body.hold != 0) holds_.take(body.hold);
}

void InProcess::lose(std::uint64_t transport) {
  const auto peer = peer_of(transport);
  if (peer == peers_.end() || peer->second.down) return;
  peer->second.down = true;
  Event event;
  event.kind = EventKind::kDown;
  event.peer = peer->first;
  event.status = {StatusCode::kAborted, "peer " + std::to_string(peer->first) + " is down: it has ended"};
  push(std::move(event));
}

Status InProcess::close(PeerId peer) {
  const std::lock_guard lock(hub_->mutex);
  const auto found = peers_.find(peer);
  if (found == peers_.end()) return no_such_peer(peer);
  peers_.erase(found);
  std::erase_if(events_,
                [peer](const Event& event) { return event.peer == peer && event.kind == EventKind::kDown; });
  return {};
}

InProcess::~InProcess() {
  const std::lock_guard lock(hub_->mutex);
  hub_->transports.erase(id_);
  for (const auto& [id, other] : hub_->transports) {
    std::erase_if(other->inbox_, [this](const Message& message) { return message.from == this; });
  }
  for (const Message& message : inbox_) settle(message, peer_is_down(message.peer));
  for (const auto& [id, other] : hub_->transports) other->lose(id_);
}

Result<Facts> InProcess::facts(PeerId peer) const {
  const std::lock_guard lock(hub_->mutex);
  if (peers_.find(peer) == peers_.end()) return no_such_peer(peer);
  return Facts{carrier(), carrier(), ""};
}

}  // namespace

Network::Network() : hub_(std::make_shared<Hub>()) {}

Result<std::unique_ptr<Transport>> Network::open(const Limits& limits) {
  if (Status status = check_limits(limits); !status.ok()) return status;
  AddressParts parts;
  parts.transport = random_id();
  parts.detail = hub_->id;
  Result<Address> address = make_address(parts);
  if (!address.ok()) return address.status();
  Result<UniqueFd> event = make_eventfd();
  if (!event.ok()) return event.status();
  auto transport = std::make_unique<InProcess>(hub_, parts.transport, std::move(address).value(), limits,
                                               std::move(event).value());
  const std::lock_guard lock(hub_->mutex);
  hub_->transports[parts.transport] = transport.get();
  return std::unique_ptr<Transport>(std::move(transport));
}

}  // namespace epd::transport
