// A daemon in a memory cgroup, and a user whose arenas are larger than that.
#include "fault.h"

#include <grp.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>
#include <atomic>
#include <filesystem>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

namespace epd::test {
namespace {

namespace fs = std::filesystem;

constexpr std::uint32_t kHog = 4711;
constexpr const char* kLimit = "536870912";

// A cgroup of version 1 or 2, below the root. Invalid where none can be made.
class MemoryCgroup {
 public:
  MemoryCgroup() {
    for (const char* root : {"/sys/fs/cgroup/memory", "/sys/fs/cgroup"}) {
      directory_ = fs::path(root) / ("epd-test-" + std::to_string(::getpid()));
      std::error_code error;
      if (fs::create_directory(directory_, error) && limit()) return;
      fs::remove(directory_, error);
    }
    directory_.clear();
  }
  ~MemoryCgroup() {
    std::error_code busy;
    if (valid()) eventually(10, [&] { return fs::remove(directory_, busy); });
  }
  MemoryCgroup(const MemoryCgroup&) = delete;
  MemoryCgroup& operator=(const MemoryCgroup&) = delete;
  bool valid() const { return !directory_.empty(); }
  void enter() const { std::ofstream(directory_ / "cgroup.procs") << ::getpid() << std::endl; }

 private:
  bool limit() const {
    for (const char* file : {"memory.limit_in_bytes", "memory.max"}) {
      if (fs::exists(directory_ / file)) return !!(std::ofstream(directory_ / file) << kLimit << std::endl);
    }
    return false;
  }
  fs::path directory_;
};

// One slot has 268 MB of x and as much of recv_x.
epd_group_config_t too_large() {
  epd_group_config_t config = small_config("too-large", 0, 1);
  config.max_tokens = 16384;
  config.hidden = 8192;
  config.topk = 1;
  config.depth = 1;
  return config;
}

// Until its session ends; the text of that. Its mapping of the arena stays.
std::string fill_memory(const Group& group) {
  epd_dispatch_args_t args;
  epd_dispatch_args_init(&args);
  args.num_tokens = 16384;
  for (;;) {
    epd_ticket_t ticket = 0;
    epd_handle_t handle = 0;
    epd_status_t status = group.dispatch(&args, &ticket, &handle);
    if (status == EPD_OK) status = group.wait(ticket, 30'000);
    if (status == EPD_ENGINE_RESTARTED) {
      epd_resume_info_t info;
      epd_resume_info_init(&info);
      status = epd_group_resume(group.get(), 30'000, &info);
    }
    if (status == EPD_RESOURCE_EXHAUSTED) return epd_last_error();
    must(status, "dispatch");
  }
}

struct Stage {
  Gate recovered;  // ranks that go on after the death of an engine
  std::atomic<bool> stop;
};

// Noops until told, across deaths of engines. Peers may have gone then.
std::string go_on(const Group& group, Stage& stage) {
  bool resumed = false;
  while (!stage.stop.load()) {
    epd_ticket_t ticket = 0;
    epd_status_t status = epd_noop(group.get(), 0, EPD_NO_STREAM, &ticket);
    if (status == EPD_OK) status = group.wait(ticket, 30'000);
    if (stage.stop.load()) break;
    if (status == EPD_ENGINE_RESTARTED) {
      resume(group, 30'000);
      resumed = true;
    } else {
      must(status, "noop");
      if (std::exchange(resumed, false)) stage.recovered.arrive();
    }
  }
  return "";
}

// The OOM killer ended the next engine as the one before, since the supervisor held the memory, until the
// devices had failed and everybody's groups with them.
TEST(Memory, AUserWhoFillsItLosesHisSessionAndOthersGoOn) {
  const MemoryCgroup cgroup;
  if (!kMemoryIsOurs || !cgroup.valid()) GTEST_SKIP() << "needs a memory cgroup, and no sanitizer";
  DaemonOptions options;
  options.devices = 2;
  options.settings = {{"daemon.socket_mode", "\"0666\""}};
  options.in_child = [&cgroup] { cgroup.enter(); };
  Daemon daemon(options);
  ASSERT_TRUE(daemon.start());
  ASSERT_EQ(::chmod(daemon.directory().c_str(), 0755), 0);
  const Shared<Stage> stage;
  std::vector<RankProcess> others = start_ranks(2, [&](std::uint32_t rank) {
    const Session session(daemon.socket(), daemon.device(rank));
    const Group group(session, small_config("others", rank, 2));
    return go_on(group, *stage);
  });
  RankProcess hog([&]() -> std::string {
    RANK_CHECK(::setgroups(0, nullptr) == 0 && ::setresgid(kHog, kHog, kHog) == 0 &&
                   ::setresuid(kHog, kHog, kHog) == 0,
               "become another user");
    const Session session(daemon.socket(), "host:0");
    const Group group(session, too_large());
    const std::string why = fill_memory(group);
    RANK_CHECK(why.find("out of memory: arenas of user 4711") != std::string::npos, why);
    const Session again(daemon.socket(), "host:0");
    epd_group_t* refused = nullptr;
    epd_group_config_t config = too_large();
    must(epd_group_join(again.get(), &config, &refused), "join again", EPD_RESOURCE_EXHAUSTED);
    must_say("allowed: 134217728 (a quarter of the memory, which this user had filled)");
    const Group small(again, small_config("small", 0, 1));
    return "";
  });
  expect_all_ok({hog.wait(100)});
  EXPECT_TRUE(eventually(60, [&] { return stage->recovered.count >= 2; }));
  stage->stop.store(true);
  expect_all_ok(wait_all(others, 60));
  expect_serves(daemon, 2, "later");
  EXPECT_EQ(daemon.epctl({"devices"}).out.find("failed"), std::string::npos);
  EXPECT_NE(daemon.log().find("by the kernel's OOM killer (see"), std::string::npos) << daemon.log();
  daemon.stop();
}

}  // namespace
}  // namespace epd::test
