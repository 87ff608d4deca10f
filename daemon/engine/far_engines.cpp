#include "far_engines.h"

#include "base/log.h"
#include "far/seal.h"
#include "page.h"

#include <algorithm>
#include <cstring>
#include <random>
#include <utility>

namespace epd::engine {

using abi::FarHeader;
using abi::FarType;
using far::Drop;
using far::EngineId;

namespace {

constexpr std::uint64_t kFirstPauseNs = 20'000'000;
constexpr std::uint64_t kLongestPauseNs = 1'000'000'000;
constexpr std::uint64_t kRoundTripNs = 1'000'000'000;
constexpr std::uint64_t kTellCorruptNs = 100'000'000;   // a break lasts about as long
constexpr std::uint64_t kNameDropsNs = 10'000'000'000;  // between two lines in the log about one engine
constexpr EngineId kNobody = 0;                         // no engine has this number
// A gateway receives this announcement of the ranks and experts of its node.
constexpr std::uint64_t kAnnouncementBytes =
    sizeof(abi::FarAnnouncement) + sizeof(std::uint32_t) * (std::uint64_t{abi::kMaxRanks} + abi::kMaxExperts);

std::uint64_t random_number() {
  std::random_device device;
  return std::uint64_t{device()} << 32 | device();
}

}  // namespace

std::uint64_t far_body_bytes(const transport::NetworkOptions& network) {
  const std::uint64_t most = std::max({network.batch_bytes, network.window_bytes / 2, kAnnouncementBytes});
  return std::min<std::uint64_t>(most, abi::kMaxFarBodyBytes);
}

FarEngines::FarEngines(const Status& why_not, abi::FarTable& table, SupervisorLink& link,
                       const RoundClock& clock)
    : usable_(why_not), link_(link), clock_(clock), page_(table) {
  EPD_CHECK(!why_not.ok());
  page_.show_problem(why_not);
}

FarEngines::FarEngines(std::unique_ptr<FarProxy> proxy, const transport::NetworkOptions& network,
                       abi::FarTable& table, SupervisorLink& link, const RoundClock& clock)
    : network_(network),
      max_body_bytes_(far_body_bytes(network)),
      timeout_ns_(std::uint64_t{network.peer_timeout_ms} * 1'000'000),
      incarnation_(random_number()),
      link_(link),
      clock_(clock),
      page_(table),
      proxy_(std::move(proxy)),
      address_(proxy_->address()) {
  page_.show_network(proxy_->carrier(), network_);
}

void FarEngines::set_spin_ns(std::uint64_t spin_ns) {
  if (proxy_ != nullptr) proxy_->set_spin_ns(spin_ns);
}

std::string FarEngines::name(EngineId engine) const {
  const std::string device = "host:" + std::to_string(engine & 0xffffffff);
  const auto found = peers_.find(engine);
  const bool named = found != peers_.end() && !found->second.node_name.empty();
  return device + " on " + (named ? found->second.node_name : "node " + std::to_string(engine >> 32));
}

Status FarEngines::note(const abi::FarEngine& message) {
  if (message.node == 0 || message.address_bytes > abi::kMaxFarAddressBytes)
    return invalid_argument("kFarEngine of node " + std::to_string(message.node) + " with an address of " +
                            std::to_string(message.address_bytes) + " bytes");
  if (proxy_ == nullptr) return {};
  const EngineId engine = far_engine_id(message.node, message.device_index);
  const auto* const bytes = reinterpret_cast<const std::byte*>(message.address);
  transport::Address address(bytes, bytes + message.address_bytes);
  Peer& peer = peers_[engine];
  peer.node_name.assign(message.node_name, abi::text_length(message.node_name));
  if (peer.address == address) return {};
  disconnect(engine, peer);
  peer.address = std::move(address);
  peer.why = peer.address.empty() ? "it is down" : "";
  peer.retry_ns = peer.pause_ns = 0;
  show(engine, peer);
  if (peer.address.empty() && peer.users.empty()) peers_.erase(engine);
  return {};
}

// ---- of groups

std::unique_ptr<FarSide> FarEngines::make_side(const abi::GroupBegin& message) {
  return std::make_unique<FarSide>(message, network_, incarnation_, proxy_.get(), &page_);
}

// The successor of an engine to which nobody can connect has another address. Until a group needs it, nobody
// is disturbed.
Status FarEngines::serve(FarSide& side) {
  if (proxy_ != nullptr && proxy_->deaf()) link_.end(abi::kExitForNetwork);
  sides_[side.group_id()] = &side;
  const std::vector<EngineId> engines = side.engines();
  for (const EngineId engine : engines) need(engine, side);
  for (auto entry = peers_.begin(); entry != peers_.end();) {
    auto& [engine, peer] = *entry++;
    if (!std::binary_search(engines.begin(), engines.end(), engine)) stop_using(engine, peer, side);
  }
  show_all();
  std::uint64_t bytes = 0;
  for (const auto& [id, each] : sides_) bytes += each->memory_bytes();
  if (bytes <= network_.max_bytes) return {};
  return resource_exhausted("network.max_bytes is " + std::to_string(network_.max_bytes) +
                            "; allowed: at least " + std::to_string(bytes) +
                            " for windows and send buffers of this engine's groups, this one included");
}

// Connects at once, whatever pause was due.
void FarEngines::need(EngineId engine, const FarSide& side) {
  Peer& peer = peers_[engine];
  peer.users.insert(&side);
  peer.retry_ns = peer.pause_ns = 0;
  peer.silent_ns = clock_.round_ns();
  peer.told_ns = 0;
  peer.silent = false;
}

// May destroy `peer`.
void FarEngines::stop_using(EngineId engine, Peer& peer, const FarSide& side) {
  if (peer.users.erase(&side) == 0 || !peer.users.empty()) return;
  disconnect(engine, peer);
  show(engine, peer);
  if (peer.address.empty()) peers_.erase(engine);
}

void FarEngines::forget(const FarSide& side) {
  if (sides_.erase(side.group_id()) == 0) return;
  for (auto entry = peers_.begin(); entry != peers_.end();) {
    auto& [engine, peer] = *entry++;
    stop_using(engine, peer, side);
  }
  show_all();
}

void FarEngines::disconnect(EngineId engine, Peer& peer) {
  if (peer.connected) proxy_->close(engine);
  peer.connected = peer.heard = peer.silent = false;
}

void FarEngines::lose(EngineId engine, const std::string& reason, abi::PeerLoss loss) {
  const std::string text = name(engine) + " " + reason;
  abi::PeerLost message{
      static_cast<std::uint32_t>(engine >> 32), static_cast<std::uint32_t>(engine), loss, {}};
  abi::set_text(message.text, text.data(), text.size());
  log_event(LogLevel::kWarning, "far engine lost", {{"reason", text}});
  link_.send(abi::LinkType::kPeerLost, message);
}

// ---- what comes

bool FarEngines::receive() {
  full_ = false;
  if (proxy_ == nullptr || !proxy_->has_news()) return false;
  const std::uint64_t end = clock_.now_ns() + kShareNs;
  FarProxy::Event event;
  while (proxy_->next(event)) {
    take(event);
    if (clock_.now_ns() < end) continue;
    full_ = true;
    break;
  }
  return true;
}

void FarEngines::take(FarProxy::Event& event) {
  if (event.kind == FarProxy::Event::Kind::kDropped) {
    if (event.strangers != 0) page_.dropped(kNobody, Drop::kStranger, event.strangers);
    if (event.malformed != 0) page_.dropped(kNobody, Drop::kFormat, event.malformed);
    return;
  }
  const auto peer = peers_.find(event.engine);
  if (event.kind == FarProxy::Event::Kind::kDown) {
    if (peer != peers_.end()) came_down(event.engine, peer->second, event.status);
    return;
  }
  if (peer != peers_.end()) {
    peer->second.silent_ns = clock_.round_ns();
    peer->second.told_ns = peer->second.pause_ns = 0;
    if (!peer->second.heard || std::exchange(peer->second.silent, false)) {
      peer->second.heard = true;
      show(event.engine, peer->second);
    }
  }
  if (event.kind == FarProxy::Event::Kind::kConnected) return page_.show_facts(event.engine, *event.facts);
  receive_message(event);
}

void FarEngines::receive_message(const FarProxy::Event& event) {
  FarHeader header{};
  const std::span<const std::byte> bytes = event.header.bytes();
  if (bytes.size() == sizeof(header)) {
    std::memcpy(&header, bytes.data(), sizeof(header));
    if (!far::header_is_whole(header)) {
      receive_corrupt(event.engine);
      return proxy_->release(event.body);
    }
  }
  if (const auto side = sides_.find(header.group); side != sides_.end())
    return side->second->received(event.engine, bytes, event.body);
  if (abi::read_far_header(bytes, event.body.bytes, header) != abi::FarReason::kNone) {
    page_.dropped(event.engine, Drop::kHeader);
  } else if (header.type == FarType::kPing) {
    send_ping(event.engine, FarType::kPong, header.time_ns);
  } else if (header.type == FarType::kPong) {
    receive_pong(event.engine, header.time_ns);
  } else {
    page_.dropped(event.engine, Drop::kGroup);
  }
  proxy_->release(event.body);
}

// It may have been of any group, whose message will never come.
void FarEngines::receive_corrupt(EngineId engine) {
  page_.dropped(engine, Drop::kChecksum);
  const auto peer = peers_.find(engine);
  const std::uint64_t now_ns = clock_.round_ns();
  if (peer == peers_.end() || !peer->second.needed()) return;
  if (peer->second.corrupt_ns != 0 && now_ns < peer->second.corrupt_ns + kTellCorruptNs) return;
  peer->second.corrupt_ns = now_ns;
  lose(engine, "sent a message with a wrong checksum of its header", abi::PeerLoss::kCorrupt);
}

// Only the answer to the last ping counts. An older one proves nothing.
void FarEngines::receive_pong(EngineId engine, std::uint64_t time_ns) {
  const auto peer = peers_.find(engine);
  if (peer == peers_.end() || time_ns == 0 || time_ns != peer->second.pinged_ns) return;
  const std::uint64_t now_ns = clock_.now_ns();
  page_.show_round_trip(engine, std::max<std::uint64_t>(1, now_ns - time_ns), now_ns);
}

void FarEngines::came_down(EngineId engine, Peer& peer, const Status& status) {
  const std::uint64_t now_ns = clock_.round_ns();
  peer.connected = peer.heard = peer.silent = false;
  peer.why = status.message();
  show(engine, peer);
  peer.retry_ns = now_ns + peer.pause_ns;
  peer.pause_ns = std::clamp(2 * peer.pause_ns, kFirstPauseNs, kLongestPauseNs);
  if (!peer.needed() || (peer.told_ns != 0 && now_ns < peer.told_ns + timeout_ns_)) return;
  peer.told_ns = now_ns;
  lose(engine, "can't be reached: " + peer.why);
}

// ---- what goes

bool FarEngines::Peer::needed() const {
  return std::any_of(users.begin(), users.end(), [](const FarSide* side) { return side->in_epoch(); });
}

void FarEngines::send_ping(EngineId engine, FarType type, std::uint64_t time_ns) {
  auto message = std::make_unique<far::Message>();
  message->header.magic = abi::kFarMagic;
  message->header.version = abi::kFarVersion;
  message->header.type = type;
  message->header.from_rank = message->header.to_rank = abi::kFarNoRank;
  message->header.time_ns = time_ns;
  far::seal(message->header, {}, network_.check);
  message->engine = engine;
  (void)proxy_->send(message);  // if there is no space, enough other messages are under way
}

bool FarEngines::step() {
  if (proxy_ == nullptr) return false;
  const std::uint64_t now_ns = clock_.round_ns();
  // If this loop was stopped, it heard nothing through its own fault.
  if (now_ns > last_step_ns_ + timeout_ns_ / 2) {
    for (auto& [engine, peer] : peers_) peer.silent_ns = now_ns;
  }
  last_step_ns_ = now_ns;
  if (!page_.untold_drops().empty()) name_drops(now_ns);
  bool sent = false;
  for (auto& [engine, peer] : peers_) sent |= look_after(engine, peer);
  for (const auto& [id, side] : sides_) {
    sent |= side->step(now_ns);
    for (const far::FarGroup::Fault& fault : side->take_faults())
      lose(fault.engine, fault.what, abi::PeerLoss::kCorrupt);
  }
  return sent;
}

bool FarEngines::look_after(EngineId engine, Peer& peer) {
  const std::uint64_t now_ns = clock_.round_ns();
  bool did = false;
  if (!peer.connected && !peer.users.empty() && !peer.address.empty() && now_ns >= peer.retry_ns) {
    proxy_->connect(engine, peer.address);
    peer.connected = did = true;
    show(engine, peer);
  }
  if (!peer.needed()) {
    peer.silent_ns = now_ns;
    return did;
  }
  if (peer.connected && now_ns >= next_ping_ns(peer)) {
    peer.pinged_ns = clock_.now_ns();
    send_ping(engine, FarType::kPing, peer.pinged_ns);
    did = true;
  }
  if (now_ns < peer.silent_ns + timeout_ns_) return did;
  peer.silent_ns = peer.told_ns = now_ns;
  peer.silent = peer.connected;
  show(engine, peer);
  lose(engine, silent_text() + (peer.connected || peer.why.empty() ? "" : ": " + peer.why));
  return true;
}

std::string FarEngines::silent_text() const {
  return "has said nothing for " + std::to_string(network_.peer_timeout_ms) + " ms";
}

// A ping is understood only after the first message of a connection.
std::uint64_t FarEngines::next_ping_ns(const Peer& peer) const {
  const std::uint64_t for_silence = std::max(peer.silent_ns, peer.pinged_ns) + timeout_ns_ / 3;
  return peer.heard ? std::min(for_silence, peer.pinged_ns + kRoundTripNs) : for_silence;
}

// ---- for people

// Logs the messages that were dropped, in a line for each engine and pause.
void FarEngines::name_drops(std::uint64_t now_ns) {
  std::erase_if(named_ns_, [&](const auto& named) { return now_ns >= named.second + kNameDropsNs; });
  std::erase_if(page_.untold_drops(), [&](const auto& entry) {
    const auto& [engine, counts] = entry;
    if (!named_ns_.try_emplace(engine, now_ns).second) return false;
    log_event(counts.any_fault() ? LogLevel::kWarning : LogLevel::kInfo, "messages dropped",
              {{"from", engine == kNobody ? "nobody that this engine is connected to" : name(engine)},
               {"dropped", counts.text()}});
    return true;
  });
}

void FarEngines::show(EngineId engine, const Peer& peer) {
  FarPage::State shown;
  shown.node_name = peer.node_name;
  shown.groups = static_cast<std::uint32_t>(peer.users.size());
  for (const FarSide* side : peer.users) shown.window_bytes += side->memory_bytes(engine);
  if (peer.users.empty()) {
    shown.state = abi::FarState::kIdle;
  } else if (!peer.connected || peer.silent) {
    shown.state = abi::FarState::kDown;
    shown.reason = peer.silent ? silent_text() : peer.why;
  } else if (!peer.heard) {
    shown.state = abi::FarState::kConnecting;
    shown.reason = peer.why;
  } else {
    shown.state = abi::FarState::kConnected;
  }
  page_.show(engine, shown);
}

void FarEngines::show_all() {
  std::uint64_t bytes = 0;
  for (const auto& [id, side] : sides_) bytes += side->memory_bytes();
  page_.show_promised(bytes);
  for (const auto& [engine, peer] : peers_) show(engine, peer);
}

bool FarEngines::pending() const {
  if (proxy_ == nullptr) return false;
  return full_ || proxy_->has_news() || next_look_ns() <= clock_.now_ns();
}

std::uint64_t FarEngines::next_look_ns() const {
  std::uint64_t next = kNever;
  for (const auto& [id, side] : sides_) next = std::min(next, side->next_look_ns());
  for (const auto& [engine, counts] : page_.untold_drops()) {
    const auto named = named_ns_.find(engine);
    next = std::min(next, named == named_ns_.end() ? 0 : named->second + kNameDropsNs);
  }
  for (const auto& [engine, peer] : peers_) {
    if (peer.users.empty()) continue;
    if (!peer.connected && !peer.address.empty()) next = std::min(next, peer.retry_ns);
    if (!peer.needed()) continue;
    if (peer.connected) next = std::min(next, next_ping_ns(peer));
    // A later call of step() would look as if the loop had been stopped.
    next = std::min(next, last_step_ns_ + timeout_ns_ / 3);
  }
  return next;
}

}  // namespace epd::engine
