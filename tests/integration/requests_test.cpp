// What several threads of one session ask of the real daemon at once, and children that are forked meanwhile.
#include "epd/epd.hpp"

#include "proto/attach.h"
#include "support/client.h"
#include "support/daemon.h"
#include "support/ranks.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>
#include <cstdlib>
#include <future>
#include <optional>
#include <string>
#include <thread>
#include <vector>

namespace epd::test {
namespace {

class Requests : public testing::Test {
 protected:
  void SetUp() override { ASSERT_TRUE(daemon_.start()); }
  void TearDown() override { daemon_.stop(); }

  static DaemonOptions two_devices() {
    DaemonOptions options;
    options.devices = 2;
    return options;
  }
  Session attach(std::uint32_t rank) const { return Session(daemon_.socket(), daemon_.device(rank)); }
  // One process for each rank.
  static void run(std::uint32_t ranks, const std::function<void(std::uint32_t)>& body) {
    expect_all_ok(run_ranks(ranks, 60, [&](std::uint32_t rank) -> std::string {
      body(rank);
      return "";
    }));
  }

  Daemon daemon_{two_devices()};
};

struct Answer {
  epd_status_t status = EPD_OK;
  std::string text;
  Group group;
};

std::future<Answer> join_aside(const Session& session, epd_group_config_t config) {
  return std::async(std::launch::async, [&session, config] {
    epd_group_t* group = nullptr;
    Answer answer;
    answer.status = epd_group_join(session.get(), &config, &group);
    if (answer.status != EPD_OK) answer.text = epd_last_error();
    answer.group = Group(group);
    return answer;
  });
}

epd_group_config_t with_timeout(const char* name, std::uint32_t rank, std::uint32_t ranks, int timeout_ms) {
  epd_group_config_t config = small_config(name, rank, ranks);
  config.timeout_ms = timeout_ms;
  return config;
}

void operate(const Group& group, const char* what) {
  epd_dispatch_args_t args;
  epd_dispatch_args_init(&args);
  epd_ticket_t ticket = 0;
  must(epd_dispatch(group.get(), &args, EPD_NO_STREAM, &ticket, nullptr), what);
  must(epd_ticket_wait(group.get(), ticket, 30'000, nullptr), what);
}

// Until the session's join waits in the daemon: `name` is a group that forms.
void await_forming(const Daemon& daemon, const std::string& name) {
  RANK_CHECK(
      eventually(20,
                 [&] {
                   return daemon.epctl({"--json", "groups"}).out.find('"' + name + '"') != std::string::npos;
                 }),
      name);
}

TEST_F(Requests, AJoinThatRunsOutCostsNoOtherCallOfTheSession) {
  run(1, [&](std::uint32_t) {
    const Session session = attach(0);
    const Group working(session, small_config("working", 0, 1));
    auto lonely = join_aside(session, with_timeout("lonely", 0, 2, 8'000));
    await_forming(daemon_, "lonely");
    // Shorter than the other's, by more than the margin that the library has for answers.
    const Group solo(session, with_timeout("solo", 0, 1, 1'000));
    RANK_CHECK(lonely.wait_for(std::chrono::seconds(0)) == std::future_status::timeout,
               "it waited for nobody");
    operate(solo, "the group that came meanwhile");
    const Answer answer = lonely.get();
    RANK_CHECK(answer.status == EPD_DEADLINE_EXCEEDED, answer.text);
    RANK_CHECK(answer.text.find("missing: 1") != std::string::npos, answer.text);
    must(epd_session_check(session.get()), "the session afterwards");
    operate(working, "the group that was there");
  });
}

TEST_F(Requests, RanksMayJoinTheirGroupsInAnyOrder) {
  run(2, [&](std::uint32_t rank) {
    const Session session = attach(rank);
    const char* const first = rank == 0 ? "g1" : "g2";
    const char* const second = rank == 0 ? "g2" : "g1";
    if (rank == 0) {  // two threads
      auto one = join_aside(session, small_config(first, rank, 2));
      await_forming(daemon_, first);
      auto two = join_aside(session, small_config(second, rank, 2));
      for (auto* each : {&one, &two}) {
        const Answer answer = each->get();
        RANK_CHECK(answer.status == EPD_OK, answer.text);
        operate(answer.group, "a group");
      }
    } else {  // one after the other
      const Group two(session, small_config(first, rank, 2));
      const Group one(session, small_config(second, rank, 2));
      operate(one, "g1");
      operate(two, "g2");
    }
  });
}

// The peer joins the second group only after it has seen the first left.
TEST_F(Requests, LeavingWaitsForNoJoin) {
  run(2, [&](std::uint32_t rank) {
    const Session session = attach(rank);
    std::optional<Group> first(std::in_place, session, small_config("first", rank, 2));
    if (rank == 0) {
      auto second = join_aside(session, small_config("second", rank, 2));
      await_forming(daemon_, "second");
      first.reset();
      const Answer answer = second.get();
      RANK_CHECK(answer.status == EPD_OK, answer.text);
    } else {
      epd_dispatch_args_t args;
      epd_dispatch_args_init(&args);
      epd_ticket_t ticket = 0;
      epd_status_t status = epd_dispatch(first->get(), &args, EPD_NO_STREAM, &ticket, nullptr);
      if (status == EPD_OK) status = epd_ticket_wait(first->get(), ticket, 20'000, nullptr);
      must(status, "the operation that the peer left", EPD_RANK_LOST);
      must_say("left");
      const Group second(session, small_config("second", rank, 2));
    }
  });
}

TEST_F(Requests, ARankAskedForTwiceIsRefusedAndTheFirstJoinStands) {
  run(1, [&](std::uint32_t) {
    const Session session = attach(0);
    auto first = join_aside(session, small_config("twice", 0, 2));
    await_forming(daemon_, "twice");
    const Answer again = join_aside(session, small_config("twice", 0, 2)).get();
    RANK_CHECK(again.status == EPD_INVALID_ARGUMENT, again.text);
    RANK_CHECK(again.text.find("rank 0 of group \"twice\" is taken") != std::string::npos, again.text);
    // Both ranks of a group may be of one session.
    const Answer second = join_aside(session, small_config("twice", 1, 2)).get();
    RANK_CHECK(second.status == EPD_OK, second.text);
    const Answer joined = first.get();
    RANK_CHECK(joined.status == EPD_OK, joined.text);
    auto peer = std::async(std::launch::async, [&] { operate(second.group, "rank 1"); });
    operate(joined.group, "rank 0");
    peer.get();
  });
}

TEST_F(Requests, JoinsTooManyAtOnceAreRefusedOneByOne) {
  run(1, [&](std::uint32_t) {
    const Session session = attach(0);
    const Group working(session, small_config("working", 0, 1));
    constexpr std::size_t kTooMany = 3;
    std::vector<std::string> names;
    for (std::size_t i = 0; i < abi::kMaxPendingRequests + kTooMany; ++i)
      names.push_back("many-" + std::to_string(i));
    std::vector<std::future<Answer>> joins;
    for (const std::string& name : names)
      joins.push_back(join_aside(session, with_timeout(name.c_str(), 0, 2, 6'000)));
    std::size_t refused = 0;
    for (auto& join : joins) {
      const Answer answer = join.get();
      if (answer.status == EPD_RESOURCE_EXHAUSTED) {
        ++refused;
        RANK_CHECK(answer.text.find("requests without a reply") != std::string::npos, answer.text);
      } else {
        RANK_CHECK(answer.status == EPD_DEADLINE_EXCEEDED, answer.text);
      }
    }
    RANK_CHECK(refused == kTooMany, std::to_string(refused) + " were refused");
    operate(working, "the group that was there");
  });
}

TEST_F(Requests, ASessionThatDiesLeavesNothingOfWhatItWaitedFor) {
  RankProcess dying([&]() -> std::string {
    const Session session = attach(0);
    auto one = join_aside(session, small_config("one", 0, 2));
    auto two = join_aside(session, small_config("two", 0, 2));
    return one.get().text + two.get().text;
  });
  ASSERT_TRUE(eventually(20, [&] {
    const std::string groups = daemon_.epctl({"--json", "groups"}).out;
    return groups.find("\"one\"") != std::string::npos && groups.find("\"two\"") != std::string::npos;
  }));
  dying.kill(SIGKILL);
  (void)dying.wait(10);
  EXPECT_TRUE(eventually(20, [&] {
    const std::string groups = daemon_.epctl({"--json", "groups"}).out;
    return groups.find("\"one\"") == std::string::npos && groups.find("\"two\"") == std::string::npos;
  }));
}

// ---- forked children -------------------------------------------------------------------------------

// Of the program's, as a careless one has them: destroyed by exit(), also in the child.
struct Statics {
  std::optional<epd::Session> session;
  std::optional<epd::Group> group;
  std::optional<epd::Dispatch> dispatch;
};
Statics& statics() {
  static Statics all;
  return all;
}

void fork_a_child_that_exits() {
  const pid_t child = ::fork();
  if (child == 0) std::exit(0);
  int status = 0;
  RANK_CHECK(eventually(20, [&] { return ::waitpid(child, &status, WNOHANG) == child; }), "the child hangs");
  RANK_CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the child's end is " + std::to_string(status));
}

TEST_F(Requests, AForkedChildThatExitsTakesNoRankAlong) {
  run(2, [&](std::uint32_t rank) {
    epd::AttachOptions options;
    options.socket_path = daemon_.socket();
    options.device = daemon_.device(rank);
    Statics& all = statics();
    all.session.emplace(options);
    epd::Config config;
    config.name = "forking";
    config.rank = static_cast<std::int32_t>(rank);
    config.num_ranks = 2;
    config.num_experts = 4;
    config.max_tokens = 8;
    config.hidden = 128;
    config.topk = 2;
    config.num_handles = 1;
    config.timeout_ms = 20'000;
    all.group = all.session->join(config);
    epd::DispatchOptions keep;
    keep.keep_handle = true;
    if (rank == 0) {
      // With a thread of the library, an operation in flight, and a handle that it uses.
      std::promise<void> ran;
      all.group->noop(1, EPD_NO_STREAM).on_complete([&ran](const epd_result_t&) { ran.set_value(); });
      ran.get_future().wait();
      all.dispatch = all.group->dispatch(0, 0, EPD_NO_STREAM, keep);
      fork_a_child_that_exits();
    } else {
      all.dispatch = all.group->dispatch(0, 0, EPD_NO_STREAM, keep);
    }
    all.dispatch->ticket.wait(30'000);
    all.group->combine(0, all.dispatch->handle, EPD_NO_STREAM).wait(30'000);
    all.dispatch.reset();
    all.group.reset();
    all.session.reset();
  });
}

}  // namespace
}  // namespace epd::test
