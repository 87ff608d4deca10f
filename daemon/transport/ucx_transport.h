#pragma once

#include "shared.h"
#include "transport/ucx.h"
#include "ucx_worker.h"

#include <chrono>
#include <deque>
#include <optional>
#include <unordered_map>

namespace epd::transport {

class UcxTransport final : public Transport {
 public:
  UcxTransport(UcxWorker worker, std::uint64_t id, Address address, const UcxOptions& options);
  Status listen();
  ~UcxTransport() override;

  const Address& address() const override { return address_; }
  const Limits& limits() const override { return limits_; }
  std::string carrier() const override;
  Result<PeerId> connect(std::span<const std::byte> address) override;
  Status close(PeerId peer) override;
  Status send(PeerId peer, std::span<const std::byte> header, std::span<const std::byte> body,
              std::uint64_t cookie) override;
  Status flush(PeerId peer, std::uint64_t cookie) override;
  void release(const Body& body) override;
  std::size_t progress(std::span<Event> events) override;
  int wait_fd() const override { return worker_->event_fd(); }
  bool arm() override;
  Counters counters() const override { return counters_; }
  bool deaf() const override { return worker_->deaf(); }
  Result<Facts> facts(PeerId peer) const override;

 private:
  // kOpen → (UCX's callback) kFailed → (progress) kClosing → kDown. By close(): kOpen → kLeaving → kClosing.
  enum class State { kOpen, kLeaving, kFailed, kClosing, kDown };
  struct Pending;
  struct Peer {
    UcxTransport* owner = nullptr;
    PeerId id = 0;
    std::uint64_t transport = 0;  // the other side's
    std::uint64_t version = 0;    // likewise
    State state = State::kOpen;
    bool forgotten = false;  // close() was called
    bool shadow = false;     // made by pair_up(), for nobody
    ucp_ep_h endpoint = nullptr;
    void* closing = nullptr;                          // UCX's request
    bool flushing = false;                            // kLeaving: a flush of our own is under way
    std::chrono::steady_clock::time_point leaves_at;  // kLeaving: not before
    std::uint32_t sends = 0;                          // flushes too
    std::uint32_t rendezvous = 0;                     // of these sends
    std::uint32_t fetches = 0;                        // bodies on their way here by rendezvous
    Pending* flush = nullptr;                         // the caller's
    Status reason;                                    // of kDown
  };
  // The bytes of a message before its header.
  struct Prefix {
    std::uint32_t magic;
    std::uint16_t format;
    std::uint16_t endpoints;  // Partner::endpoints of the sender
    std::uint64_t sender;
  };
  // Another transport. UCX pairs the n-th endpoints of both sides, and keeps the socket of an endpoint for
  // the other's partner. So both sides must make as many.
  struct Partner {
    std::vector<std::byte> address;  // as UCX has it
    std::uint64_t version = 0;
    std::uint16_t endpoints = 0;  // made to it, cyclic
    std::uint16_t theirs = 0;     // as its last message said
    std::uint16_t shadows = 0;    // of pair_up(), that have not ended
    // A sender that claims more than this is not believed.
    static constexpr std::uint16_t kMostBehind = 64;
    bool behind() const {
      const auto missing = static_cast<std::uint16_t>(theirs - endpoints);
      return missing != 0 && missing <= kMostBehind;
    }
  };
  // A send or a flush that UCX has.
  struct Pending {
    Peer* peer = nullptr;
    std::uint64_t cookie = 0;
    EventKind kind = EventKind::kSent;
    bool own = false;         // a flush of a peer that leaves: no event
    bool rendezvous = false;  // a send
    ucs_status_t status = UCS_OK;
    std::array<std::byte, sizeof(Prefix) + kMaxHeaderBytes> wire;  // prefix and header
  };

  // A body that UCX fetches by rendezvous.
  struct Fetch {
    Peer* peer = nullptr;
    Header header;
    std::unique_ptr<std::byte[]> memory;
    std::uint64_t bytes = 0;
  };
  // The memory of a received body: UCX's or ours.
  struct Hold {
    void* ucx = nullptr;
    std::unique_ptr<std::byte[]> own;
  };

  static ucs_status_t on_message(void* self, const void* header, std::size_t header_bytes, void* data,
                                 std::size_t bytes, const ucp_am_recv_param_t* param);
  // Takes messages of a kind that no transport sends.
  static ucs_status_t on_other_message(void* self, const void* header, std::size_t header_bytes, void* data,
                                       std::size_t bytes, const ucp_am_recv_param_t* param);
  static void on_settled(void* request, ucs_status_t status, void* pending);
  static void on_fetched(void* request, ucs_status_t status, std::size_t bytes, void* fetch);
  static void on_failure(void* peer, ucp_ep_h endpoint, ucs_status_t status);

  Status handle(unsigned number, ucp_am_recv_callback_t call);
  Peer& make_peer(std::uint64_t transport);
  // Makes and closes the endpoints that others have made alone.
  void pair_up();
  ucs_status_t receive(std::span<const std::byte> wire, void* data, std::size_t bytes,
                       std::uint64_t attributes);
  ucs_status_t begin_fetch(Peer& peer, const Header& header, void* descriptor, std::uint64_t bytes);
  void end_fetch(Fetch& fetch, ucs_status_t status);
  void push_received(Peer& peer, const Header& header, const std::byte* data, std::uint64_t bytes, Hold hold);
  // Returns the peer if it may be sent to, else why not.
  Result<Peer*> sender_to(PeerId peer);
  Pending* take_pending(Peer& peer, std::uint64_t cookie, EventKind kind);
  // Handles UCX's result of the call that began the operation.
  Status begun(Pending* pending, const char* call, ucs_status_ptr_t result);
  void settle(Pending* pending, ucs_status_t status);
  void give_back(Pending* pending);
  void leave(Peer& peer);
  void advance_leaving(Peer& peer);
  void begin_close(Peer& peer);
  Status post_flush(Pending* pending);
  void advance_flushes();
  bool closed(Peer& peer) const;  // UCX has released all of the peer
  void advance_closing();
  bool deliver(Event& queued, Event& event);

  std::optional<UcxWorker> worker_;
  const UcxLibrary& ucx_;
  const std::uint64_t id_;
  const Address address_;
  const Limits limits_;
  const std::uint64_t rendezvous_bytes_;
  std::unordered_map<PeerId, std::unique_ptr<Peer>> peers_;
  std::unordered_map<std::uint64_t, Peer*> by_transport_;  // without forgotten ones
  std::unordered_map<std::uint64_t, Partner> partners_;    // by transport; UCX's counts last as long as it
  bool some_behind_ = false;                               // perhaps
  std::vector<Peer*> ending_;                              // kLeaving, kFailed, kClosing
  PeerId last_peer_ = 0;
  std::deque<Event> events_;
  std::vector<std::unique_ptr<Pending>> pendings_;
  std::vector<Pending*> free_pendings_;
  std::vector<Pending*> flushes_;  // wait for sends by rendezvous, which UCX's flush does not
  std::unordered_map<Fetch*, std::unique_ptr<Fetch>> fetches_;
  Holds<Hold> holds_;
  Counters counters_;
};

}  // namespace epd::transport
