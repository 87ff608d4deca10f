// kill -9 of the supervisor at every step of a session's life, and a new one on the same sockets in the same
// instant: faster than anybody can notice by a clock. Clients hear DAEMON_LOST, whatever they were doing;
// nobody gets a success that the old daemon did not give, nor any service for an old session by the new one;
// they attach again at once, to another boot id; and nothing of the old run is left.
#include "fault.h"
#include "support/engine_pages.h"
#include "support/kill_points.h"
#include "support/raw_client.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <algorithm>
#include <array>
#include <cstdlib>
#include <functional>
#include <memory>
#include <random>
#include <set>

namespace epd::test {
namespace {

constexpr int kHangMs = 30000;

struct Stage {
  Gate reached;    // clients that are where the supervisor had to take them
  Gate frozen;     // it is stopped now
  Gate asking;     // clients that ask it something, which it does not read
  Gate respawned;  // it is dead, and another one is on its way
  Gate go;
  Gate finished;
};

std::string boot_id(const Session& session) {
  epd_session_info_t info;
  epd_session_info_init(&info);
  must(epd_session_info(session.get(), &info), "info");
  return info.boot_id;
}

// As soon as somebody listens: between two daemons nobody does.
Session attach_again(const Daemon& daemon, const std::string& device) {
  epd_attach_options_t options;
  epd_attach_options_init(&options);
  options.socket_path = daemon.socket().c_str();
  options.device = device.c_str();
  options.timeout_ms = kHangMs;
  epd_session_t* session = nullptr;
  epd_status_t status = EPD_DAEMON_LOST;
  RANK_CHECK(
      eventually(20, [&] { return (status = epd_session_attach(&options, &session)) != EPD_DAEMON_LOST; }),
      epd_last_error());
  must(status, "attach again");
  return Session(session);
}

// A session of the old daemon's, and maybe a group: whatever one does with it, it is gone.
void must_be_gone(const Session& session, const Group* group) {
  must(epd_session_check(session.get()), "check", EPD_DAEMON_LOST);
  const epd_group_config_t config = small_config("gone", 0, 1);
  epd_group_t* other = nullptr;
  must(epd_group_join(session.get(), &config, &other), "join", EPD_DAEMON_LOST);
  if (group == nullptr) return;
  epd_dispatch_args_t args;
  epd_dispatch_args_init(&args);
  args.slot = 1;
  epd_ticket_t ticket = 0;
  must(epd_dispatch(group->get(), &args, EPD_NO_STREAM, &ticket, nullptr), "dispatch", EPD_DAEMON_LOST);
  must(epd_group_resume(group->get(), 2000, nullptr), "resume", EPD_DAEMON_LOST);
  static_cast<std::uint32_t*>(group->buffers(0).x)[0] = 1;  // the memory is still there
}

// The possessions of a client when the supervisor dies.
struct Client {
  Client(const Daemon& its_daemon, Stage& its_stage, std::string its_name, std::uint32_t its_rank)
      : daemon(its_daemon),
        stage(its_stage),
        name(std::move(its_name)),
        rank(its_rank),
        device(its_daemon.device(its_rank)) {}

  void attach() {
    session = Session(daemon.socket(), device);
    old_boot_id = boot_id(session);
  }
  void join(std::uint32_t num_ranks) {
    const Case c = fault_case(num_ranks, 2);
    group = Group(session, c.config(name.c_str(), rank));
    joined = true;
  }
  epd_ticket_t submit(std::uint32_t timeout_ms = kHangMs) const {
    epd_dispatch_args_t args;
    epd_dispatch_args_init(&args);
    args.timeout_ms = timeout_ms;
    epd_ticket_t ticket = 0;
    must(group.dispatch(&args, &ticket, nullptr), "dispatch");
    return ticket;
  }
  void freeze() {
    stage.reached.arrive();
    stage.frozen.wait_for(1);
    stage.asking.arrive();
  }

