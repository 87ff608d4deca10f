// A cluster without processes: one coordinator, nodes with their deciders, engines, clients, channels, one
// clock and one queue of what happens next. Everything follows from the seed. Nodes and the coordinator know
// of each other by messages alone. An engine refuses what the real one would end itself for. A node of its
// own is a cluster of one.
#pragma once

#include "membership/coordinator.h"
#include "membership/deciders.h"

#include "membership_fixture.h"

#include <deque>
#include <functional>
#include <memory>
#include <queue>
#include <random>

namespace epd::membership {

struct WorldOptions {
  std::uint32_t nodes = 3;
  LossPolicy policy = LossPolicy::kFailFast;
  bool coordinator_dies = false;
  bool spans = true;          // some groups span nodes; else each is its node's own
  std::uint32_t devices = 2;  // of each node
  abi::DeviceKind kind = abi::DeviceKind::kHost;
  std::uint32_t conflict_ms = 0;
  bool echoes = false;  // a registry of own groups is told twice whatever may be told twice
};

// All of them read the same.
class VirtualClock final : public Clock {
 public:
  std::uint64_t now_ns() const override { return now_ns_; }
  void advance_to(std::uint64_t ns) { now_ns_ = ns; }

 private:
  std::uint64_t now_ns_ = 1'000'000'000;
};

class World {
 public:
  static constexpr std::uint32_t kRanks = 4;

  World(std::uint64_t seed, const WorldOptions& options);

  // Random events for so long.
  void run_ms(std::uint64_t ms);
  // No more faults, and what was broken is mended; for so long.
  void settle_ms(std::uint64_t ms);
  // The coordinator hears of none of them. settle_ms() starts the next one.
  void evict_as_the_coordinator_dies();
  void close_all_sessions();
  void check_settled() const;
  void check_empty() const;

  // How often what the run is for has happened.
  std::map<std::string, std::uint64_t> counts;

 private:
  struct KnownGroup {
    enum class Phase { kServing, kBroken, kLost } phase = Phase::kServing;
    std::uint64_t epoch = 0;
    std::uint64_t view = 0;
    EpochKey key;
    std::uint64_t resume_index = 0;
    std::uint64_t said = kNever;  // next_index of its kBroken of this epoch
    bool greeted = false;         // all far engines have said hello in this epoch
    std::uint64_t waits_since_ns = 0;
    std::map<std::uint32_t, EngineId> ranks;  // active
    std::set<std::uint32_t> members;          // of this engine
    std::set<std::uint32_t> refused;          // ranks whose memory it can't use
    std::map<EngineId, FarEngine> far;
  };
  struct Engine {
    bool up = false;
    bool stopped = false;
    std::uint64_t life = 0;  // grows with each start
    std::string address;
    std::deque<std::function<void()>> inbox;
    std::deque<Event> outbox;
    std::map<std::uint64_t, KnownGroup> groups;
  };
  struct Client {
    std::uint32_t device = 0;
    std::set<std::uint32_t> members;
    std::set<std::uint32_t> owed;  // requests
  };
  template <typename Message>
  struct Pipe {
    std::deque<Message> messages;
    bool cut = false;
    bool moving = false;  // the next delivery is in the queue
  };
  struct Evicted {
    std::uint64_t group = 0;
    std::uint32_t rank = 0;
    RequestId join;
  };
  struct Node {
    std::string name;
    std::uint64_t boot = 0;
    bool runs = false;
    bool paused = false;
    std::unique_ptr<Deciders> deciders;
    Agent* agent = nullptr;  // theirs
    std::uint64_t term = 0;  // the highest that its agent has had
    std::map<std::uint32_t, Engine> engines;
    std::map<std::uint64_t, Client> clients;
    FakeMemory memory;
    std::uint64_t channel = 0;  // grows when it begins again
    Pipe<ToCoordinator> up;
    Pipe<ToAgent> down;
    std::vector<ToAgent> stale;    // of coordinators that are gone
    std::vector<Evicted> evicted;  // in this life
  };
  struct Believed {
    std::map<std::uint32_t, EngineId> ranks;
    EpochKey key;
    std::uint64_t view = 0;
    bool operator==(const Believed&) const = default;
  };
  struct Happening {
    std::uint64_t at_ns;
    std::uint64_t number;
    std::function<void()> what;
    bool operator>(const Happening& other) const {
      return std::pair(at_ns, number) > std::pair(other.at_ns, other.number);
    }
  };

