// One driver call of the daemon fails, once, wherever a group's life or an engine's start needs it. Everybody
// concerned is told by status, the log or a client's error names the call, nobody hangs, nothing leaks, and
// the next group's results are right to the bit. The file `fail` of the fake driver makes the call fail.
#include "common/signal.h"
#include "cuda_driver.h"
#include "fault.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <set>

namespace epd::test {
namespace {

namespace fs = std::filesystem;

constexpr const char* kFaultDir = "EPD_FAKE_CUDA_FAULT_DIR";
constexpr std::uint32_t kRanks = 2;
constexpr std::uint32_t kVictim = 1;               // the device whose engine is concerned
constexpr const char* kOfTheEngine = "@1";         // calls under a context on that device
constexpr const char* kOfTheSupervisor = "@none";  // it has no context
constexpr CUresult kError =
    CUDA_ERROR_UNKNOWN;  // leaves the context alone: the call itself must be looked at
constexpr std::uint32_t kJoinMs = 20'000;
constexpr std::uint32_t kJoinUnderFaultMs = 2'000;  // the partner may never come

#define EPD_NAME_OF(name) #name,
const std::vector<std::string> kFunctions = {EPD_CUDA_FUNCTIONS(EPD_NAME_OF)};
#undef EPD_NAME_OF

// Failures of these are told otherwise, or cost nothing: a resource that was left stays until the engine
// ends.
const std::set<std::string> kDoneWithout = {"cuStreamDestroy"};

// Streams are kept for later, each with a thread of the fake driver's; as many as were ever in use at once.
constexpr std::size_t kMoreThreads = 4;

// The statuses that a rank may get, and a rank whose partner has not come.
const std::vector<std::string> kTyped = {
    " INTERNAL: ",    " RESOURCE_EXHAUSTED: ", " RANK_LOST: ",
    " ABORTED: ",     " ENGINE_RESTARTED: ",   " INVALID_ARGUMENT: ",
    " UNSUPPORTED: ", " WOULD_BLOCK: ",        "join life gave DEADLINE_EXCEEDED: "};

bool is_typed(const std::string& text) {
  return text.empty() || std::any_of(kTyped.begin(), kTyped.end(), [&](const std::string& status) {
           return text.find(status) != std::string::npos;
         });
}

class DriverFault : public testing::Test {
 protected:
  void SetUp() override {
    if (!has_cuda_driver()) GTEST_SKIP() << "no CUDA driver to be opened here";
    if (std::getenv("EPD_TEST_GPUS") != nullptr) GTEST_SKIP() << "a true driver does not fail when asked";
    std::string pattern = (fs::temp_directory_path() / "epd-fail-XXXXXX").string();
    folder_ = ::mkdtemp(pattern.data());
    DaemonOptions options;
    use_devices(options, "cuda");
    options.devices = kRanks;
    options.settings = patient_settings();
    daemon_ = std::make_unique<Daemon>(std::move(options));
    ::setenv(kFaultDir, folder_.c_str(), 1);  // for the daemon alone
    const bool started = daemon_->start();
    ::unsetenv(kFaultDir);
    ASSERT_TRUE(started);
    expect_lives();
    before_ = settled_census(*daemon_);
  }
  void TearDown() override {
    if (daemon_ != nullptr && daemon_->running()) daemon_->stop();
    std::error_code ignored;
    if (!folder_.empty()) fs::remove_all(folder_, ignored);
  }

  // A group from attach to detach. For each rank what ended it, "" if nothing did.
  std::vector<std::string> live(std::uint32_t join_ms) const;
  void expect_lives() const {
    for (const std::string& text : live(kJoinMs)) ASSERT_EQ(text, "");
  }
  using Step = std::function<std::vector<std::string>()>;
  // Fails the calls 1, 2, 4, ... of each function that `step` makes, at most that many; `whose`: see above.
  void sweep(const char* whose, int most, const Step& step);
  // Whether the call was made, and has failed.
  bool fails_in(const std::string& function, const std::string& fault, const Step& step);
  void expect_no_leak() const;
  std::string log_from(std::size_t place) const { return daemon_->log().substr(place); }

