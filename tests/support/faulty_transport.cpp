#include "faulty_transport.h"

#include "shared.h"

#include <algorithm>
#include <array>
#include <deque>
#include <map>
#include <random>
#include <vector>

namespace epd::transport {
namespace {

constexpr std::size_t kPulled = 32;  // events at a time

class Faulty final : public Transport {
 public:
  Faulty(std::unique_ptr<Transport> inner, std::uint64_t seed, const FaultRates& rates)
      : inner_(std::move(inner)), rates_(rates), random_(seed) {
    EPD_CHECK(rates_.max_turns > 0);
  }
  ~Faulty() override;

  const Address& address() const override { return inner_->address(); }
  const Limits& limits() const override { return inner_->limits(); }
  std::string carrier() const override { return inner_->carrier(); }
  Result<PeerId> connect(std::span<const std::byte> address) override;
  Status close(PeerId id) override;
  Status send(PeerId id, std::span<const std::byte> header, std::span<const std::byte> body,
              std::uint64_t cookie) override;
  Status flush(PeerId id, std::uint64_t cookie) override;
  void release(const Body& body) override { inner_->release(body); }
  std::size_t progress(std::span<Event> events) override;
  int wait_fd() const override { return inner_->wait_fd(); }
  bool arm() override;
  Counters counters() const override { return inner_->counters(); }
  bool deaf() const override { return inner_->deaf(); }
  Result<Facts> facts(PeerId id) const override { return inner_->facts(id); }

 private:
  // Accepted, and not yet the inner transport's.
  struct Outgoing {
    bool flush = false;
    Header header;
    std::span<const std::byte> body;
    std::uint64_t cookie = 0;
    std::uint64_t due = 0;  // turn
  };
  struct Incoming {
    Event event;
    std::uint64_t due = 0;
  };
  struct Peer {
    std::uint32_t sends = 0;  // accepted, and not yet told of; flushes too
    bool flushing = false;
    bool down = false;            // nothing but the events that are held comes any more
    bool dropped = false;         // by us: the inner transport has forgotten it
    std::uint64_t out_again = 0;  // turns at which a cut mends
    std::uint64_t in_again = 0;
    std::deque<Outgoing> outgoing;
    std::vector<Incoming> incoming;     // kReceived, and kDown at the end
    std::vector<Incoming> completions;  // kSent, kFlushed
  };

  bool happens(unsigned rate, unsigned of) { return rate != 0 && random_() % of < rate; }
  std::uint64_t some_turns() { return 1 + random_() % rates_.max_turns; }
  std::uint64_t due(unsigned percent) { return happens(percent, 100) ? turn_ + some_turns() : turn_; }
  void maybe_cut(Peer& peer);
  // The peer goes down here; the other side sees what it sees of a close().
  void drop(PeerId id, Peer& peer);
  Result<Peer*> sender_to(PeerId id);

  void take(Event event);
  void complete(PeerId id, const Outgoing& message, Status status);
  void abort_outgoing(PeerId id, Peer& peer, const Status& status);
  void tell_completions(Peer& peer, bool all);
  void send_due(PeerId id, Peer& peer);
  // True: it has been handed on or has ended.
  bool hand_on(PeerId id, const Outgoing& message);
  void tell_due(Peer& peer);
  void move_due();
  bool waits_for_turns(const Peer& peer) const;

