// The engines of other nodes with which this one shares groups. The supervisor tells their addresses. An
// engine that a group needs is connected, and connected again after a pause when the connection ends.
// Messages are handed to their groups.
//
// While a group is in an epoch, each of its far engines must send something now and then. One that is silent
// for a third of network.peer_timeout_ms is pinged. Each is also pinged once a second, to measure the round
// trip. If the connection ends, or an engine is silent for the whole timeout, the supervisor is told
// (kPeerLost), and told again after each further timeout. The supervisor is also told of an engine from which
// a message comes corrupted.
#pragma once

#include "far_page.h"
#include "far_proxy.h"
#include "far_side.h"
#include "round_clock.h"
#include "supervisor_link.h"

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>

namespace epd::engine {

class FarEngines {
 public:
  // For an engine that reaches no others, with the reason.
  FarEngines(const Status& why_not, abi::FarTable& table, SupervisorLink& link, const RoundClock& clock);
  FarEngines(std::unique_ptr<FarProxy> proxy, const transport::NetworkOptions& network, abi::FarTable& table,
             SupervisorLink& link, const RoundClock& clock);

  // OK, or why engines of other nodes can't be reached.
  const Status& usable() const { return usable_; }
  // The address of this engine; empty if it can't be reached.
  const transport::Address& address() const { return address_; }
  void set_spin_ns(std::uint64_t spin_ns);

  // Handles kFarEngine.
  Status note(const abi::FarEngine& message);

  // ---- of groups

  std::unique_ptr<FarSide> make_side(const abi::GroupBegin& message);
  // The engines of this group are needed from now on, and no others for it. RESOURCE_EXHAUSTED: all groups
  // together need more than network.max_bytes.
  Status serve(FarSide& side);
  // The group needs no engines any more. To be called before it is destroyed.
  void forget(const FarSide& side);
  Status check_sizes(const FarSide& side) const { return side.check_sizes(max_body_bytes_); }
  // For example "host:1 on node-b".
  std::string name(far::EngineId engine) const;
  // The engine is of no use to its groups: tells the supervisor.
  void lose(far::EngineId engine, const std::string& reason,
            abi::PeerLoss loss = abi::PeerLoss::kUnreachable);

  // ---- of the loop

  // Hands on a share of the messages that have come. True: there was at least one.
  bool receive();
  // Sends what groups have to say, and checks the engines. True: something was sent.
  bool step();
  // Whether a round would find work here.
  bool pending() const;
  std::uint64_t next_look_ns() const;

 private:
  struct Peer {
    std::string node_name;        // "" if it was never told
    transport::Address address;   // empty: it is down
    bool connected = false;       // or being connected
    bool heard = false;           // in this connection
    bool silent = false;          // and therefore lost, though it is connected
    std::string why;              // why the connection ended
    std::uint64_t retry_ns = 0;   // when it is connected again
    std::uint64_t pause_ns = 0;   // between attempts
    std::uint64_t silent_ns = 0;  // silent since then
    std::uint64_t pinged_ns = 0;
    std::uint64_t told_ns = 0;     // when its loss was told; 0: not since it was last heard
    std::uint64_t corrupt_ns = 0;  // when a corrupted header of it was told
    std::set<const FarSide*> users;

    bool needed() const;  // by a group in an epoch
  };

  void need(far::EngineId engine, const FarSide& side);
  void stop_using(far::EngineId engine, Peer& peer, const FarSide& side);
  void disconnect(far::EngineId engine, Peer& peer);
  void take(FarProxy::Event& event);
  void receive_message(const FarProxy::Event& event);
  void receive_corrupt(far::EngineId engine);
  void came_down(far::EngineId engine, Peer& peer, const Status& status);
  void send_ping(far::EngineId engine, abi::FarType type, std::uint64_t time_ns);
  void receive_pong(far::EngineId engine, std::uint64_t time_ns);
  std::uint64_t next_ping_ns(const Peer& peer) const;
  std::string silent_text() const;
  // Shows it in the page.
  void show(far::EngineId engine, const Peer& peer);
  void show_all();
  bool look_after(far::EngineId engine, Peer& peer);
  void name_drops(std::uint64_t now_ns);

  const Status usable_;
  const transport::NetworkOptions network_;
  const std::uint64_t max_body_bytes_ = 0;
  const std::uint64_t timeout_ns_ = 0;
  const std::uint64_t incarnation_ = 0;
  SupervisorLink& link_;
  const RoundClock& clock_;
  FarPage page_;
  const std::unique_ptr<FarProxy> proxy_;  // null: not usable
  transport::Address address_;
  std::map<far::EngineId, Peer> peers_;
  std::map<std::uint64_t, FarSide*> sides_;          // by group
  std::map<far::EngineId, std::uint64_t> named_ns_;  // when drops of its messages were named in the log
  std::uint64_t last_step_ns_ = 0;
  bool full_ = false;  // receive() left messages
};

// The largest bodies of messages with such windows.
std::uint64_t far_body_bytes(const transport::NetworkOptions& network);

}  // namespace epd::engine
