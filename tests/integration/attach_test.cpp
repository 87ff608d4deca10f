// Attaching and joining through the real daemon: who is let in, who is refused, and with which words.
#include "common/fd.h"
#include "support/client.h"
#include "support/daemon.h"
#include "support/ranks.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>
#include <algorithm>
#include <cstdlib>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

namespace epd::test {
namespace {

using Json = nlohmann::json;

// Runs a body in a process of its own, so that the test's process keeps no thread of the library.
void in_process(const std::function<void()>& body, double seconds = 60) {
  expect_all_ok(run_ranks(1, seconds, [&](std::uint32_t) -> std::string {
    body();
    return "";
  }));
}

epd_status_t try_attach(const std::string& socket, const char* device, epd_session_t** session) {
  epd_attach_options_t options;
  epd_attach_options_init(&options);
  options.socket_path = socket.c_str();
  options.device = device;
  return epd_session_attach(&options, session);
}

void refused_attach(const std::string& socket, const char* device, epd_status_t wanted,
                    const std::vector<std::string>& words) {
  epd_session_t* session = nullptr;
  must(try_attach(socket, device, &session), "attach", wanted);
  RANK_CHECK(session == nullptr, "no handle after a refusal");
  for (const std::string& word : words) must_say(word);
}

void refused_join(const Session& session, const epd_group_config_t& config, epd_status_t wanted,
                  const std::vector<std::string>& words) {
  epd_group_t* group = nullptr;
  must(epd_group_join(session.get(), &config, &group), "join", wanted);
  RANK_CHECK(group == nullptr, "no handle after a refusal");
  for (const std::string& word : words) must_say(word);
}

bool group_is_forming(const Daemon& daemon, const std::string& name) {
  const std::string groups = daemon.epctl({"--json", "groups"}).out;
  return groups.find('"' + name + '"') != std::string::npos && groups.find("forming") != std::string::npos;
}

void start(std::unique_ptr<Daemon>& daemon, std::vector<std::pair<std::string, std::string>> settings = {},
           std::uint32_t devices = 2) {
  DaemonOptions options;
  options.devices = devices;
  options.settings = std::move(settings);
  daemon = std::make_unique<Daemon>(std::move(options));
  ASSERT_TRUE(daemon->start());
}

TEST(Attaching, NobodyListensIsDaemonLostAndNamesTheSocket) {
  in_process([] {
    refused_attach("/tmp/epd-test-nobody.sock", nullptr, EPD_DAEMON_LOST, {"/tmp/epd-test-nobody.sock"});
  });
}

TEST(Attaching, InfoTellsWhereWeAre) {
  std::unique_ptr<Daemon> daemon;
  start(daemon);
  in_process([&] {
    ::setenv("EPD_SOCKET", daemon->socket().c_str(), 1);
    epd_session_t* first = nullptr;
    epd_session_t* second = nullptr;
    must(epd_session_attach(nullptr, &first), "attach by $EPD_SOCKET");
    must(epd_session_attach(nullptr, &second), "attach again");
    epd_session_info_t one;
    epd_session_info_init(&one);
    epd_session_info_t two;
    epd_session_info_init(&two);
    must(epd_session_info(first, &one), "info");
    must(epd_session_info(second, &two), "info");
    RANK_CHECK(one.session_id != two.session_id, "ids differ");
    RANK_CHECK(std::string(one.boot_id) == two.boot_id && std::string(one.boot_id).size() == 32, "boot id");
    RANK_CHECK(std::string(one.device) != two.device, "the least used device is chosen");
    must(epd_session_check(first), "check");
    epd_session_detach(first);
    epd_session_detach(second);
    epd_session_detach(nullptr);
  });
  daemon->stop();
}

std::string device_of(const std::string& socket, const char* device, std::vector<epd_session_t*>& sessions) {
  epd_session_t* session = nullptr;
  must(try_attach(socket, device, &session), "attach");
  sessions.push_back(session);
  epd_session_info_t info;
  epd_session_info_init(&info);
  must(epd_session_info(session, &info), "info");
  return info.device;
}

// A container of a node often has some of its GPUs. The daemon, which serves all of them, chose one of the
// others.
TEST(Attaching, AClientThatNamesNoDeviceGotAGpuThatItDoesNotSee) {
  if (!can_use_devices("cuda")) GTEST_SKIP() << "no CUDA driver to be opened here";
  DaemonOptions options;
  use_devices(options, "cuda");
  if (options.devices < 4) GTEST_SKIP() << "needs four GPUs";
  Daemon daemon(options);
  ASSERT_TRUE(daemon.start());
  const Json devices = Json::parse(daemon.epctl({"--json", "devices"}).out)["devices"];
  const std::string third = devices[2]["cuda"]["uuid"];
  in_process([&] {
    ::setenv("CUDA_VISIBLE_DEVICES", "3,2", 1);
    const std::string socket = daemon.socket();
    std::vector<epd_session_t*> sessions;
    const std::string one = device_of(socket, nullptr, sessions);
    const std::string other = device_of(socket, nullptr, sessions);
    RANK_CHECK((std::set{one, other} == std::set<std::string>{"cuda:2", "cuda:3"}), one + " and " + other);
    RANK_CHECK(device_of(socket, third.c_str(), sessions) == "cuda:2", "a GPU by its UUID");
    refused_attach(socket, "cuda:0", EPD_INVALID_ARGUMENT, {"cuda:0 is GPU-", "does not see"});
    const char* unknown = "GPU-5a5a5a5a-5a5a-5a5a-5a5a-5a5a5a5a5a5a";
    refused_attach(socket, unknown, EPD_NOT_FOUND, {unknown, "cuda:2 (" + third + ")"});
    for (epd_session_t* session : sessions) epd_session_detach(session);
  });
  // The first choice ended in an orderly way.
  EXPECT_EQ(daemon.epctl({"events", "--level", "warning"}).out.find("died"), std::string::npos);
  daemon.stop();
}

TEST(Attaching, SessionsOverTheLimitAreRefusedUntilOneLeaves) {
  std::unique_ptr<Daemon> daemon;
  start(daemon, {{"limits.max_sessions", "3"}});
  in_process([&] {
    {
      const Session a(daemon->socket(), "host:0");
      const Session b(daemon->socket(), "host:0");
      const Session c(daemon->socket(), "host:1");
      refused_attach(daemon->socket(), "host:0", EPD_RESOURCE_EXHAUSTED, {"max_sessions", "3"});
      must(epd_session_check(a.get()), "the others are not hurt");
    }
    epd_session_t* session = nullptr;
    RANK_CHECK(eventually(5, [&] { return try_attach(daemon->socket(), "host:0", &session) == EPD_OK; }),
               "room again: " + std::string(epd_last_error()));
    epd_session_detach(session);
  });
  daemon->stop();
}

// ---- joining -----------------------------------------------------------------------------------

TEST(Join, AMismatchNamesTheFieldAndBothValues) {
  struct Mismatch {
    const char* field;
    std::vector<std::string> values;
    std::function<void(epd_group_config_t&)> change;
  };
  const std::vector<Mismatch> mismatches = {
      {"num_ranks",
       {"2", "4"},
       [](auto& c) {
         c.num_ranks = 4;
         c.num_experts = 4;
       }},
      {"num_experts", {"4", "8"}, [](auto& c) { c.num_experts = 8; }},
      {"max_tokens", {"16", "17"}, [](auto& c) { c.max_tokens = 17; }},
      {"hidden", {"128", "256"}, [](auto& c) { c.hidden = 256; }},
      {"topk", {"2", "3"}, [](auto& c) { c.topk = 3; }},
      {"depth", {"2", "5"}, [](auto& c) { c.depth = 5; }},
      {"payload", {}, [](auto& c) { c.payload = EPD_PAYLOAD_FP8_CAST; }},
      {"index_type", {}, [](auto& c) { c.index_type = EPD_INDEX_TYPE_INT64; }},
  };
  std::unique_ptr<Daemon> daemon;
  start(daemon);
  expect_all_ok(run_ranks(2, 60, [&](std::uint32_t rank) -> std::string {
    const Session session(daemon->socket(), daemon->device(rank));
    const epd_group_config_t good = small_config("mismatch", rank, 2);
    if (rank == 0) {
      const Group group(session, good);  // waits for rank 1
      return "";
    }
    // Ours would be the first otherwise, and rank 0 the one that differs.
    RANK_CHECK(eventually(10, [&] { return group_is_forming(*daemon, "mismatch"); }), "rank 0 waits");
    for (const Mismatch& mismatch : mismatches) {
      note(mismatch.field);
      epd_group_config_t bad = good;
      mismatch.change(bad);
      bad.timeout_ms = 100;
      refused_join(session, bad, EPD_INVALID_ARGUMENT, {mismatch.field});
      for (const std::string& value : mismatch.values) must_say(value);
    }
    const Group group(session, good);
    return "";
  }));
  daemon->stop();
}

TEST(Join, TheDeadlineNamesTheMissingRanks) {
  std::unique_ptr<Daemon> daemon;
  start(daemon);
  expect_all_ok(run_ranks(2, 30, [&](std::uint32_t rank) -> std::string {
    const Session session(daemon->socket(), daemon->device(rank));
    epd_group_config_t config = small_config("missing", rank * 2, 5);  // 0 and 2 come; 1, 3, 4 don't
    config.timeout_ms = 700;
    epd_group_t* group = nullptr;
    must(epd_group_join(session.get(), &config, &group), "join", EPD_DEADLINE_EXCEEDED);
    for (const char* missing : {"1", "3", "4"}) must_say(missing);
    must(epd_session_check(session.get()), "the session lives on");
    const std::string alone = "alone-" + std::to_string(rank);
    const Group other(session, small_config(alone.c_str(), 0, 1));
    return "";
  }));
  daemon->stop();
}

TEST(Join, ARankIsTakenOnceAndFreeOnesAreGivenOut) {
  std::unique_ptr<Daemon> daemon;
  start(daemon);
  in_process([&] {
    const Session session(daemon->socket(), "host:0");
    const Group group(session, small_config("single", 0, 1));
    refused_join(session, small_config("single", 0, 1), EPD_INVALID_ARGUMENT, {"single", "rank 0", "taken"});
  });
  const auto outcomes = run_ranks(3, 30, [&](std::uint32_t i) -> std::string {
    const Session session(daemon->socket(), daemon->device(i));
    epd_group_config_t config = small_config("any", 0, 3);
    config.rank = -1;
    const Group group(session, config);
    return std::to_string(epd_group_rank(group.get()));
  });
  expect_all_ok(outcomes);
  std::vector<std::string> ranks;
  ranks.reserve(outcomes.size());
  for (const RankOutcome& outcome : outcomes) ranks.push_back(outcome.text);
  std::sort(ranks.begin(), ranks.end());
  EXPECT_EQ(ranks, (std::vector<std::string>{"0", "1", "2"}));
  daemon->stop();
}

TEST(Join, ValuesOutOfRangeAreRefusedByNameAndValue) {
  std::unique_ptr<Daemon> daemon;
  start(daemon);
  in_process([&] {
    const Session session(daemon->socket(), "host:0");
    const epd_group_config_t good = small_config("range", 0, 1);
    const auto bad = [&](const std::function<void(epd_group_config_t&)>& change, epd_status_t status,
                         const std::vector<std::string>& words) {
      epd_group_config_t config = good;
      change(config);
      refused_join(session, config, status, words);
    };
    const epd_status_t invalid = EPD_INVALID_ARGUMENT;
    bad([](auto& c) { c.name = nullptr; }, invalid, {"name"});
    bad(
        [](auto& c) {
          c.num_ranks = 3;
          c.num_experts = 4;
        },
        invalid, {"num_experts", "4", "3"});
    bad([](auto& c) { c.depth = 17; }, invalid, {"depth", "17", "16"});
    bad([](auto& c) { c.size = 3; }, invalid, {"size"});
    bad([](auto& c) { c.size = 12; }, invalid, {"size is 12"});  // half a pointer
    bad([](auto& c) { c.size = SIZE_MAX; }, invalid, {"size is 18446744073709551615"});
    const std::string longest(4999, 'n');
    bad([&](auto& c) { c.name = longest.c_str(); }, invalid, {"nnnn ... nnnn", "allowed: "});
    const Group group(session, good);
  });
  daemon->stop();
}

// Neither the daemon nor the group that runs can do anything about it.
TEST(Join, WithoutRoomForDescriptorsOnlyThisJoinIsRefused) {
  std::unique_ptr<Daemon> daemon;
  start(daemon);
  in_process([&] {
    const Session session(daemon->socket(), "host:0");
    const Group first(session, small_config("first", 0, 1));
    const auto noop = [](const Group& group) {
      epd_ticket_t ticket = 0;
      must(epd_noop(group.get(), 0, EPD_NO_STREAM, &ticket), "noop");
      must(group.wait(ticket, 10'000), "the end of a noop");
    };
    rlimit before{};
    ::getrlimit(RLIMIT_NOFILE, &before);
    const rlimit few{64, before.rlim_max};
    must(::setrlimit(RLIMIT_NOFILE, &few) == 0 ? EPD_OK : EPD_INTERNAL, "setrlimit");
    std::vector<UniqueFd> all;
    for (int fd = ::open("/dev/null", O_RDONLY); fd >= 0; fd = ::open("/dev/null", O_RDONLY))
      all.emplace_back(fd);
    refused_join(session, small_config("second", 0, 1), EPD_RESOURCE_EXHAUSTED, {"RLIMIT_NOFILE", "64"});
    refused_attach(daemon->socket(), "host:0", EPD_RESOURCE_EXHAUSTED, {});
    noop(first);
    all.clear();
    const Group second(session, small_config("second", 0, 1));
    noop(second);
    noop(first);
  });
  daemon->stop();
}

TEST(Join, GroupsAndBytesOverTheLimitAreRefused) {
  std::unique_ptr<Daemon> daemon;
  start(daemon, {{"limits.max_groups", "2"}, {"limits.max_arena_bytes", "\"64MiB\""}});
  in_process([&] {
    const Session session(daemon->socket(), "host:0");
    // Those that tried whether the daemon serves may still be leaving.
    const auto join = [&session](const char* name) {
      const epd_group_config_t config = small_config(name, 0, 1);
      epd_group_t* joined = nullptr;
      eventually(5, [&] { return epd_group_join(session.get(), &config, &joined) == EPD_OK; });
      RANK_CHECK(joined != nullptr, epd_last_error());
      return Group(joined);
    };
    {
      const Group a = join("a");
      const Group b = join("b");
      refused_join(session, small_config("c", 0, 1), EPD_RESOURCE_EXHAUSTED, {"2 groups", "allowed: 2"});
    }
    epd_group_config_t large = small_config("large", 0, 1);
    large.max_tokens = 4096;
    large.hidden = 7168;
    large.timeout_ms = 2000;
    epd_group_t* group = nullptr;
    eventually(5, [&] {  // leaving ends a moment after epd_group_leave returns
      const epd_status_t status = epd_group_join(session.get(), &large, &group);
      return std::string(epd_last_error()).find("groups; allowed") == std::string::npos || status == EPD_OK;
    });
    refused_join(session, large, EPD_RESOURCE_EXHAUSTED, {std::to_string(64 << 20)});
    const Group small(session, small_config("small", 0, 1));
  });
  daemon->stop();
}

}  // namespace
}  // namespace epd::test