  std::uint64_t below(std::uint64_t bound) { return random_() % bound; }
  void later_us(std::uint64_t us, std::function<void()> what);
  void run_until(std::uint64_t at_ns);
  void pump();
  void trace(const std::string& line) const;
  Node& any_node() { return nodes_[below(nodes_.size())]; }

  // Faults.
  void happen();
  void fault();
  void start_node(Node& node);
  void kill_node(Node& node, bool seen);
  void start_coordinator();
  void kill_coordinator();
  std::uint64_t coordinator_term() const { return coordinator_ == nullptr ? 0 : coordinator_->term(); }
  void begin_channel(Node& node);
  void part(Node& a, Node& b);
  bool apart(const std::string& a, const std::string& b) const { return apart_.contains(std::minmax(a, b)); }

  // Clients.
  void join(Node& node);
  void leave(Node& node);
  void close(Node& node, std::uint64_t session);
  void answered(Node& node, const RequestId& request);
  // An operator evicts, and is told whether it will be.
  void evict(Node& node);
  void evict_own(Node& node);
  void check_evicted(const Node& node) const;
  static void check_registry(const Node& node);

  // Channels.
  void move_up(Node& node);
  void move_down(Node& node);

  // Nodes.
  void tell(Node& node, const Event& event);
  template <typename T>
  void carry_out(Node& node, const T& action);
  void carry_out(Node& node, const CloseStreams& action);
  void carry_out(Node& node, const KillEngine& action);
  void carry_out(Node& node, const AcquireMemory& action);
  void carry_out(Node& node, const ReleaseMemory& action);
  void carry_out(Node& node, const MarkLost& action);
  void carry_out(Node& node, const ReplyJoined& action);
  void carry_out(Node& node, const ReplyLeft& action) { answered(node, action.request); }
  void carry_out(Node& node, const ReplyRefused& action) { answered(node, action.request); }
  void carry_out(Node&, const WakeSession&) {}

  // Engines.
  void start_engine(Node& node, std::uint32_t device);
  void kill_engine(Node& node, std::uint32_t device);
  void work(Node& node, std::uint32_t device);
  void say(Node& node, std::uint32_t device, Event event);
  void greet(Node& node, std::uint32_t device, std::uint64_t group_id);
  bool answers(const FarEngine& far, std::uint64_t group_id, const KnownGroup& known) const;
  void believe(const Node& node, std::uint64_t group_id, const KnownGroup& known);
  void take(Node& node, Engine& engine, const CloseStreams& action);
  KnownGroup* known_by(Engine& engine, std::uint64_t group_id);
  void take(Node& node, Engine& engine, const StartGroup& action);
  void take(Node& node, Engine& engine, const SendRank& action);
  void take(Node& node, Engine& engine, const SendMember& action);
  void take(Node& node, Engine& engine, const SendFarEngine& action);
  void take(Node& node, Engine& engine, const SendStopMember& action);
  void take(Node& node, Engine& engine, const SendBreak& action);
  void take(Node& node, Engine& engine, const SendRelease& action);
  void take(Node& node, Engine& engine, const SendResume& action);
  void take(Node& node, Engine& engine, const SendRemoveGroup& action);

  const WorldOptions options_;
  std::mt19937_64 random_;
  VirtualClock clock_;
  std::priority_queue<Happening, std::vector<Happening>, std::greater<>> queue_;
  std::uint64_t next_happening_ = 0;
  bool faults_ = true;
  std::unique_ptr<Coordinator> coordinator_;
  std::uint64_t coordinator_life_ = 0;
  std::vector<Node> nodes_;
  std::set<std::pair<std::string, std::string>> apart_;  // nodes that don't reach each other
  std::uint64_t next_session_ = 10;
  std::uint32_t next_request_ = 100;
  std::uint64_t last_term_ = 0;
  std::uint64_t next_boot_ = 1;
  std::uint64_t next_key_ = 1;
  std::map<std::pair<std::string, std::uint64_t>, Believed> believed_;  // by group and epoch
};

}  // namespace epd::membership