  std::unique_ptr<Daemon> daemon_;
  std::string folder_;
  SystemCensus before_;
};

std::vector<std::string> DriverFault::live(std::uint32_t join_ms) const {
  const Case c = fault_case(kRanks, 2);
  // On a slow machine a rank's last operation may end later than the time that a peer's leave gives it.
  Shared<std::atomic<std::uint32_t>> ended;
  const auto outcomes = run_ranks(kRanks, 40, [&](std::uint32_t rank) -> std::string {
    try {
      const Session session(daemon_->socket(), daemon_->device(rank));
      epd_group_config_t config = c.config("life", rank);
      config.timeout_ms = join_ms;
      const Group group(session, config);
      ScriptOptions options;
      options.timeout_ms = 10000;
      ScriptRunner(group, c, rank, options).run();
      ++*ended;
      eventually(5, [&] { return *ended == kRanks; });
      return "";
    } catch (const RankFailure& failure) {
      ++*ended;
      return failure.text;
    }
  });
  expect_all_ok(outcomes);
  std::vector<std::string> texts;
  for (const RankOutcome& outcome : outcomes) texts.push_back(outcome.text);
  return texts;
}

// An engine that the step kills may have made the call just before, and could not say so. Then the step is
// repeated.
bool DriverFault::fails_in(const std::string& function, const std::string& fault, const Step& step) {
  SCOPED_TRACE(fault);
  const std::size_t logged = daemon_->log().size();
  bool named = kDoneWithout.contains(function);
  for (int tries = 0; tries == 0 || (!named && tries < 3); ++tries) {
    std::ofstream(folder_ + "/new") << fault;
    fs::rename(folder_ + "/new", folder_ + "/fail");
    const std::vector<std::string> texts = step();
    if (fs::remove(folder_ + "/fail")) return false;
    for (const std::string& text : texts) {
      EXPECT_TRUE(is_typed(text)) << text;
      named = named || text.find(function + ": CUDA_ERROR_UNKNOWN") != std::string::npos;
    }
    named = named || eventually(5, [&] {
              return log_from(logged).find(function + ": CUDA_ERROR_UNKNOWN") != std::string::npos;
            });
  }
  EXPECT_TRUE(named) << log_from(logged);
  EXPECT_TRUE(daemon_->wait_ready());
  expect_lives();
  return true;
}

void DriverFault::expect_no_leak() const {
  SystemCensus now;
  const bool returned = eventually(8, [&] {
    now = take_system_census(*daemon_);
    return std::equal(now.processes.begin(), now.processes.end(), before_.processes.begin(),
                      [](const Census& a, const Census& b) {
                        return a.fds == b.fds && a.memfds == b.memfds &&
                               a.memfd_mappings == b.memfd_mappings && a.threads <= b.threads + kMoreThreads;
                      });
  });
  EXPECT_TRUE(returned) << "before:\n" << before_.to_string() << "now:\n" << now.to_string();
}

void DriverFault::sweep(const char* whose, int most, const Step& step) {
  std::string seen;
  for (const std::string& function : kFunctions) {
    int calls = 0;
    for (int n = 1; n <= most; n *= 2, ++calls) {
      const std::string fault =
          function + ":" + std::to_string(n) + ":" + std::to_string(static_cast<int>(kError)) + whose;
      if (!fails_in(function, fault, step)) break;
    }
    if (calls == 0) continue;
    seen += " " + function + " " + std::to_string(calls);
    SCOPED_TRACE(function);
    // A handle that the driver does not take back stays the supervisor's.
    if (function == "cuMemRelease" && whose == std::string(kOfTheSupervisor)) {
      before_ = settled_census(*daemon_);
    } else {
      expect_no_leak();
    }
  }
  std::printf("failed, each so often:%s\n", seen.c_str());
  EXPECT_NE(seen, "");
}

TEST_F(DriverFault, OfAnEngineInAGroupsLife) {
  sweep(kOfTheEngine, 8, [this] { return live(kJoinUnderFaultMs); });
}

TEST_F(DriverFault, OfTheSupervisorInAGroupsLife) {
  sweep(kOfTheSupervisor, 2, [this] { return live(kJoinUnderFaultMs); });
}

TEST_F(DriverFault, OfAnEngineThatStarts) {
  sweep("", 2, [this] {
    const std::size_t logged = daemon_->log().size();
    pid_t engine = -1;  // after a start that failed none runs for a while
    EXPECT_TRUE(eventually(10, [&] { return (engine = daemon_->engine(kVictim)) > 0; }));
    EXPECT_EQ(send_signal(engine, SIGKILL), 0);
    EXPECT_TRUE(eventually(
        10, [&] { return log_from(logged).find("engine ready\" device=\"cuda:1\"") != std::string::npos; }));
    return std::vector<std::string>();
  });
}

}  // namespace
}  // namespace epd::test