  const Daemon& daemon;
  Stage& stage;
  const std::string name;
  const std::uint32_t rank;
  const std::string device;
  Session session;
  Group group;
  std::string old_boot_id;
  bool joined = false;
};

struct Step {
  const char* name;
  std::uint32_t ranks;  // processes, on one device each
  bool asks;            // the supervisor is frozen before the first rank's last act
  std::function<void(Client&)> act;
};

// The second rank of a pair does nothing: the first waits for it.
bool only_joins(Client& client) {
  if (client.rank == 0) return false;
  client.stage.reached.arrive();
  RANK_CHECK(eventually(30, [&] { return epd_session_check(client.session.get()) != EPD_OK; }), "check");
  return true;
}

const std::vector<Step>& steps() {
  static const std::vector<Step> all = {
      {"connected", 1, false,
       [](Client& client) {
         const RawClient raw(client.daemon.socket());
         client.stage.reached.arrive();
         RANK_CHECK(raw.closed_within(30), "the connection outlives its daemon");
       }},
      {"Hello sent, not read", 1, true,
       [](Client& client) {
         client.freeze();
         epd_attach_options_t options;
         epd_attach_options_init(&options);
         options.socket_path = client.daemon.socket().c_str();
         options.timeout_ms = kHangMs;
         epd_session_t* session = nullptr;
         must(epd_session_attach(&options, &session), "attach", EPD_DAEMON_LOST);
       }},
      {"welcomed", 1, false,
       [](Client& client) {
         client.attach();
         client.stage.reached.arrive();
         RANK_CHECK(eventually(30, [&] { return epd_session_check(client.session.get()) != EPD_OK; }),
                    "check");
       }},
      {"joining", 1, false,
       [](Client& client) {
         client.attach();
         client.stage.reached.arrive();
         epd_group_config_t config = small_config(client.name.c_str(), 0, 2);
         config.timeout_ms = kHangMs;
         epd_group_t* group = nullptr;
         must(epd_group_join(client.session.get(), &config, &group), "join", EPD_DAEMON_LOST);
       }},
      {"Join sent, not read", 1, true,
       [](Client& client) {
         client.attach();
         client.freeze();
         epd_group_config_t config = small_config(client.name.c_str(), 0, 1);
         config.timeout_ms = kHangMs;
         epd_group_t* group = nullptr;
         must(epd_group_join(client.session.get(), &config, &group), "join", EPD_DAEMON_LOST);
       }},
      {"joined", 1, false,
       [](Client& client) {
         client.attach();
         client.join(1);
         client.stage.reached.arrive();
         client.stage.respawned.wait_for(1);
       }},
      {"operation in flight, nobody looks", 2, false,
       [](Client& client) {
         client.attach();
         client.join(2);
         if (only_joins(client)) return;
         const epd_ticket_t ticket = client.submit();
         client.stage.reached.arrive();
         client.stage.respawned.wait_for(1);
         epd_status_t status = EPD_WOULD_BLOCK;
         eventually(20, [&] {
           status = epd_ticket_poll(client.group.get(), ticket, nullptr);
           return status != EPD_WOULD_BLOCK;
         });
         must(status, "poll", EPD_DAEMON_LOST);
       }},
      {"waiting", 2, false,
       [](Client& client) {
         client.attach();
         client.join(2);
         if (only_joins(client)) return;
         const epd_ticket_t ticket = client.submit();
         client.stage.reached.arrive();
         must(client.group.wait(ticket, kHangMs), "wait", EPD_DAEMON_LOST);
       }},
      {"operation failed, its verdict not given", 2, true,
       [](Client& client) {
         client.attach();
         client.join(2);
         if (only_joins(client)) return;
         client.freeze();
         must(client.group.wait(client.submit(5), kHangMs), "wait", EPD_DAEMON_LOST);
       }},
      {"Leave sent, not read", 1, true,
       [](Client& client) {
         client.attach();
         client.join(1);
         client.freeze();
         client.joined = false;
         client.group = Group();
       }},
      {"detaching", 1, true,
       [](Client& client) {
         client.attach();
         client.join(1);
         client.freeze();
         client.joined = false;
         client.group = Group();
         client.session = Session();
       }},
  };
  return all;
}

// The step, its end, and life with the next daemon.
std::string play(const Step& step, Client& client) {
  note(step.name);
  step.act(client);
  client.stage.respawned.wait_for(1);
  const bool attached = client.session.get() != nullptr;
  if (attached) must_be_gone(client.session, client.joined ? &client.group : nullptr);
  note(std::string(step.name) + ": again");
  const Session session = attach_again(client.daemon, client.device);
  RANK_CHECK(boot_id(session) != client.old_boot_id, "the new daemon has the old one's boot id");
  const Case c = fault_case(step.ranks, 2);
  {
    const Group group(session, c.config(client.name.c_str(), client.rank));
    ScriptOptions options;
    options.rounds = 2;
    ScriptRunner(group, c, client.rank, options).run();
  }
  if (attached) must_be_gone(client.session, client.joined ? &client.group : nullptr);
  return "";
}

class SupervisorKillPoints : public testing::Test {
 protected:
  void start(std::uint32_t devices) {
    DaemonOptions options;
    options.devices = devices;
    options.settings = patient_settings();
    daemon_ = std::make_unique<Daemon>(options);
    ASSERT_TRUE(daemon_->start());
  }
  void TearDown() override {
    if (daemon_->running()) daemon_->stop();
  }

