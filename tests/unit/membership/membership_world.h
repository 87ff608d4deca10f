// A cluster without processes around one registry: nodes, each with a channel to it and back that delays what
// is on it and keeps its order, with sessions, memory and engines of its own. Engines have two queues each,
// and refuse what the real one would end itself for. All that the registry and the nodes know of each other
// goes through messages.
#pragma once

#include "membership_fixture.h"

#include <deque>
#include <functional>
#include <optional>
#include <random>

namespace epd::membership {

struct WorldOptions {
  std::uint32_t nodes = 1;
  bool at_once = true;  // nothing is delayed between node and registry
  bool echoes = false;  // the registry is told twice whatever may be told twice
  bool spans = false;   // its groups are those that span nodes: lost nodes, engines out of reach
  LossPolicy policy = LossPolicy::kFailFast;
  abi::DeviceKind kind = abi::DeviceKind::kHost;
  std::uint32_t conflict_ms = 0;
};

class World {
 public:
  static constexpr std::uint32_t kRanks = 4;
  static constexpr std::uint32_t kDevices = 6;  // of all nodes; as many nodes divide it

  World(std::uint64_t seed, const WorldOptions& options);

  // Something happens, of the kinds that may.
  void step();
  // Every engine runs and answers, channels are emptied, every deadline passes.
  void settle();
  void close_all_sessions();
  // Nothing is under way, and nobody is waited for.
  void check_settled() const;
  void check_empty() const;

 private:
  // What an engine knows of a group.
  struct KnownGroup {
    enum class Phase { kServing, kBroken, kLost } phase = Phase::kServing;
    std::uint64_t epoch = 0;
    std::set<std::uint32_t> ranks;    // active
    std::set<std::uint32_t> members;  // of this engine
    std::uint64_t said = kNever;      // next_index of its kBroken of this epoch
  };
  struct Engine {
    bool up = false;
    bool stopped = false;        // takes nothing
    std::uint64_t known_at = 0;  // events of its node that the registry must have heard to know of it
    std::deque<std::function<void()>> inbox;
    std::deque<Event> outbox;
    std::map<std::uint64_t, KnownGroup> groups;
  };
  struct Sent {
    Action action;
    std::uint64_t heard;  // events of the node that the registry had heard when it decided
  };
  struct Node {
    std::deque<Event> up;
    std::deque<Sent> down;
    std::uint64_t sent = 0;
    std::uint64_t heard = 0;
    FakeMemory memory;
    bool lost = false;
  };
  // What all engines of a group believe in one epoch.
  struct Believed {
    std::set<std::uint32_t> ranks;
    EpochKey key;
    std::uint64_t view = 0;
    bool operator==(const Believed&) const = default;
  };

  std::uint32_t below(std::uint32_t bound) { return static_cast<std::uint32_t>(random_() % bound); }
  EngineId any_engine();
  template <typename Set>
  auto any(const Set& set) {
    return std::next(set.begin(), below(static_cast<std::uint32_t>(set.size())));
  }

  // Clients.
  void join();
  void say_again();
  void leave();
  void close(SessionId session);
  void forget(SessionId session);
  void evict();
  void answered(const RequestId& request);

  // Nodes.
  void begin_node();
  void lose_node();
  void say_out_of_reach(EngineId engine);
  void believe(std::uint64_t group_id, const KnownGroup& known, EpochKey key, std::uint64_t view);

  // Channels.
  void tell(std::uint32_t node, Event event);
  void hear(std::uint32_t node);
  void collect();
  void obey(std::uint32_t node);

  // Engines.
  void kill(EngineId engine);
  void start(EngineId engine);
  void ask_break(EngineId engine);
  void answer(EngineId engine);
  void deliver(EngineId engine);

  // Nodes, of what is for their engines, memory and sessions.
  template <typename T>
  void carry_out(const T& action, std::uint64_t heard);
  void carry_out(const CloseStreams& action, std::uint64_t heard);
  void carry_out(const KillEngine& action, std::uint64_t heard);
  void carry_out(const AcquireMemory& action, std::uint64_t heard);
  void carry_out(const ReleaseMemory& action, std::uint64_t heard);
  void carry_out(const MarkLost& action, std::uint64_t heard);
  void carry_out(const ReplyJoined& action, std::uint64_t heard);
  void carry_out(const ReplyLeft& action, std::uint64_t) { answered(action.request); }
  void carry_out(const ReplyRefused& action, std::uint64_t) { answered(action.request); }
  void carry_out(const WakeSession&, std::uint64_t) {}

  // An engine, of what it is told.
  void take(Engine& engine, const StartGroup& action);
  void take(Engine& engine, const SendRank& action);
  void take(Engine& engine, const SendMember& action);
  void take(Engine& engine, const SendFarEngine& action);
  void take(Engine& engine, const SendStopMember& action);
  void take(Engine& engine, const SendBreak& action);
  void take(Engine& engine, const SendRelease& action);
  void take(Engine& engine, const SendResume& action);
  void take(Engine& engine, const SendRemoveGroup& action);
  void take(Engine& engine, const CloseStreams& action);
  KnownGroup* known_by(Engine& engine, std::uint64_t group_id);
  void check_ranks(const KnownGroup& known, const SendResume& action) const;

  const WorldOptions options_;
  std::mt19937_64 random_;
  ManualClock clock_;
  std::uint64_t next_key_ = 1;
  GroupRegistry registry_;
  std::vector<Node> nodes_;
  std::map<EngineId, Engine> engines_;
  std::map<std::pair<std::uint64_t, std::uint64_t>, Believed> believed_;  // by group and epoch
  std::uint64_t next_session_ = 10;
  std::uint32_t next_request_ = 100;
  std::map<SessionId, EngineId> open_;                    // sessions, their engines
  std::set<std::pair<SessionId, std::uint32_t>> joined_;  // sessions, their memberships
  std::set<RequestId> owed_;                              // requests without an answer
  std::map<RequestId, JoinRequest> waiting_;              // the joins of them
};

}  // namespace epd::membership
