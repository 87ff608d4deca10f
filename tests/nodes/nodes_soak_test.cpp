// Random faults on three daemons whose groups span them, as many as one likes:
//   EPD_TEST_FAULTS=1000 EPD_TEST_SEED=7 build/dev/bin/nodes_test --gtest_filter='NodesSoak*'
// Each node has a network of its own, where that can be made; else there are no faults of links.
// After each the ranks are back within a bound and compute on, right to the bit. Groups that a fault does not
// touch notice nothing. In the end the daemons hold what they held at first.
#include "common/signal.h"
#include "kit/daemon.h"
#include "kit/nodes.h"
#include "support/cases.h"
#include "support/census.h"
#include "support/client.h"
#include "support/daemon_cluster.h"
#include "support/ranks.h"
#include "support/script.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>
#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <sstream>

namespace epd::test {
namespace {

constexpr double kBackSeconds = 60;   // after a fault: until all ranks compute again
constexpr std::uint64_t kRounds = 6;  // operations that each then completes
constexpr std::size_t kStatuses = EPD_INTERNAL + 1;
const std::array<const char*, 3> kNodes{"a", "b", "c"};  // the first coordinates

std::uint64_t number_from(const char* variable, std::uint64_t otherwise) {
  const char* text = std::getenv(variable);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

struct Plan {
  std::string name;
  Case shape;
  std::vector<std::uint32_t> nodes;  // by rank
  std::uint32_t device;
  Order order;
};

struct Seat {
  std::size_t plan;
  std::uint32_t rank;
};

constexpr std::size_t kSeats = 10;

struct Counts {
  std::array<std::atomic<std::uint64_t>, kStatuses> of;
  std::string to_string(const char* what) const {
    std::string text;
    for (std::size_t i = 1; i < kStatuses; ++i) {
      if (of[i] != 0)
        text += std::string(text.empty() ? what : "") + " " + std::to_string(of[i]) + " " +
                epd_status_name(static_cast<epd_status_t>(i));
    }
    return text.empty() ? text : text + "; ";
  }
};

// The counts that a seat's process reports; its successors continue them.
struct Progress {
  std::atomic<std::uint64_t> completed, failures, generations;
  std::atomic<std::uint32_t> node;
  Counts operations, joins, attaches;
};

struct Board {
  std::array<Progress, kSeats> seats;
  std::atomic<bool> stop;
  std::atomic<bool> at_home;  // ranks move no more
};

struct Stopped {};  // thrown to leave a script that has no end

// The statuses that faults may give; a defect gives others.
void must_be_explained(epd_status_t status, const std::string& what) {
  const std::set<epd_status_t> explained{EPD_RANK_LOST, EPD_ENGINE_RESTARTED, EPD_DAEMON_LOST, EPD_ABORTED,
                                         EPD_DEADLINE_EXCEEDED};
  RANK_CHECK(explained.contains(status), what + ": " + epd_status_name(status) + ": " + epd_last_error());
}

// Joins, works until its rank is lost, and joins again, also elsewhere.
class Life {
 public:
  Life(const std::array<Daemon*, 3>& daemons, const Plan& plan, std::uint32_t rank, Board& board,
       Progress& progress)
      : daemons_(daemons), plan_(plan), rank_(rank), board_(board), progress_(progress) {}

  std::string run() {
    while (!board_.stop) {
      if (!attach()) continue;
      epd_group_t* joined = join();
      if (joined == nullptr) continue;
      const Group group(joined);
      try {
        ScriptRunner(group, plan_.shape, rank_, options()).run();
      } catch (const Stopped&) {
        break;
      }
      ++progress_.generations;
      note("leave " + plan_.name);
    }
    return "";
  }

 private:
  bool attach() {
    const std::uint32_t home = plan_.nodes[rank_];
    const bool moves = plan_.shape.degrade && !board_.at_home && ++lives_ % 3 == 0;
    const std::uint32_t wanted = moves ? (home + 1) % 3 : board_.at_home ? home : progress_.node.load();
    if (session_ && wanted == progress_.node && epd_session_check(session_->get()) == EPD_OK) return true;
    session_.reset();
    progress_.node = wanted;
    const Daemon& daemon = *daemons_[wanted];
    const std::string device = daemon.device(plan_.device);
    epd_attach_options_t options;
    epd_attach_options_init(&options);
    options.socket_path = daemon.socket().c_str();
    options.device = device.c_str();
    options.timeout_ms = 5000;
    note("attach to " + daemon.socket());
    epd_session_t* session = nullptr;
    const epd_status_t status = epd_session_attach(&options, &session);
    if (status == EPD_OK) {
      session_.emplace(session);
      return true;
    }
    ++progress_.attaches.of[status];
    must_be_explained(status, "attach");
    sleep_ms(50);
    return false;
  }

  epd_group_t* join() {
    epd_group_config_t config = plan_.shape.config(plan_.name.c_str(), rank_);
    config.timeout_ms = 3000;
    epd_group_t* group = nullptr;
    note("join " + plan_.name + " on node " + std::to_string(progress_.node));
    const epd_status_t status = epd_group_join(session_->get(), &config, &group);
    if (status == EPD_OK) {
      passing_since_ = 0;
      return group;
    }
    ++progress_.joins.of[status];
    // Nobody has noticed yet that its former owner has gone; the engine started while the cable was out.
    const std::string said = epd_last_error();
    const bool passes = said.find("is taken by session") != std::string::npos ||
                        said.find("has no network to other nodes") != std::string::npos ||
                        said.find("No such device") != std::string::npos;
    if (passes && passing_since_ == 0) passing_since_ = now_s();
    if (!passes || now_s() > passing_since_ + 20) must_be_explained(status, "join " + plan_.name);
    sleep_ms(20);
    return nullptr;
  }

  ScriptOptions options() {
    ScriptOptions options;
    options.rounds = 100'000;
    options.order = plan_.order;
    options.recover = true;
    options.ends = {EPD_RANK_LOST, EPD_DAEMON_LOST, EPD_ABORTED};
    options.on_submit = [this](std::uint64_t) {
      if (board_.stop) throw Stopped{};
    };
    options.on_complete = [this](std::uint64_t) {
      ++progress_.completed;
      sleep_ms(2);
    };
    options.on_failure = [this](epd_status_t status) {
      if (board_.stop) return;
      ++progress_.failures;
      ++progress_.operations.of[status];
      must_be_explained(status, "an operation");
    };
    return options;
  }

  const std::array<Daemon*, 3>& daemons_;
  const Plan& plan_;
  const std::uint32_t rank_;
  Board& board_;
  Progress& progress_;
  std::optional<Session> session_;
  std::uint32_t lives_ = 0;
  double passing_since_ = 0;
};

class NodesSoak : public testing::Test {
 protected:
  NodesSoak() : seed_(number_from("EPD_TEST_SEED", 1)), random_(seed_) { cluster_.emplace(2); }

  void SetUp() override {
    if (const std::string why_not = kit::NodeNetwork::why_not(); why_not.empty()) {
      network_.emplace(3);
      for (std::uint32_t node = 0; node < 3; ++node) {
        cluster_->place(kNodes[node], network_->address(node), [this, node] {
          if (const std::string what = network_->enter(node); !what.empty()) ::_exit(126);
        });
      }
    } else {
      std::printf("no faults of links: %s\n", why_not.c_str());
    }
    ASSERT_TRUE(cluster_->prepare());
    const Settings quick{{"cluster.node_timeout_ms", "2000"},     {"cluster.heartbeat_ms", "50"},
                         {"cluster.orphan_ms", "3000"},           {"engine.max_restarts_per_minute", "10000"},
                         {"engine.restart_backoff_max_ms", "20"}, {"log.level", "\"info\""}};
    for (std::size_t node = 0; node < 3; ++node) daemons_[node] = &cluster_->start(kNodes[node], quick);
    await_cluster();
    add("wide", true, {0, 1, 2, 2}, 0, Order::kWindows);
    add("ab", false, {0, 1}, 1, Order::kInTurn);
    add("bc", false, {1, 2}, 1, Order::kStaggered);
    add("ca", false, {2, 0}, 1, Order::kWindows);
    ASSERT_EQ(seats_.size(), kSeats);
  }

  void await_cluster() {
    for (const char* seen_by : kNodes) {
      for (const char* node : kNodes) cluster_->await(seen_by, node, "up");
    }
  }

  void add(const std::string& name, bool degrade, const std::vector<std::uint32_t>& nodes,
           std::uint32_t device, Order order) {
    Case c = DaemonCluster::spanning_case(static_cast<std::uint32_t>(nodes.size()));
    c.seed = seed_ * 100 + plans_.size();
    c.degrade = degrade;
    for (std::uint32_t rank = 0; rank < c.num_ranks; ++rank) seats_.push_back({plans_.size(), rank});
    plans_.push_back({name, c, nodes, device, order});
  }

  // ---- ranks

  void seat(std::size_t i) {
    board_->seats[i].node = plan_of(i).nodes[seats_[i].rank];
    processes_[i] = RankProcess([this, i]() -> std::string {
      return Life(daemons_, plan_of(i), seats_[i].rank, *board_, board_->seats[i]).run();
    });
  }
  const Plan& plan_of(std::size_t i) const { return plans_[seats_[i].plan]; }
  std::string name_of(std::size_t i) const {
    return plan_of(i).name + " rank " + std::to_string(seats_[i].rank) + " (node " +
           kNodes[board_->seats[i].node] + ", pid " + std::to_string(processes_[i].pid()) + ")";
  }
  bool has_ended(std::size_t i) const {
    siginfo_t info{};
    const auto pid = static_cast<id_t>(processes_[i].pid());
    return ::waitid(P_PID, pid, &info, WEXITED | WNOHANG | WNOWAIT) == 0 && info.si_pid != 0;
  }
  void start_load() {
    board_->stop = false;
    for (std::size_t i = 0; i < kSeats; ++i) seat(i);
  }
  void stop_load() {
    board_->stop = true;
    for (std::size_t i = 0; i < kSeats; ++i) {
      const RankOutcome outcome = processes_[i].wait(kBackSeconds);
      EXPECT_TRUE(outcome.ok) << name_of(i) << " " << outcome.to_string();
    }
  }

  // All ranks complete operations, in whatever group they are by then.
  void expect_all_back(const std::string& after) {
    std::array<std::uint64_t, kSeats> goal;
    for (std::size_t i = 0; i < kSeats; ++i) goal[i] = board_->seats[i].completed + kRounds;
    const double begin = now_s();
    std::size_t behind = 0;
    const bool back = eventually(kBackSeconds, [&] {
      for (behind = 0; behind < kSeats; ++behind) {
        if (has_ended(behind)) return true;
        if (board_->seats[behind].completed < goal[behind]) return false;
      }
      return true;
    });
    slowest_ = std::max(slowest_, now_s() - begin);
    if (now_s() - begin > 5) std::printf("  slow: %.1f s after %s\n", now_s() - begin, after.c_str());
    if (back && behind == kSeats) return;
    ADD_FAILURE() << "seed " << seed_ << ", fault " << fault_ << ", " << after << ": " << name_of(behind)
                  << (back ? " has ended" : " is not back");
    explain();
  }

  void explain() {
    for (std::size_t i = 0; i < kSeats; ++i) {
      std::printf("%s: completed %lu\n", name_of(i).c_str(),
                  static_cast<unsigned long>(board_->seats[i].completed));
    }
    for (const Daemon* daemon : daemons_) {
      for (const char* what : {"nodes", "groups", "ops", "sessions"})
        std::printf("%s\n", daemon->epctl({what}, 5).out.c_str());
    }
    for (std::size_t i = 0; i < kSeats; ++i)
      std::printf("%s: %s\n", name_of(i).c_str(), processes_[i].wait(0.1).to_string().c_str());
  }

  void keep_logs() const {
    if (std::getenv("EPD_TEST_KEEP_LOGS") == nullptr) return;
    for (std::size_t node = 0; node < 3; ++node) {
      const std::string path =
          std::string("/tmp/soak-") + std::to_string(seed_) + "-" + kNodes[node] + ".log";
      std::FILE* out = std::fopen(path.c_str(), "w");
      if (out == nullptr) continue;
      std::fputs(daemons_[node]->log().c_str(), out);
      std::fclose(out);
    }
  }

  // ---- faults

  std::uint64_t below(std::uint64_t bound) { return random_() % bound; }
  void strike_node(std::uint32_t node) {
    for (std::size_t i = 0; i < kSeats; ++i) {
      if (board_->seats[i].node == node) struck_.insert(seats_[i].plan);
    }
    struck_engines_.insert({node, 0});
    struck_engines_.insert({node, 1});
  }
  void strike_engine(std::uint32_t node, std::uint32_t device) {
    for (std::size_t i = 0; i < kSeats; ++i) {
      if (board_->seats[i].node == node && plan_of(i).device == device) struck_.insert(seats_[i].plan);
    }
    struck_engines_.insert({node, device});
  }
  void stop_for(const std::vector<pid_t>& pids, double seconds) {
    for (const pid_t pid : pids) {
      if (pid > 0) send_signal(pid, SIGSTOP);
    }
    stops_.push_back({now_s() + seconds, pids});
  }
  // Well below orphan_ms: a node that finds no coordinator for so long ends what is well, too.
  double some_time() { return 0.1 + static_cast<double>(below(2400)) / 1000; }
  void restart_later(std::uint32_t node) {
    restarts_[node] = now_s() + (below(2) == 0 ? 0 : static_cast<double>(below(2500)) / 1000);
  }

  // "" if it can't be.
  std::string kill_client() {
    const std::size_t i = below(kSeats);
    struck_.insert(seats_[i].plan);
    std::string text = "kill -9 of " + name_of(i);
    processes_[i].kill(SIGKILL);
    processes_[i].wait(10);
    seat(i);
    return text;
  }
  std::string stop_client() {
    const std::size_t i = below(kSeats);
    struck_.insert(seats_[i].plan);
    stop_for({processes_[i].pid()}, some_time());
    return "stop of " + name_of(i);
  }
  std::string kill_engine(int times) {
    const auto node = static_cast<std::uint32_t>(below(3));
    const auto device = static_cast<std::uint32_t>(below(2));
    if (restarts_.contains(node)) return "";
    strike_engine(node, device);
    for (int i = 0; i < times; ++i) {
      if (i != 0) sleep_ms(static_cast<int>(below(150)));
      const pid_t pid = daemons_[node]->engine(device);
      if (pid > 0) send_signal(pid, SIGKILL);
    }
    return "kill -9, " + std::to_string(times) + " times, of engine " + std::to_string(device) + " of node " +
           kNodes[node];
  }
  // The ends of a pair, in quick succession.
  std::string kill_engines_of_all() {
    const auto device = static_cast<std::uint32_t>(below(2));
    for (std::uint32_t node = 0; node < 3; ++node) {
      if (restarts_.contains(node)) continue;
      strike_engine(node, device);
      const pid_t pid = daemons_[node]->engine(device);
      if (pid > 0) send_signal(pid, SIGKILL);
      sleep_ms(static_cast<int>(below(60)));
    }
    return "kill -9 of engines " + std::to_string(device) + " of all nodes";
  }
  std::string kill_daemon() {
    const auto node = static_cast<std::uint32_t>(below(3));
    if (restarts_.contains(node)) return "";
    strike_node(node);
    end_daemon(node, [&] { daemons_[node]->signal(SIGKILL); });
    restart_later(node);
    return std::string("kill -9 of daemon ") + kNodes[node];
  }
  std::string drain() {
    const auto node = static_cast<std::uint32_t>(below(3));
    if (restarts_.contains(node)) return "";
    strike_node(node);
    end_daemon(node, [&] {
      const std::string ms = std::to_string(1 + below(1000));
      EXPECT_EQ(daemons_[node]->epctl({"drain", "--timeout-ms", ms, "--wait"}).exit_code, 0);
    });
    restart_later(node);
    return std::string("drain of ") + kNodes[node];
  }
  void end_daemon(std::uint32_t node, const std::function<void()>& end) {
    continue_stopped(true);
    const std::vector<pid_t> engines = daemons_[node]->engines();
    end();
    EXPECT_NE(daemons_[node]->wait_exit(20), -1) << "daemon " << kNodes[node] << " does not end";
    for (const pid_t engine : engines) {
      EXPECT_TRUE(eventually(5, [&] { return ::waitpid(engine, nullptr, WNOHANG) != 0; }))
          << "engine " << engine << " of a daemon that has ended";
    }
  }
  std::string stop_engine() {
    const auto node = static_cast<std::uint32_t>(below(3));
    const auto device = static_cast<std::uint32_t>(below(2));
    if (restarts_.contains(node)) return "";
    strike_engine(node, device);
    stop_for({daemons_[node]->engine(device)}, some_time());
    return "stop of engine " + std::to_string(device) + " of node " + kNodes[node];
  }
  std::string stop_daemon() {
    const auto node = static_cast<std::uint32_t>(below(3));
    if (restarts_.contains(node)) return "";
    strike_node(node);
    stop_for({daemons_[node]->pid()}, some_time());
    return std::string("stop of daemon ") + kNodes[node];
  }
  std::string stop_node() {
    const auto node = static_cast<std::uint32_t>(below(3));
    if (restarts_.contains(node)) return "";
    strike_node(node);
    std::vector<pid_t> pids = daemons_[node]->all_pids();
    for (std::size_t i = 0; i < kSeats; ++i) {
      if (board_->seats[i].node == node) pids.push_back(processes_[i].pid());
    }
    stop_for(pids, some_time());
    return std::string("stop of all of node ") + kNodes[node];
  }
  std::string evict() {
    const std::size_t i = below(kSeats);
    const std::uint32_t node = board_->seats[i].node;
    if (restarts_.contains(node) || !stops_.empty()) return "";
    struck_.insert(seats_[i].plan);
    std::string text = "eviction of " + name_of(i);
    if (below(2) == 0) {
      daemons_[node]->epctl(
          {"evict", "group", plan_of(i).name, "rank", std::to_string(seats_[i].rank), "--reason", "a test"});
      return text;
    }
    const CommandResult sessions = daemons_[node]->epctl({"sessions", "--json"});
    const Json table = Json::parse(sessions.out, nullptr, false);
    if (!table.contains("sessions")) return text;
    for (const Json& session : table["sessions"]) {
      if (session["pid"] == processes_[i].pid())
        daemons_[node]->epctl(
            {"evict", "session", std::to_string(session["session_id"].get<std::uint64_t>())});
    }
    return text + " by session";
  }

  std::string unplug() {
    const auto node = static_cast<std::uint32_t>(below(3));
    strike_node(node);
    // It puts all others out when it is back.
    if (node == 0) strike_node(1);
    if (node == 0) strike_node(2);
    network_->unplug(node);
    mends_.push_back({now_s() + 2 * some_time(), [this, node] { network_->plug(node); }});
    return std::string("no cable at node ") + kNodes[node];
  }
  // Messages from one to the other go nowhere; the other direction works.
  std::string cut_one_way() {
    const auto from = static_cast<std::uint32_t>(below(3));
    const auto to = static_cast<std::uint32_t>((from + 1 + below(2)) % 3);
    if (from == 0) strike_node(to);  // the coordinator's own node stays
    if (to == 0) strike_node(from);
    for (std::uint32_t device = 0; device < 2; ++device) strike_pair(from, to, device);
    const std::string address = network_->address(to);
    run_at(from, {"ip", "neigh", "replace", address, "lladdr", "02:00:00:00:00:99", "nud", "permanent", "dev",
                  kit::NodeNetwork::kInterface});
    mends_.push_back({now_s() + 2 * some_time(), [this, from, address] {
                        // A cut that overlaps with this one may have ended it.
                        run_at(from, {"ip", "neigh", "flush", "to", address, "dev",
                                      kit::NodeNetwork::kInterface, "nud", "permanent"});
                      }});
    return std::string("one-way cut from node ") + kNodes[from] + " to node " + kNodes[to];
  }
  void strike_pair(std::uint32_t one, std::uint32_t other, std::uint32_t device) {
    std::map<std::size_t, std::set<std::uint32_t>> nodes;
    for (std::size_t i = 0; i < kSeats; ++i) {
      if (plan_of(i).device == device) nodes[seats_[i].plan].insert(board_->seats[i].node);
    }
    for (const auto& [plan, at] : nodes) {
      if (at.contains(one) && at.contains(other)) struck_.insert(plan);
    }
  }
  void run_at(std::uint32_t node, const std::vector<std::string>& words) {
    kit::CommandOptions options;
    options.in_child = [this, node] {
      if (const std::string what = network_->enter(node); !what.empty()) ::_exit(126);
    };
    kit::must_run(words, options);
  }

  std::string one_fault() {
    if (network_ && below(4) == 0) return below(2) == 0 ? unplug() : cut_one_way();
    const std::uint64_t dice = below(100);
    if (dice < 14) return kill_client();
    if (dice < 20) return stop_client();
    if (dice < 32) return kill_engine(1);
    if (dice < 38) return kill_engine(2 + static_cast<int>(below(3)));
    if (dice < 44) return kill_engines_of_all();
    if (dice < 60) return kill_daemon();
    if (dice < 64) return drain();
    if (dice < 72) return stop_engine();
    if (dice < 82) return stop_daemon();
    if (dice < 92) return stop_node();
    return evict();
  }

  void continue_stopped(bool all) {
    std::erase_if(stops_, [&](const auto& stop) {
      if (!all && stop.first > now_s()) return false;
      for (const pid_t pid : stop.second) {
        if (pid > 0) send_signal(pid, SIGCONT);
      }
      return true;
    });
  }
  void mend_links() {
    std::erase_if(mends_, [](const auto& mend) {
      if (mend.first > now_s()) return false;
      mend.second();
      return true;
    });
  }
  void restart_daemons() {
    std::erase_if(restarts_, [&](const auto& restart) {
      if (restart.second > now_s()) return false;
      EXPECT_TRUE(daemons_[restart.first]->start_among_clients());
      return true;
    });
  }
  void let_all_pass() {
    while (!stops_.empty() || !restarts_.empty() || !mends_.empty()) {
      continue_stopped(false);
      mend_links();
      restart_daemons();
      sleep_ms(5);
    }
  }

  std::uint64_t failures_of(std::size_t plan) const {
    std::uint64_t count = 0;
    for (std::size_t i = 0; i < kSeats; ++i) {
      if (seats_[i].plan == plan) count += board_->seats[i].failures;
    }
    return count;
  }

  // A process that was stopped hears late of what others have said meanwhile.
  void let_it_settle(const std::string& after) {
    std::uint64_t failures = all_failures();
    double since = now_s();
    const bool settled = eventually(kBackSeconds, [&] {
      const std::uint64_t now = all_failures();
      if (now != failures) since = now_s();
      failures = now;
      sleep_ms(20);
      return now_s() > since + 1.5;  // a connection to who was cut off ends a second later
    });
    EXPECT_TRUE(settled) << "seed " << seed_ << ", fault " << fault_ << ": no rest after " << after;
    expect_all_back("the rest after " + after);
  }

  std::uint64_t all_failures() const {
    std::uint64_t count = 0;
    for (const Progress& progress : board_->seats) count += progress.failures + progress.generations;
    return count;
  }

  // One, or some on top of each other; the others must not have noticed.
  void strike() {
    struck_.clear();
    struck_engines_.clear();
    std::vector<std::uint64_t> failures;
    for (std::size_t plan = 0; plan < plans_.size(); ++plan) failures.push_back(failures_of(plan));
    std::array<std::array<pid_t, 2>, 3> engines;
    for (std::size_t node = 0; node < 3; ++node) {
      for (std::uint32_t device = 0; device < 2; ++device)
        engines[node][device] = daemons_[node]->engine(device);
    }
    std::string text;
    const std::uint64_t together = below(3) != 0 ? 1 : below(3) != 0 ? 2 + below(2) : 4 + below(5);
    for (std::uint64_t i = 0; i < together; ++i) {
      if (i != 0) sleep_ms(static_cast<int>(below(700)));
      continue_stopped(false);
      mend_links();
      restart_daemons();
      const std::string what = one_fault();
      if (what.empty()) continue;
      ++fault_;
      text += (text.empty() ? "" : ", ") + what;
    }
    if (std::getenv("EPD_TEST_VERBOSE") != nullptr)
      std::printf("%.3f fault %u: %s\n", now_s(), fault_, text.c_str());
    let_all_pass();
    expect_all_back(text);
    if (HasFailure()) return;
    let_it_settle(text);
    for (std::size_t plan = 0; plan < plans_.size(); ++plan) {
      if (struck_.contains(plan)) continue;
      EXPECT_EQ(failures_of(plan), failures[plan]) << plans_[plan].name << " noticed " << text;
    }
    for (std::uint32_t node = 0; node < 3; ++node) {
      for (std::uint32_t device = 0; device < 2; ++device) {
        if (struck_engines_.contains({node, device})) continue;
        EXPECT_EQ(daemons_[node]->engine(device), engines[node][device])
            << "engine " << device << " of node " << kNodes[node] << " is another after " << text;
      }
    }
  }

  // ---- what is held

  using Holdings = std::map<std::string, Census>;
  Holdings take() const {
    Holdings all;
    for (std::size_t node = 0; node < 3; ++node) {
      const std::string name = std::string("node ") + kNodes[node];
      all[name + ", supervisor"] = take_census(daemons_[node]->pid());
      for (std::uint32_t device = 0; device < 2; ++device)
        all[name + ", engine " + std::to_string(device)] = take_census(daemons_[node]->engine(device));
    }
    return all;
  }
  // The holdings that have grown.
  static std::string growth(const Holdings& before, const Holdings& now) {
    std::string text;
    for (const auto& [name, old] : before) {
      const Census& next = now.at(name);
      // gRPC's threads come and go.
      const bool supervisor = name.find("supervisor") != std::string::npos;
      const std::uint64_t more_threads = supervisor ? 7 : 0;
      if (next.fds <= old.fds && next.memfds <= old.memfds && next.memfd_mappings <= old.memfd_mappings &&
          next.threads <= old.threads + more_threads)
        continue;
      text += name + "\n  before: " + old.to_string() + "\n  now:    " + next.to_string() + "\n";
    }
    return text;
  }
  Holdings settled() const {
    Holdings all = take();
    double since = now_s();
    eventually(15, [&] {
      const Holdings next = take();
      if (!growth(all, next).empty() || !growth(next, all).empty()) since = now_s();
      all = next;
      return now_s() - since > 2;
    });
    return all;
  }

  std::string descriptors() const {
    std::string text;
    for (std::uint32_t node = 0; node < 3; ++node) {
      for (const pid_t pid : daemons_[node]->all_pids())
        text += run_command({"ls", "-l", "/proc/" + std::to_string(pid) + "/fd"}).out;
      const std::string pid = std::to_string(daemons_[node]->pid());
      text += run_command({"nsenter", "-t", pid, "-n", "ss", "-tnpe"}).out;
    }
    return text;
  }

  void run_load_for_a_moment(const std::string& what) {
    board_->at_home = true;
    start_load();
    expect_all_back(what);
    stop_load();
    board_->at_home = false;
  }

  void expect_logs_clean() const {
    for (const Daemon* daemon : daemons_) {
      std::istringstream log(daemon->log());
      for (std::string line; std::getline(log, line);) {
        for (const char* bad : {"malformed", "link message refused", "illegal", "defect"}) {
          EXPECT_EQ(line.find(bad), std::string::npos) << line;
        }
      }
    }
  }

  void print_tally() const {
    std::printf("%u faults, seed %llu; slowest return %.1f s\n", fault_,
                static_cast<unsigned long long>(seed_), slowest_);
    for (std::size_t i = 0; i < kSeats; ++i) {
      const Progress& p = board_->seats[i];
      std::printf("  %s rank %u: %llu right to the bit, %llu generations; %s%s%s\n", plan_of(i).name.c_str(),
                  seats_[i].rank, static_cast<unsigned long long>(p.completed),
                  static_cast<unsigned long long>(p.generations),
                  p.operations.to_string("operations:").c_str(), p.joins.to_string("joins:").c_str(),
                  p.attaches.to_string("attaches:").c_str());
    }
  }

  const std::uint64_t seed_;
  std::mt19937_64 random_;
  std::optional<kit::NodeNetwork> network_;
  std::optional<DaemonCluster> cluster_;
  std::array<Daemon*, 3> daemons_{};
  std::vector<Plan> plans_;
  std::vector<Seat> seats_;
  Shared<Board> board_;
  std::array<RankProcess, kSeats> processes_;
  std::vector<std::pair<double, std::vector<pid_t>>> stops_;     // when they go on
  std::vector<std::pair<double, std::function<void()>>> mends_;  // of links, when
  std::map<std::uint32_t, double> restarts_;                     // of daemons, when
  std::set<std::size_t> struck_;                                 // plans that the faults touch
  std::set<std::pair<std::uint32_t, std::uint32_t>> struck_engines_;
  std::uint32_t fault_ = 0;
  double slowest_ = 0;
};

TEST_F(NodesSoak, RandomFaults) {
  const std::uint64_t faults = number_from("EPD_TEST_FAULTS", 5);
  run_load_for_a_moment("the start");
  const Holdings before = settled();
  start_load();
  expect_all_back("the start");
  while (fault_ < faults && !HasFailure()) strike();
  continue_stopped(true);
  if (!HasFailure()) {
    stop_load();
    await_cluster();
    run_load_for_a_moment("all faults");
    Holdings now;
    if (!eventually(20, [&] {
          now = take();
          return growth(before, now).empty();
        }))
      ADD_FAILURE() << growth(before, now) << descriptors();
    for (const Daemon* daemon : daemons_) EXPECT_EQ(daemon->epctl({"status"}).exit_code, 0);
    expect_logs_clean();
  }
  print_tally();
  if (HasFailure()) keep_logs();
}

}  // namespace
}  // namespace epd::test