  void remember_this_run() {
    for (const pid_t engine : daemon_->engines()) old_engines_.insert(engine);
    memfds_.merge(memfds_of(daemon_->pid()));
  }

  void expect_nothing_left() {
    for (const pid_t engine : old_engines_)
      EXPECT_TRUE(eventually(5, [&] { return !is_running(engine); })) << "engine " << engine << " is left";
    const std::vector<pid_t> holders = holders_of(memfds_);
    EXPECT_TRUE(holders.empty()) << "process " << holders[0] << " and " << holders.size() - 1
                                 << " others hold memory of a dead daemon's";
  }

  std::unique_ptr<Daemon> daemon_;
  std::set<pid_t> old_engines_;
  std::set<ino_t> memfds_;
};

TEST_F(SupervisorKillPoints, EveryStepAtOnceThreeTimes) {
  start(2);
  for (int turn = 0; turn < 3 && !HasFailure(); ++turn) {
    SCOPED_TRACE("turn " + std::to_string(turn));
    Shared<Stage> stage;
    std::vector<RankProcess> clients;
    std::vector<std::string> names;
    std::vector<std::size_t> asking;
    for (std::size_t i = 0; i < steps().size(); ++i) {
      const Step& step = steps()[i];
      if (step.asks) asking.push_back(clients.size());  // its first rank
      for (std::uint32_t rank = 0; rank < step.ranks; ++rank) {
        names.emplace_back(step.name);
        clients.emplace_back([&, i, rank]() -> std::string {
          Client client(*daemon_, *stage, "step-" + std::to_string(i), rank);
          return play(steps()[i], client);
        });
      }
    }
    EXPECT_TRUE(eventually(30, [&] { return stage->reached.count == clients.size(); }));
    sleep_ms(20);  // the last act of some is a call that does not return
    ASSERT_TRUE(stop_process(daemon_->pid()));
    stage->frozen.open();
    EXPECT_TRUE(eventually(30, [&] { return stage->asking.count == asking.size(); }));
    // From there on they sleep only to wait for an answer.
    const auto waits = [&](std::size_t i) { return process_state(clients[i].pid()) == 'S'; };
    EXPECT_TRUE(eventually(30, [&] { return std::all_of(asking.begin(), asking.end(), waits); }));
    sleep_ms(100);  // the deadline of 5 ms is over
    remember_this_run();
    ASSERT_TRUE(daemon_->kill_and_respawn());
    stage->respawned.open();
    EXPECT_TRUE(daemon_->wait_ready());
    for (std::size_t i = 0; i < clients.size(); ++i) {
      const RankOutcome outcome = clients[i].wait(HasFailure() ? 2 : 60);
      EXPECT_TRUE(outcome.ok) << names[i] << ": " << outcome.to_string();
    }
    expect_nothing_left();
  }
}

// One session from attach to detach; each call is served, or finds its daemon gone, and then all later ones
// do.
std::string life(const Daemon& daemon, Stage& stage) {
  stage.go.wait_for(1);
  bool gone = false;
  const auto served = [&](epd_status_t status, const char* what) {
    RANK_CHECK(status == EPD_DAEMON_LOST || (status == EPD_OK && !gone),
               std::string(what) + " gave " + epd_status_name(status) + ": " + epd_last_error());
    gone = status == EPD_DAEMON_LOST;
    return !gone;
  };
  epd_attach_options_t options;
  epd_attach_options_init(&options);
  options.socket_path = daemon.socket().c_str();
  options.timeout_ms = kHangMs;
  epd_session_t* attached = nullptr;
  if (served(epd_session_attach(&options, &attached), "attach")) {
    const Session session(attached);
    const epd_group_config_t config = small_config("life", 0, 1);
    epd_group_t* joined = nullptr;
    if (served(epd_group_join(session.get(), &config, &joined), "join")) {
      const Group group(joined);
      epd_dispatch_args_t args;
      epd_dispatch_args_init(&args);
      epd_ticket_t ticket = 0;
      epd_status_t status = group.dispatch(&args, &ticket, nullptr);
      if (status == EPD_OK) status = group.wait(ticket, kHangMs);
      served(status, "dispatch");
    }
  }
  stage.finished.arrive();
  return "";
}

// Every system call of the supervisor's loop while it serves that life; of the many, EPD_TEST_SEED chooses a
// dozen, EPD_EVERY_STEP=1 takes all.
TEST_F(SupervisorKillPoints, ItsOwnStepsWhileItServesALife) {
  start(1);
  const char* seed = std::getenv("EPD_TEST_SEED");
  std::mt19937_64 random(seed == nullptr ? 1 : std::strtoull(seed, nullptr, 10));
  const bool every = std::getenv("EPD_EVERY_STEP") != nullptr;
  int points = 0;
  for (int n = 0; !HasFailure(); n += every ? 1 : 1 + static_cast<int>(random() % 16), ++points) {
    Shared<Stage> stage;
    RankProcess client([&] { return life(*daemon_, *stage); });
    remember_this_run();
    sleep_ms(5);  // it sees off the client that asked whether it is ready
    const std::optional<std::string> point = kill_unasked(daemon_->pid(), n, [&] {
      stage->go.open();  // it is traced by now
      return stage->finished.count > 0;
    });
    SCOPED_TRACE("stop " + std::to_string(n) + ": " + point.value_or("none"));
    if (point) {
      ASSERT_TRUE(daemon_->kill_and_respawn());
    }
    stage->go.open();  // if something else kept it busy
    const RankOutcome outcome = client.wait(60);
    EXPECT_TRUE(outcome.ok) << outcome.to_string();
    if (!point) break;
    std::printf("stop %3d, %s\n", n, point->c_str());
    EXPECT_TRUE(daemon_->wait_ready());
  }
  EXPECT_GT(points, 3);
  // The run that got through is still there; what is left of the others would be too.
  const std::set<ino_t> present = memfds_of(daemon_->pid());
  std::erase_if(memfds_, [&](ino_t inode) { return present.contains(inode); });
  for (const pid_t engine : daemon_->engines()) old_engines_.erase(engine);
  expect_nothing_left();
}

}  // namespace
}  // namespace epd::test