  const std::unique_ptr<Transport> inner_;
  const FaultRates rates_;
  std::mt19937_64 random_;
  std::uint64_t turn_ = 1;
  std::map<PeerId, Peer> peers_;
  std::deque<Event> ready_;
};

Faulty::~Faulty() {
  for (auto& [id, peer] : peers_) {
    for (const Incoming& held : peer.incoming) inner_->release(held.event.body);
  }
  for (const Event& event : ready_) inner_->release(event.body);
}

// ---- calls -------------------------------------------------------------------------------------

Result<PeerId> Faulty::connect(std::span<const std::byte> address) {
  Result<PeerId> id = inner_->connect(address);
  if (id.ok()) peers_[*id];
  return id;
}

Status Faulty::close(PeerId id) {
  const auto found = peers_.find(id);
  if (found == peers_.end()) return no_such_peer(id);
  Peer& peer = found->second;
  if (!peer.dropped) {
    Status status = inner_->close(id);
    EPD_CHECK(status.ok());
  }
  abort_outgoing(id, peer, peer_closed(id));
  tell_completions(peer, true);
  for (const Incoming& held : peer.incoming) inner_->release(held.event.body);
  peers_.erase(found);
  std::erase_if(ready_, [this, id](const Event& event) {
    if (event.peer != id || event.kind == EventKind::kSent || event.kind == EventKind::kFlushed) return false;
    inner_->release(event.body);
    return true;
  });
  return {};
}

Result<Faulty::Peer*> Faulty::sender_to(PeerId id) {
  const auto found = peers_.find(id);
  if (found == peers_.end()) return no_such_peer(id);
  Peer& peer = found->second;
  if (peer.down) return peer_is_down(id);
  if (peer.flushing) return flush_under_way(id);
  if (peer.sends >= limits().max_sends) return too_many_sends(id, limits());
  return &peer;
}

Status Faulty::send(PeerId id, std::span<const std::byte> header, std::span<const std::byte> body,
                    std::uint64_t cookie) {
  if (Status status = check_message(limits(), header.size(), body.size()); !status.ok()) return status;
  Result<Peer*> peer = sender_to(id);
  if (!peer.ok()) return peer.status();
  if (happens(rates_.refuse_percent, 100)) {
    return would_block("peer " + std::to_string(id) + ": refused by a fault");
  }
  maybe_cut(**peer);
  ++(*peer)->sends;
  (*peer)->outgoing.push_back({false, Header(header), body, cookie, due(rates_.delay_percent)});
  send_due(id, **peer);
  if (happens(rates_.down_per_mille, 1000)) drop(id, **peer);
  return {};
}

Status Faulty::flush(PeerId id, std::uint64_t cookie) {
  Result<Peer*> peer = sender_to(id);
  if (!peer.ok()) return peer.status();
  ++(*peer)->sends;
  (*peer)->flushing = true;
  (*peer)->outgoing.push_back({true, Header(), {}, cookie, turn_});
  send_due(id, **peer);
  return {};
}

void Faulty::drop(PeerId id, Peer& peer) {
  if (peer.down) return;
  Status status = inner_->close(id);
  EPD_CHECK(status.ok());
  peer.down = peer.dropped = true;
  abort_outgoing(id, peer, peer_is_down(id));
  Event event;
  event.kind = EventKind::kDown;
  event.peer = id;
  event.status = {StatusCode::kAborted, "peer " + std::to_string(id) + " is down: a fault"};
  peer.incoming.push_back({std::move(event), turn_});
}

void Faulty::maybe_cut(Peer& peer) {
  if (!happens(rates_.cut_per_mille, 1000)) return;
  const std::uint64_t direction = random_() % 3;
  if (direction != 1) peer.out_again = turn_ + some_turns();
  if (direction != 2) peer.in_again = turn_ + some_turns();
}

// ---- what the inner transport says -------------------------------------------------------------

void Faulty::take(Event event) {
  const bool completion = event.kind == EventKind::kSent || event.kind == EventKind::kFlushed;
  const auto found = peers_.find(event.peer);
  if (found == peers_.end()) {  // closed meanwhile; the inner transport says no more than this
    ready_.push_back(std::move(event));
    return;
  }
  Peer& peer = found->second;
  if (completion) {
    const std::uint64_t when = due(rates_.late_percent);
    peer.completions.push_back({std::move(event), when});
    return;
  }
  if (event.kind == EventKind::kDown) {
    peer.down = true;
    abort_outgoing(event.peer, peer, peer_is_down(event.peer));
    peer.incoming.push_back({std::move(event), turn_});
    return;
  }
  maybe_cut(peer);
  const std::uint64_t when = due(rates_.delay_percent);
  peer.incoming.push_back({std::move(event), when});
}

void Faulty::complete(PeerId id, const Outgoing& message, Status status) {
  Event event;
  event.kind = message.flush ? EventKind::kFlushed : EventKind::kSent;
  event.peer = id;
  event.cookie = message.cookie;
  event.status = std::move(status);
  take(std::move(event));
}

void Faulty::abort_outgoing(PeerId id, Peer& peer, const Status& status) {
  for (const Outgoing& message : peer.outgoing) complete(id, message, status);
  peer.outgoing.clear();
}

// ---- what is due -------------------------------------------------------------------------------

bool Faulty::hand_on(PeerId id, const Outgoing& message) {
  Status status = message.flush ? inner_->flush(id, message.cookie)
                                : inner_->send(id, message.header.bytes(), message.body, message.cookie);
  if (status.ok()) return true;
  if (status.code() == StatusCode::kWouldBlock) return false;
  complete(id, message, std::move(status));
  return true;
}

void Faulty::send_due(PeerId id, Peer& peer) {
  if (peer.out_again > turn_) return;
  std::deque<Outgoing> kept;
  for (const Outgoing& message : peer.outgoing) {
    // A flush waits for all before it.
    const bool now = message.flush ? kept.empty() : message.due <= turn_;
    if (!now || !hand_on(id, message)) kept.push_back(message);
  }
  peer.outgoing = std::move(kept);
}

void Faulty::tell_completions(Peer& peer, bool all) {
  // A cut holds them, too: who is cut off does not learn what has become of a message.
  if (!all && peer.out_again > turn_ && !peer.down) return;
  std::erase_if(peer.completions, [&](Incoming& held) {
    if (!all && held.due > turn_) return false;
    --peer.sends;
    if (held.event.kind == EventKind::kFlushed) peer.flushing = false;
    ready_.push_back(std::move(held.event));
    return true;
  });
}

void Faulty::tell_due(Peer& peer) {
  if (peer.in_again > turn_ && !peer.dropped) return;
  // kDown is the last of all: what is held comes before it, and what the inner transport owes us.
  bool ends = false;
  std::erase_if(peer.incoming, [&](Incoming& held) {
    if (held.event.kind == EventKind::kDown) {
      ends = true;
      return false;
    }
    if (held.due > turn_ && !peer.down) return false;
    ready_.push_back(std::move(held.event));
    return true;
  });
  if (!ends) return;
  tell_completions(peer, true);
  if (peer.sends != 0) return;
  ready_.push_back(std::move(peer.incoming.back().event));
  peer.incoming.clear();
}

void Faulty::move_due() {
  for (auto& [id, peer] : peers_) {
    if (!peer.down) send_due(id, peer);
    tell_completions(peer, false);
    tell_due(peer);
  }
}

std::size_t Faulty::progress(std::span<Event> events) {
  ++turn_;
  std::array<Event, kPulled> pulled;
  if (ready_.size() < events.size()) {
    const std::size_t count = inner_->progress(pulled);
    for (std::size_t i = 0; i < count; ++i) take(std::move(pulled[i]));
  }
  move_due();
  std::size_t count = 0;
  while (count < events.size() && !ready_.empty()) {
    events[count++] = std::move(ready_.front());
    ready_.pop_front();
  }
  return count;
}

bool Faulty::waits_for_turns(const Peer& peer) const {
  return !peer.outgoing.empty() || !peer.completions.empty() || !peer.incoming.empty();
}

bool Faulty::arm() {
  if (!ready_.empty()) return false;
  for (const auto& [id, peer] : peers_) {
    if (waits_for_turns(peer)) return false;
  }
  return inner_->arm();
}

}  // namespace

std::unique_ptr<Transport> make_faulty(std::unique_ptr<Transport> inner, std::uint64_t seed,
                                       const FaultRates& rates) {
  return std::make_unique<Faulty>(std::move(inner), seed, rates);
}

}  // namespace epd::transport
