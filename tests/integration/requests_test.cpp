// A join that waits beside other calls of its session, and children that are forked meanwhile.
#include "epd/epd.hpp"

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
    auto lonely = join_aside(session, with_timeout("lonely", 0, 2, 4'000));
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

// ---- forked children -------------------------------------------------------------------------------

// Static objects of a careless program: destroyed by exit(), also in the child.
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
      // The parent has a thread of the library, an operation in flight, and a handle that it uses.
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
