// Engines of other nodes with which this one shares groups. The supervisor tells where they are; those that a
// group needs are connected, and again with a pause when a connection ends. Messages go to their groups.
//
// While a group is in an epoch, each of its far engines is to say something now and then: whoever is silent
// for a third of network.peer_timeout_ms is pinged, and each once a second, to know the round trip. One whose
// connection ends, or that is silent for all of it, is told to the supervisor (kPeerLost), again after as
// long.
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
  // An engine that reaches no others, for that reason.
  FarEngines(const Status& why_not, abi::FarTable& table, SupervisorLink& link, const RoundClock& clock);
  FarEngines(std::unique_ptr<FarProxy> proxy, const transport::NetworkOptions& network, abi::FarTable& table,
             SupervisorLink& link, const RoundClock& clock);

  // OK, or why engines of other nodes can't be reached.
  const Status& usable() const { return usable_; }
  // Of this engine; empty if it can't be reached.
  const transport::Address& address() const { return address_; }
  void set_spin_ns(std::uint64_t spin_ns);

  // kFarEngine
  Status note(const abi::FarEngine& message);

  // ---- of groups

  std::unique_ptr<FarSide> make_side(const abi::GroupBegin& message);
  // Its engines are needed from now on, and no others of it. RESOURCE_EXHAUSTED: all groups together need
  // more than network.max_bytes.
  Status serve(FarSide& side);
  // No more. Before it is destroyed.
  void forget(const FarSide& side);
  Status check_sizes(const FarSide& side) const { return side.check_sizes(max_body_bytes_); }
  // "host:1 on node-b"
  std::string name(far::EngineId engine) const;
  // It is of no use to its groups: the supervisor is told.
  void lose(far::EngineId engine, const std::string& reason);

  // ---- of the loop

  // Hands on what has come, for a share of the round. True: there was something.
  bool receive();
  // Sends what groups have to say, and looks after the engines. True: something was sent.
  bool step();
  // Whether a round would find something.
  bool pending() const;
  std::uint64_t next_look_ns() const;

 private:
  struct Peer {
    std::string node_name;        // "" if it was never told
    transport::Address address;   // empty: it is down
    bool connected = false;       // or being so
    bool heard = false;           // in this connection
    bool silent = false;          // and is lost for that, though it is connected
    std::string why;              // the connection ended
    std::uint64_t retry_ns = 0;   // when it is connected again
    std::uint64_t pause_ns = 0;   // between tries
    std::uint64_t silent_ns = 0;  // since then
    std::uint64_t pinged_ns = 0;
    std::uint64_t told_ns = 0;  // that it is lost; 0: not since it has said something
    std::set<const FarSide*> users;

    bool needed() const;  // by a group in an epoch
  };

  void need(far::EngineId engine, const FarSide& side);
  void let_go(far::EngineId engine, Peer& peer, const FarSide& side);
  void disconnect(far::EngineId engine, Peer& peer);
  void take(FarProxy::Event& event);
  void receive_message(const FarProxy::Event& event);
  void came_down(far::EngineId engine, Peer& peer, const Status& status);
  void send_ping(far::EngineId engine, abi::FarType type, std::uint64_t time_ns);
  void receive_pong(far::EngineId engine, std::uint64_t time_ns);
  std::uint64_t next_ping_ns(const Peer& peer) const;
  std::string silent_text() const;
  // In the page.
  void show(far::EngineId engine, const Peer& peer);
  void show_all();
  bool look_after(far::EngineId engine, Peer& peer);

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
  std::map<std::uint64_t, FarSide*> sides_;  // by group
  std::uint64_t last_step_ns_ = 0;
  bool full_ = false;  // receive() left something
};

// The bodies of messages, at most, with such windows.
std::uint64_t far_body_bytes(const transport::NetworkOptions& network);

}  // namespace epd::engine
