#include "ucx_transport.h"

#include "shared.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

namespace epd::transport {
namespace {

constexpr unsigned kMessageId = 1;            // UCX's number for the one kind of message there is
constexpr unsigned kLastMessageId = 0xffff;   // what UCX's header has room for
constexpr std::uint32_t kMagic = 0x4d445045;  // "EPDM"
constexpr std::uint16_t kFormat = 2;

// How long one side lets the other close first (see leave()). Engines break their groups within some
// milliseconds of each other, but while a cable is out the other side hears nothing. This is longer.
constexpr std::chrono::milliseconds kAfterYou{6'000};
constexpr std::chrono::milliseconds kAtOnce{0};

std::uint64_t packed(std::uint64_t major, std::uint64_t minor, std::uint64_t release) {
  return (major << 32) | (minor << 16) | release;
}

std::string version_text(std::uint64_t version) {
  return "UCX " + std::to_string(version >> 32) + "." + std::to_string((version >> 16) & 0xffff) + "." +
         std::to_string(version & 0xffff);
}

}  // namespace

Result<std::unique_ptr<Transport>> open_ucx(const UcxOptions& options) {
  if (Status status = check_limits(options.limits); !status.ok()) return status;
  Result<UcxWorker> worker = UcxWorker::open(options);
  if (!worker.ok()) return worker.status();
  Result<Address> own = worker->address();
  if (!own.ok()) return own.status();
  const UcxLibrary& ucx = worker->ucx();
  AddressParts parts;
  parts.kind = AddressKind::kUcx;
  parts.transport = random_id();
  parts.detail = packed(ucx.major, ucx.minor, ucx.release);
  parts.payload = *own;
  Result<Address> address = make_address(parts);
  if (!address.ok()) return address.status();
  auto transport = std::make_unique<UcxTransport>(std::move(worker).value(), parts.transport,
                                                  std::move(address).value(), options);
  if (Status status = transport->listen(); !status.ok()) return status;
  return std::unique_ptr<Transport>(std::move(transport));
}

UcxTransport::UcxTransport(UcxWorker worker, std::uint64_t id, Address address, const UcxOptions& options)
    : worker_(std::move(worker)),
      ucx_(worker_->ucx()),
      id_(id),
      address_(std::move(address)),
      limits_(options.limits),
      rendezvous_bytes_(options.rendezvous_bytes) {}

Status UcxTransport::listen() {
  // UCX 1.13 calls a null pointer for a message whose number has no handler. The last number comes first, so
  // that UCX makes its table once.
  for (unsigned number = kLastMessageId + 1; number-- > 0;) {
    if (Status status = handle(number, number == kMessageId ? &on_message : &on_other_message); !status.ok())
      return status;
  }
  return {};
}

Status UcxTransport::handle(unsigned number, ucp_am_recv_callback_t call) {
  ucp_am_handler_param_t param;
  std::memset(&param, 0, sizeof(param));
  param.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_FLAGS |
                     UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG;
  param.id = number;
  param.flags = UCP_AM_FLAG_WHOLE_MSG | UCP_AM_FLAG_PERSISTENT_DATA;
  param.cb = call;
  param.arg = this;
  const ucs_status_t status = ucx_.ucp_worker_set_am_recv_handler(worker_->get(), &param);
  if (status == UCS_OK) return {};
  return {StatusCode::kUnsupported, ucx_.describe("ucp_worker_set_am_recv_handler", status)};
}

// ---- peers -------------------------------------------------------------------------------------

Result<PeerId> UcxTransport::connect(std::span<const std::byte> address) {
  Result<AddressParts> parts = read_address(address, AddressKind::kUcx);
  if (!parts.ok()) return parts.status();
  if (parts->transport == id_) return own_address();
  if (const auto known = by_transport_.find(parts->transport); known != by_transport_.end()) {
    return already_connected(known->second->id);
  }
  Partner& partner = partners_[parts->transport];
  partner.address.assign(parts->payload.begin(), parts->payload.end());
  partner.version = parts->detail;
  Peer& peer = make_peer(parts->transport);
  by_transport_[peer.transport] = &peer;
  return peer.id;
}

UcxTransport::Peer& UcxTransport::make_peer(std::uint64_t transport) {
  Partner& partner = partners_[transport];
  auto peer = std::make_unique<Peer>();
  peer->owner = this;
  peer->transport = transport;
  peer->version = partner.version;
  ucp_ep_params_t params;
  std::memset(&params, 0, sizeof(params));
  params.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                      UCP_EP_PARAM_FIELD_ERR_HANDLER;
  params.address = reinterpret_cast<const ucp_address_t*>(partner.address.data());
  params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  params.err_handler.cb = &UcxTransport::on_failure;
  params.err_handler.arg = peer.get();
  peer->id = ++last_peer_;
  const ucs_status_t status = ucx_.ucp_ep_create(worker_->get(), &params, &peer->endpoint);
  if (status != UCS_OK) {  // nobody listens there, or by nothing that we have: kDown tells
    peer->endpoint = nullptr;
    on_failure(peer.get(), nullptr, status);
  } else {
    ++partner.endpoints;
  }
  return *peers_.emplace(peer->id, std::move(peer)).first->second;
}

// If the partner of an endpoint is gone, UCX closes its socket when both sides have closed theirs.
void UcxTransport::pair_up() {
  if (!std::exchange(some_behind_, false)) return;
  for (auto& [transport, partner] : partners_) {
    while (partner.behind() && partner.shadows < Partner::kMostBehind) {
      ++partner.shadows;
      Peer& peer = make_peer(transport);
      peer.forgotten = peer.shadow = true;
      if (peer.state != State::kOpen) break;  // it failed at once
      leave(peer);
    }
  }
}

// Called from any call of UCX's, so it only marks the peer.
void UcxTransport::on_failure(void* arg, ucp_ep_h /*endpoint*/, ucs_status_t status) {
  Peer& peer = *static_cast<Peer*>(arg);
  if (peer.state != State::kOpen && peer.state != State::kLeaving) return;
  if (peer.state == State::kOpen) peer.owner->ending_.push_back(&peer);
  peer.state = State::kFailed;
  peer.reason = {StatusCode::kAborted, "peer " + std::to_string(peer.id) +
                                           " is down: its connection ended (UCX: " +
                                           peer.owner->ucx_.ucs_status_string(status) + ")"};
}

Status UcxTransport::close(PeerId id) {
  const auto found = peers_.find(id);
  if (found == peers_.end() || found->second->forgotten) return no_such_peer(id);
  Peer& peer = *found->second;
  by_transport_.erase(peer.transport);
  peer.forgotten = true;
  if (peer.state == State::kDown) {
    peers_.erase(found);
    return {};
  }
  if (peer.state == State::kOpen) leave(peer);
  return {};
}

// UCX keeps the socket of a closed endpoint for the other side's partner, until that is closed. If both sides
// close theirs before either has heard of it, both keep the socket for ever. So one side lets the other close
// first.
void UcxTransport::leave(Peer& peer) {
  ending_.push_back(&peer);
  peer.state = State::kLeaving;
  peer.leaves_at = std::chrono::steady_clock::now() + (id_ > peer.transport ? kAfterYou : kAtOnce);
  advance_leaving(peer);
}

// A working endpoint is closed when it has nothing left to write. UCX would keep half of it, for receiving;
// if it still had bytes to write and the other side broke, UCX would use it after freeing it
// (uct_tcp_iface_handle_events; 1.13 and later). Sends by rendezvous are not waited for: a peer that has
// closed its side never fetches them.
void UcxTransport::advance_leaving(Peer& peer) {
  if (peer.flushing || peer.sends != peer.rendezvous) return;
  if (std::chrono::steady_clock::now() < peer.leaves_at) return;
  peer.flushing = true;
  Pending* pending = take_pending(peer, 0, EventKind::kFlushed);
  pending->own = true;
  if (post_flush(pending).ok() && peer.flushing) return;  // again when it is through
  begin_close(peer);
}

void UcxTransport::begin_close(Peer& peer) {
  peer.state = State::kClosing;
  if (peer.endpoint == nullptr) return;  // it never came to be
  ucp_request_param_t param;
  std::memset(&param, 0, sizeof(param));
  param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
  param.flags = UCP_EP_CLOSE_FLAG_FORCE;
  const ucs_status_ptr_t result = ucx_.ucp_ep_close_nbx(peer.endpoint, &param);
  // An error: the endpoint is closed all the same.
  peer.closing = UCS_PTR_IS_PTR(result) ? result : nullptr;
  peer.endpoint = nullptr;
}

bool UcxTransport::closed(Peer& peer) const {
  if (peer.closing != nullptr) {
    if (ucx_.ucp_request_check_status(peer.closing) == UCS_INPROGRESS) return false;
    ucx_.ucp_request_free(peer.closing);
    peer.closing = nullptr;
  }
  return peer.sends == 0 && peer.fetches == 0;
}

void UcxTransport::advance_closing() {
  for (std::size_t i = 0; i < ending_.size();) {
    Peer& peer = *ending_[i];
    if (peer.state == State::kFailed) begin_close(peer);
    if (peer.state == State::kLeaving) advance_leaving(peer);
    if (peer.state != State::kClosing || !closed(peer)) {
      ++i;
      continue;
    }
    ending_[i] = ending_.back();
    ending_.pop_back();
    peer.state = State::kDown;
    if (peer.shadow) --partners_[peer.transport].shadows;
    if (peer.forgotten) {
      peers_.erase(peer.id);
      continue;
    }
    Event event;
    event.kind = EventKind::kDown;
    event.peer = peer.id;
    event.status = peer.reason;
    events_.push_back(std::move(event));
  }
}

std::string UcxTransport::carrier() const {
  return version_text(packed(ucx_.major, ucx_.minor, ucx_.release));
}

Result<Facts> UcxTransport::facts(PeerId id) const {
  const auto found = peers_.find(id);
  if (found == peers_.end() || found->second->forgotten) return no_such_peer(id);
  const Peer& peer = *found->second;
  Facts facts{carrier(), version_text(peer.version), ""};
  if (peer.state != State::kOpen) return facts;
  char* text = nullptr;
  std::size_t bytes = 0;
  if (FILE* stream = ::open_memstream(&text, &bytes); stream != nullptr) {
    ucx_.ucp_ep_print_info(peer.endpoint, stream);
    std::fclose(stream);
    facts.lanes.assign(text, bytes);
    std::free(text);
  }
  return facts;
}

// ---- sending -----------------------------------------------------------------------------------

Result<UcxTransport::Peer*> UcxTransport::sender_to(PeerId id) {
  const auto found = peers_.find(id);
  if (found == peers_.end() || found->second->forgotten) return no_such_peer(id);
  Peer& peer = *found->second;
  if (peer.state != State::kOpen) return peer_is_down(id);
  if (peer.flush != nullptr) return flush_under_way(id);
  if (peer.sends >= limits_.max_sends) return too_many_sends(id, limits_);
  return &peer;
}

UcxTransport::Pending* UcxTransport::take_pending(Peer& peer, std::uint64_t cookie, EventKind kind) {
  if (free_pendings_.empty()) {
    pendings_.push_back(std::make_unique<Pending>());
    free_pendings_.push_back(pendings_.back().get());
  }
  Pending* pending = free_pendings_.back();
  free_pendings_.pop_back();
  pending->peer = &peer;
  pending->cookie = cookie;
  pending->kind = kind;
  pending->own = pending->rendezvous = false;
  pending->status = UCS_OK;
  ++peer.sends;
  return pending;
}

Status UcxTransport::send(PeerId id, std::span<const std::byte> header, std::span<const std::byte> body,
                          std::uint64_t cookie) {
  if (Status status = check_message(limits_, header.size(), body.size()); !status.ok()) return status;
  Result<Peer*> peer = sender_to(id);
  if (!peer.ok()) return peer.status();
  Pending* pending = take_pending(**peer, cookie, EventKind::kSent);
  const Prefix prefix{kMagic, kFormat, partners_[(*peer)->transport].endpoints, id_};
  std::memcpy(pending->wire.data(), &prefix, sizeof(prefix));
  if (!header.empty()) std::memcpy(pending->wire.data() + sizeof(prefix), header.data(), header.size());
  ucp_request_param_t param;
  std::memset(&param, 0, sizeof(param));
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS;
  pending->rendezvous = body.size() >= rendezvous_bytes_;
  param.flags = pending->rendezvous ? UCP_AM_SEND_FLAG_RNDV : UCP_AM_SEND_FLAG_EAGER;
  if (pending->rendezvous) ++(*peer)->rendezvous;
  param.cb.send = &UcxTransport::on_settled;
  param.user_data = pending;
  Status status =
      begun(pending, "ucp_am_send_nbx",
            ucx_.ucp_am_send_nbx((*peer)->endpoint, kMessageId, pending->wire.data(),
                                 sizeof(prefix) + header.size(), body.data(), body.size(), &param));
  if (status.ok()) ++counters_.accepted;
  return status;
}

// Nothing is sent until a flush is complete: if a send fails then, and the answer to the flush has come and
// has not been read, UCX aborts the process (uct_tcp_ep_handle_put_ack; 1.13).
Status UcxTransport::flush(PeerId id, std::uint64_t cookie) {
  Result<Peer*> peer = sender_to(id);
  if (!peer.ok()) return peer.status();
  Pending* pending = take_pending(**peer, cookie, EventKind::kFlushed);
  (*peer)->flush = pending;
  if ((*peer)->rendezvous == 0) return post_flush(pending);
  flushes_.push_back(pending);
  return {};
}

Status UcxTransport::post_flush(Pending* pending) {
  ucp_request_param_t param;
  std::memset(&param, 0, sizeof(param));
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
  param.cb.send = &UcxTransport::on_settled;
  param.user_data = pending;
  return begun(pending, "ucp_ep_flush_nbx", ucx_.ucp_ep_flush_nbx(pending->peer->endpoint, &param));
}

void UcxTransport::advance_flushes() {
  std::vector<Pending*> ready;
  std::erase_if(flushes_, [&ready](Pending* pending) {
    if (pending->peer->rendezvous != 0) return false;
    ready.push_back(pending);
    return true;
  });
  for (Pending* pending : ready) {
    Peer& peer = *pending->peer;
    const bool open = peer.state == State::kOpen || peer.state == State::kLeaving;
    if (!open || pending->status != UCS_OK) {
      settle(pending, UCS_ERR_CANCELED);
      continue;
    }
    const std::uint64_t cookie = pending->cookie;
    if (post_flush(pending).ok()) continue;
    settle(take_pending(peer, cookie, EventKind::kFlushed), UCS_ERR_CANCELED);
  }
}

Status UcxTransport::begun(Pending* pending, const char* call, ucs_status_ptr_t result) {
  if (UCS_PTR_IS_ERR(result)) {
    const PeerId id = pending->peer->id;
    give_back(pending);
    return {StatusCode::kAborted,
            "peer " + std::to_string(id) + " goes down: " + ucx_.describe(call, UCS_PTR_STATUS(result))};
  }
  if (result == nullptr) settle(pending, UCS_OK);  // complete: no callback comes
  return {};
}

void UcxTransport::give_back(Pending* pending) {
  Peer& peer = *pending->peer;
  --peer.sends;
  if (pending->rendezvous) --peer.rendezvous;
  if (pending->own) peer.flushing = false;
  if (peer.flush == pending) peer.flush = nullptr;
  free_pendings_.push_back(pending);
}

void UcxTransport::on_settled(void* request, ucs_status_t status, void* user_data) {
  auto* pending = static_cast<Pending*>(user_data);
  UcxTransport& self = *pending->peer->owner;
  self.settle(pending, status);
  self.ucx_.ucp_request_free(request);
}

void UcxTransport::settle(Pending* pending, ucs_status_t status) {
  Peer& peer = *pending->peer;
  if (pending->status == UCS_OK) pending->status = status;
  if (pending->rendezvous && peer.flush != nullptr && peer.flush->status == UCS_OK)
    peer.flush->status = status;
  give_back(pending);
  if (pending->own) return;
  Event event;
  event.kind = pending->kind;
  event.peer = peer.id;
  event.cookie = pending->cookie;
  if (pending->status != UCS_OK) {
    event.status = {StatusCode::kAborted,
                    "peer " + std::to_string(peer.id) + ": " + ucx_.ucs_status_string(pending->status)};
  }
  events_.push_back(std::move(event));
}

// ---- receiving ---------------------------------------------------------------------------------

ucs_status_t UcxTransport::on_message(void* self, const void* header, std::size_t header_bytes, void* data,
                                      std::size_t bytes, const ucp_am_recv_param_t* param) {
  const std::span wire(static_cast<const std::byte*>(header), header_bytes);
  return static_cast<UcxTransport*>(self)->receive(wire, data, bytes, param->recv_attr);
}

ucs_status_t UcxTransport::on_other_message(void* self, const void* /*header*/, std::size_t /*header_bytes*/,
                                            void* /*data*/, std::size_t /*bytes*/,
                                            const ucp_am_recv_param_t* /*param*/) {
  ++static_cast<UcxTransport*>(self)->counters_.dropped_malformed;
  return UCS_OK;
}

ucs_status_t UcxTransport::receive(std::span<const std::byte> wire, void* data, std::size_t bytes,
                                   std::uint64_t attributes) {
  Prefix prefix{};
  if (wire.size() >= sizeof(prefix)) std::memcpy(&prefix, wire.data(), sizeof(prefix));
  // Its memory could wait for a body that nobody sends. If the fetch failed, the peer that the message names
  // would be down.
  const bool rendezvous = (attributes & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0;
  if (rendezvous && rendezvous_bytes_ == kAlwaysEager) {
    ++counters_.dropped_malformed;
    return UCS_OK;
  }
  if (prefix.magic != kMagic || prefix.format != kFormat || wire.size() > sizeof(prefix) + kMaxHeaderBytes ||
      bytes > limits_.max_body_bytes) {
    ++counters_.dropped_malformed;
    return UCS_OK;
  }
  const auto sender = by_transport_.find(prefix.sender);
  if (sender == by_transport_.end() || sender->second->state == State::kDown) {
    ++counters_.dropped_unknown;
    return UCS_OK;  // the body of a rendezvous is not fetched; UCX tells the sender that it is free
  }
  Peer& peer = *sender->second;
  Partner& partner = partners_[prefix.sender];
  partner.theirs = prefix.endpoints;
  some_behind_ = some_behind_ || partner.behind();
  const Header header(wire.subspan(sizeof(prefix)));
  if (rendezvous) return begin_fetch(peer, header, data, bytes);
  // UCX promises to handlers with UCP_AM_FLAG_PERSISTENT_DATA that the data may be kept.
  EPD_CHECK(bytes == 0 || (attributes & UCP_AM_RECV_ATTR_FLAG_DATA) != 0);
  push_received(peer, header, static_cast<const std::byte*>(data), bytes, {data, nullptr});
  return bytes != 0 ? UCS_INPROGRESS : UCS_OK;
}

void UcxTransport::push_received(Peer& peer, const Header& header, const std::byte* data, std::uint64_t bytes,
                                 Hold hold) {
  ++counters_.received;
  Event event;
  event.peer = peer.id;
  event.header = header;
  if (bytes != 0) event.body = {data, bytes, holds_.add(std::move(hold))};
  events_.push_back(std::move(event));
}

ucs_status_t UcxTransport::begin_fetch(Peer& peer, const Header& header, void* descriptor,
                                       std::uint64_t bytes) {
  if (peer.state != State::kOpen) {
    ++counters_.dropped_unknown;
    return UCS_OK;
  }
  std::unique_ptr<std::byte[]> memory(new (std::nothrow) std::byte[bytes]);
  if (memory == nullptr) {
    on_failure(&peer, nullptr, UCS_ERR_NO_MEMORY);
    return UCS_OK;
  }
  auto made = std::make_unique<Fetch>();
  Fetch& fetch = *made;
  fetch.peer = &peer;
  fetch.header = header;
  fetch.memory = std::move(memory);
  fetch.bytes = bytes;
  ucp_request_param_t param;
  std::memset(&param, 0, sizeof(param));
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
  param.cb.recv_am = &UcxTransport::on_fetched;
  param.user_data = &fetch;
  ++peer.fetches;
  fetches_.emplace(&fetch, std::move(made));
  const ucs_status_ptr_t result =
      ucx_.ucp_am_recv_data_nbx(worker_->get(), descriptor, fetch.memory.get(), bytes, &param);
  if (UCS_PTR_IS_PTR(result)) return UCS_INPROGRESS;
  end_fetch(fetch, UCS_PTR_STATUS(result));  // complete, or refused: no callback comes
  return UCS_OK;
}

void UcxTransport::on_fetched(void* request, ucs_status_t status, std::size_t /*bytes*/, void* user_data) {
  auto& fetch = *static_cast<Fetch*>(user_data);
  UcxTransport& self = *fetch.peer->owner;
  self.end_fetch(fetch, status);
  self.ucx_.ucp_request_free(request);
}

void UcxTransport::end_fetch(Fetch& fetch, ucs_status_t status) {
  Peer& peer = *fetch.peer;
  --peer.fetches;
  if (status == UCS_OK) {
    const std::byte* data = fetch.memory.get();
    push_received(peer, fetch.header, data, fetch.bytes, {nullptr, std::move(fetch.memory)});
  } else {
    on_failure(&peer, nullptr, status);  // a message is lost: that is the end of the peer
  }
  fetches_.erase(&fetch);
}

void UcxTransport::release(const Body& body) {
  if (body.hold == 0) return;
  const Hold hold = holds_.take(body.hold);
  if (hold.ucx != nullptr) ucx_.ucp_am_data_release(worker_->get(), hold.ucx);
}

// ---- going on ----------------------------------------------------------------------------------

// False: the peer is closed, so nobody sees the event.
bool UcxTransport::deliver(Event& queued, Event& event) {
  if (queued.kind == EventKind::kReceived || queued.kind == EventKind::kDown) {
    const auto peer = peers_.find(queued.peer);
    if (peer == peers_.end() || peer->second->forgotten) {
      release(queued.body);
      return false;
    }
  }
  event = std::move(queued);
  return true;
}

std::size_t UcxTransport::progress(std::span<Event> events) {
  // The queue is bounded: UCX is asked for more only when there is room.
  while (events_.size() < events.size() && ucx_.ucp_worker_progress(worker_->get()) != 0) {
  }
  advance_flushes();
  advance_closing();
  pair_up();
  std::size_t count = 0;
  while (count < events.size() && !events_.empty()) {
    if (deliver(events_.front(), events[count])) ++count;
    events_.pop_front();
  }
  return count;
}

bool UcxTransport::arm() {
  if (!events_.empty()) return false;
  for (const Peer* peer : ending_) {
    // Pending work for a forced close may not show at UCX's descriptor.
    if (peer->state != State::kLeaving) return false;
  }
  return ucx_.ucp_worker_arm(worker_->get()) == UCS_OK;
}

UcxTransport::~UcxTransport() {
  for (const auto& [id, peer] : peers_) {
    // UCX 1.13 destroys no worker that has a rendezvous under way at an open endpoint.
    if (peer->rendezvous + peer->fetches != 0 && peer->endpoint != nullptr) begin_close(*peer);
    if (peer->closing != nullptr) ucx_.ucp_request_free(peer->closing);
  }
  holds_.for_each([this](const Hold& hold) {
    if (hold.ucx != nullptr) ucx_.ucp_am_data_release(worker_->get(), hold.ucx);
  });
  // Without progress before it, for the same reason as in advance_leaving().
  worker_.reset();  // while there still is what its callbacks refer to
}

}  // namespace epd::transport
