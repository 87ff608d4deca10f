// Regions in memory of the clients' own: where they are, what is refused, and who dies with what.
#include "common/signal.h"
#include "fault.h"
#include "proto/binding_rules.h"
#include "support/own_memory.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>
#include <cstring>
#include <functional>
#include <memory>

namespace epd::test {
namespace {

using abi::Region;

constexpr std::uint32_t kAll = (1u << abi::kNumRegions) - 1;

class Bound : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    if (!can_use_devices(GetParam())) GTEST_SKIP() << "no CUDA driver to be opened here";
    DaemonOptions options;
    options.devices = 3;
    use_devices(options, GetParam());
    options.settings = patient_settings();
    daemon_ = std::make_unique<Daemon>(std::move(options));
    ASSERT_TRUE(daemon_->start());
  }
  void TearDown() override {
    if (daemon_ != nullptr && daemon_->running()) daemon_->stop();
  }
  bool on_host() const { return GetParam() == "host"; }

  // Rank 0 brings a good binding of recv_x that `change` has made bad. What the supervisor sees is told to it
  // at once, and the other rank waits in vain; what only an engine sees is told to both.
  enum class Seen { kBySupervisor, kByEngine };
  using Change = std::function<void(const epd_session_info_t&, BoundMemory&)>;
  void expect_refused(Seen seen, const Change& change, const std::vector<std::string>& said) {
    const Case c = fault_case(2, 2);
    const std::string name = "refused-" + std::to_string(++number_);
    expect_all_ok(run_ranks(2, 60, [&](std::uint32_t rank) -> std::string {
      const Session session(daemon_->socket(), daemon_->device(rank));
      epd_session_info_t info;
      epd_session_info_init(&info);
      must(epd_session_info(session.get(), &info), "info");
      epd_group_config_t config = c.config(name.c_str(), rank);
      BoundMemory own = bind_regions(info, config, abi::region_bit(Region::kRecvX));
      if (rank == 0) change(info, own);
      config.bindings = own.bindings.data();
      config.num_bindings = static_cast<std::uint32_t>(own.bindings.size());
      const bool alone = rank != 0 && seen == Seen::kBySupervisor;
      config.timeout_ms = alone ? 1'500 : 10'000;
      epd_group_t* group = nullptr;
      const epd_status_t status = epd_group_join(session.get(), &config, &group);
      must(status, "join", alone ? EPD_DEADLINE_EXCEEDED : EPD_INVALID_ARGUMENT);
      for (const std::string& part : said) {
        if (!alone) must_say(part);
      }
      return "";
    }));
  }

  std::unique_ptr<Daemon> daemon_;
  int number_ = 0;
};
INSTANTIATE_TEST_SUITE_P(Devices, Bound, testing::Values("host", "cuda"),
                         [](const auto& tested) { return tested.param; });

Case all_regions() {
  Case c = fault_case(3, 3);
  c.layout = EPD_LAYOUT_PACKED;
  c.alignment = 4;
  c.payload = EPD_PAYLOAD_FP8;
  c.num_biases = 2;
  c.return_weights = abi::kReturnOwn;
  c.zero_padding = true;
  c.bound = kAll;
  return c;
}

TEST_P(Bound, EveryRegionIsWhereItWasBound) {
  const Case c = all_regions();
  expect_all_ok(run_ranks(c.num_ranks, 90, [&](std::uint32_t rank) -> std::string {
    const Session session(daemon_->socket(), daemon_->device(rank));
    epd_session_info_t info;
    epd_session_info_init(&info);
    must(epd_session_info(session.get(), &info), "info");
    epd_group_config_t config = c.config("every", rank);
    const BoundMemory own = bind_regions(info, config, c.bound_on(rank));
    RANK_CHECK(own.bindings.size() == abi::kNumRegions, "each region has a binding");
    config.bindings = own.bindings.data();
    config.num_bindings = static_cast<std::uint32_t>(own.bindings.size());
    const Group group(session, config);
    for (std::uint32_t slot = 0; slot < c.depth; ++slot) {
      epd_buffers_t b;
      epd_buffers_init(&b);
      must(epd_group_buffers(group.get(), slot, &b), "buffers");
      const auto at = [&](Region region) {
        const epd_binding_t& binding = own.bindings[static_cast<std::size_t>(region)];
        std::uint64_t bytes = 0;
        must(epd_region_bytes(&config, binding.region, &bytes), "bytes");
        const std::uint64_t stride =
            binding.stride != 0 ? binding.stride : abi::align_up(bytes, abi::kBindingAlign);
        return static_cast<void*>(static_cast<std::byte*>(binding.address) + slot * stride);
      };
      RANK_CHECK(b.x == at(Region::kX) && b.recv_x == at(Region::kRecvX) && b.y == at(Region::kY), "places");
      RANK_CHECK(b.out == at(Region::kOut) && b.recv_src == at(Region::kRecvSrc), "places");
      RANK_CHECK(b.out_weights == at(Region::kOutWeights) && b.bias[1] == at(Region::kBias1), "places");
    }
    return "";
  }));
  expect_all_ok(run_ranks(c.num_ranks, 90, [&](std::uint32_t rank) {
    ScriptOptions options;
    options.rounds = 12;
    options.order = Order::kStaggered;
    return run_case(daemon_->socket(), daemon_->device(rank), "every-2", c, rank, options);
  }));
}

// The tests' copy of a GPU's slot has each region once.
TEST_P(Bound, ExpertsMayWorkInPlace) {
  if (!on_host()) GTEST_SKIP() << "host memory only: regions are compared through a copy on GPUs";
  const Case c = fault_case(2, 2);
  expect_all_ok(run_ranks(2, 60, [&](std::uint32_t rank) -> std::string {
    const Session session(daemon_->socket(), daemon_->device(rank));
    epd_session_info_t info;
    epd_session_info_init(&info);
    must(epd_session_info(session.get(), &info), "info");
    epd_group_config_t config = c.config("in-place", rank);
    BoundMemory own = bind_regions(info, config, abi::region_bit(Region::kRecvX));
    own.bindings.push_back(own.bindings[0]);
    own.bindings[1].region = EPD_REGION_Y;
    config.bindings = own.bindings.data();
    config.num_bindings = 2;
    const Group group(session, config);
    epd_buffers_t b = group.buffers(1);
    RANK_CHECK(b.y == b.recv_x, "one place");
    ScriptOptions options;
    options.order = Order::kInTurn;
    options.rounds = 8;
    return ScriptRunner(group, c, rank, options).run().to_string();
  }));
}

TEST_P(Bound, DescriptorsThatAreNoMemoryOfTheDevice) {
  expect_refused(Seen::kBySupervisor,
                 [](const epd_session_info_t&, BoundMemory& own) {
                   int ends[2];
                   RANK_CHECK(::pipe2(ends, O_CLOEXEC) == 0, "pipe");
                   own.bindings[0].fd = ends[0];
                 },
                 {"recv_x", "allowed"});
  expect_refused(Seen::kBySupervisor,
                 [](const epd_session_info_t&, BoundMemory& own) {
                   own.bindings[0].fd = ::open("/proc/self/exe", O_RDONLY | O_CLOEXEC);
                 },
                 {"recv_x", "allowed"});
  // Memory of the other kind of device.
  expect_refused(on_host() ? Seen::kBySupervisor : Seen::kByEngine,
                 [this](const epd_session_info_t&, BoundMemory& own) {
                   if (on_host()) {
                     own.bindings[0].fd = ::open("/dev/null", O_RDWR | O_CLOEXEC);
                   } else {
                     own.memory.push_back(Allocation::of_host(own.memory[0]->bytes()));
                     own.bindings[0].fd = own.memory.back()->fd();
                   }
                 },
                 {"recv_x", "allowed"});
  expect_serves(*daemon_, 3, "after");
}

TEST_P(Bound, MemoryThatIsTooShort) {
  expect_refused(on_host() ? Seen::kBySupervisor : Seen::kByEngine,
                 [this](const epd_session_info_t& info, BoundMemory& own) {
                   const std::size_t bytes = own.memory[0]->bytes();
                   // A GPU's allocation is whole units, so the region is moved past the last.
                   own.bindings[0].offset = on_host() ? own.bindings[0].offset + 256 : bytes;
                   static_cast<void>(info);
                 },
                 {"recv_x", on_host() ? "needed" : "can't be mapped"});
  expect_serves(*daemon_, 3, "after");
}

TEST_P(Bound, MemoryOfAnotherGpu) {
  if (on_host()) GTEST_SKIP() << "GPUs only";
  if (daemon_->devices() < 2) GTEST_SKIP() << "there is one GPU";
  expect_refused(Seen::kByEngine,
                 [](const epd_session_info_t& info, BoundMemory& own) {
                   own.memory.push_back(Allocation::of_gpu((gpu_of(info) + 1) % 2, own.memory[0]->bytes()));
                   own.bindings[0].fd = own.memory.back()->fd();
                 },
                 {"rank 0", "recv_x", "is on GPU 1"});
  expect_serves(*daemon_, 3, "after");
}

int memfd_with(std::size_t bytes, int seals, unsigned int flags = MFD_ALLOW_SEALING) {
  const int fd = ::memfd_create("test-bad-memory", MFD_CLOEXEC | flags);
  RANK_CHECK(fd >= 0 && ::ftruncate(fd, static_cast<off_t>(bytes)) == 0, std::strerror(errno));
  if (seals != 0) RANK_CHECK(::fcntl(fd, F_ADD_SEALS, seals) == 0, "seals");
  return fd;
}

TEST_P(Bound, MemfdsThatCouldHurtAnEngine) {
  if (!on_host()) GTEST_SKIP() << "host memory only";
  const auto with = [&](int seals, const std::string& said) {
    expect_refused(Seen::kBySupervisor,
                   [seals](const epd_session_info_t&, BoundMemory& own) {
                     own.bindings[0].fd = memfd_with(own.memory[0]->bytes(), seals);
                   },
                   {"recv_x", said, "F_SEAL_SHRINK"});
  };
  with(0, "may become shorter");
  with(F_SEAL_GROW, "may become shorter");
  with(F_SEAL_SHRINK | F_SEAL_WRITE, "forbid writing");
  with(F_SEAL_SHRINK | F_SEAL_FUTURE_WRITE, "forbid writing");
  expect_refused(Seen::kBySupervisor,
                 [](const epd_session_info_t&, BoundMemory& own) {
                   const std::string path = "/proc/self/fd/" + std::to_string(own.memory[0]->fd());
                   own.bindings[0].fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
                 },
                 {"recv_x", "not open for both"});
  expect_serves(*daemon_, 3, "after");
}

// What the supervisor has looked at is not what the engine gets: sealed in between, it can't be mapped.
TEST_P(Bound, MemoryThatIsSealedWhileTheGroupForms) {
  if (!on_host()) GTEST_SKIP() << "host memory only";
  const Case c = fault_case(2, 2);
  Shared<Gate> sealed;
  std::vector<RankProcess> ranks = start_ranks(2, [&](std::uint32_t rank) -> std::string {
    const Session session(daemon_->socket(), daemon_->device(rank));
    epd_session_info_t info;
    epd_session_info_init(&info);
    must(epd_session_info(session.get(), &info), "info");
    epd_group_config_t config = c.config("sealed", rank);
    BoundMemory own = bind_regions(info, config, abi::region_bit(Region::kRecvX));
    config.bindings = own.bindings.data();
    config.num_bindings = 1;
    if (rank == 1) sealed->wait_for(1);
    RankProcess sealer;  // while rank 0 waits in its join
    if (rank == 0) {
      sealer = RankProcess([&]() -> std::string {
        const auto joins = [&] { return daemon_->epctl({"groups"}).out.find("sealed") != std::string::npos; };
        RANK_CHECK(eventually(20, joins), "the supervisor has looked at the memory");
        RANK_CHECK(::fcntl(own.memory[0]->fd(), F_ADD_SEALS, F_SEAL_FUTURE_WRITE) == 0, "seal");
        sealed->arrive();
        return "";
      });
    }
    epd_group_t* group = nullptr;
    must(epd_group_join(session.get(), &config, &group), "join", EPD_INVALID_ARGUMENT);
    must_say("rank 0: the memory that recv_x is bound to can't be used");
    return "";
  });
  expect_all_ok(wait_all(ranks, 60));
  expect_serves(*daemon_, 3, "after");
}

TEST_P(Bound, EnginesThatDieGetItAgain) {
  Case c = all_regions();
  const std::size_t memfds = settled_memfds(*daemon_);
  struct Stage {
    Gate killed;  // engines
    Gate finished;
    std::atomic<std::uint64_t> progress{0};
  };
  Shared<Stage> stage;
  std::vector<RankProcess> ranks = start_ranks(c.num_ranks, [&](std::uint32_t rank) -> std::string {
    ScriptOptions options;
    options.rounds = 120;
    options.recover = true;
    options.finished = &stage->finished;
    // No rank is through before both kills.
    options.on_submit = [&](std::uint64_t submitted) {
      stage->progress.fetch_add(1);
      if (submitted == 30) stage->killed.wait_for(1);
      if (submitted == 100) stage->killed.wait_for(2);
    };
    return run_case(daemon_->socket(), daemon_->device(rank), "restarts", c, rank, options);
  });
  for (std::uint32_t device = 0; device < 2; ++device) {
    ASSERT_TRUE(eventually(30, [&] { return stage->progress > 60 + device * 150; }));
    pid_t pid = -1;
    ASSERT_TRUE(eventually(20, [&] { return (pid = daemon_->engine(device)) > 0; }));
    ASSERT_EQ(send_signal(pid, SIGKILL), 0);
    stage->killed.arrive();
  }
  const std::vector<RankOutcome> outcomes = wait_all(ranks, 90);
  expect_all_ok(outcomes);
  EXPECT_EQ(outcomes[2].text.find(", 0 resumes"), std::string::npos) << outcomes[2].text;
  EXPECT_TRUE(eventually(8, [&] { return memfds_held(*daemon_) == memfds; }))
      << "memory is left: " << memfds_held(*daemon_) << ", before " << memfds;
}

// A rank is killed and comes back, first with memory that can't be used, then with some of another kind, then
// without.
TEST_P(Bound, ALostRankComesBackWithOtherMemory) {
  Case c = fault_case(3, 2);
  c.degrade = true;
  c.bound = abi::region_bit(Region::kX) | abi::region_bit(Region::kRecvX) | abi::region_bit(Region::kY) |
            abi::region_bit(Region::kOut);
  struct Stage {
    Gate finished;
    Gate joined;
    std::atomic<std::uint64_t> progress{0};
  };
  Shared<Stage> stage;
  const auto options_of = [&] {
    ScriptOptions options;
    options.rounds = 100000;
    options.recover = true;
    options.on_submit = [&](std::uint64_t) { stage->progress.fetch_add(1); };
    return options;
  };
  const auto start = [&](std::uint32_t rank, const Case& its) {
    return RankProcess([&, rank, its]() -> std::string {
      return run_case(daemon_->socket(), daemon_->device(rank), "back", its, rank, options_of());
    });
  };
  std::vector<RankProcess> ranks;
  for (std::uint32_t rank = 0; rank < 3; ++rank) ranks.push_back(start(rank, c));
  const auto moves_on = [&] {
    const std::uint64_t now = stage->progress;
    return eventually(30, [&] { return stage->progress > now + 60; });
  };
  ASSERT_TRUE(moves_on());
  ranks[2].kill(SIGKILL);
  ranks[2].wait(10);
  ASSERT_TRUE(moves_on()) << ranks[0].wait(1).text << "; " << ranks[1].wait(1).text;

  RankProcess wrong([&]() -> std::string {
    const Session session(daemon_->socket(), daemon_->device(2));
    epd_session_info_t info;
    epd_session_info_init(&info);
    must(epd_session_info(session.get(), &info), "info");
    epd_group_config_t config = c.config("back", 2);
    BoundMemory own = bind_regions(info, config, abi::region_bit(Region::kY));
    own.bindings[0].fd = memfd_with(own.memory[0]->bytes(), 0);
    config.bindings = own.bindings.data();
    config.num_bindings = 1;
    epd_group_t* group = nullptr;
    must(epd_group_join(session.get(), &config, &group), "join", EPD_INVALID_ARGUMENT);
    must_say("the memory that y is bound to");
    return "";
  });
  const RankOutcome refused = wrong.wait(30);
  EXPECT_TRUE(refused.ok) << refused.to_string();
  ASSERT_TRUE(moves_on());

  // In the place of the lost one a rank that takes no part in a script needs none: that it may join is
  // enough.
  for (const std::uint32_t bound : {abi::region_bit(Region::kTopkIdx) | abi::region_bit(Region::kOut), 0u}) {
    RankProcess newcomer([&]() -> std::string {
      const Session session(daemon_->socket(), daemon_->device(2));
      const Group group(session, c.config("back", 2), bound);
      stage->joined.arrive();
      sleep_ms(60000);
      return "";
    });
    const std::uint32_t wanted = bound != 0 ? 1 : 2;
    ASSERT_TRUE(eventually(30, [&] { return stage->joined.count >= wanted; }));
    newcomer.kill(SIGKILL);
    newcomer.wait(10);
    ASSERT_TRUE(moves_on());
  }
  for (std::uint32_t rank = 0; rank < 2; ++rank) {
    ranks[rank].kill(SIGKILL);
    ranks[rank].wait(10);
  }
  expect_serves(*daemon_, 3, "after");
}

TEST_P(Bound, NothingIsLeftOfIt) {
  const Case c = all_regions();
  const auto cycles = [&](int count) {
    for (int i = 0; i < count; ++i) {
      const bool killed = i % 2 == 1;
      std::vector<RankProcess> ranks = start_ranks(c.num_ranks, [&](std::uint32_t rank) -> std::string {
        ScriptOptions options;
        options.rounds = killed ? 100000 : 4;
        return run_case(daemon_->socket(), daemon_->device(rank), "cycle-" + std::to_string(i), c, rank,
                        options);
      });
      if (!killed) {
        expect_all_ok(wait_all(ranks, 60));
        continue;
      }
      sleep_ms(20 * i);
      for (const RankProcess& rank : ranks) rank.kill(SIGKILL);
      for (RankProcess& rank : ranks) rank.wait(10);
    }
  };
  cycles(4);
  if (!on_host()) {  // lanes of GPUs go to a pool, which may still grow
    const std::size_t memfds = settled_memfds(*daemon_);
    cycles(10);
    EXPECT_TRUE(eventually(8, [&] { return memfds_held(*daemon_) == memfds; }))
        << "memory is left: " << memfds_held(*daemon_) << ", before " << memfds;
    return;
  }
  const SystemCensus before = settled_census(*daemon_);
  cycles(10);
  expect_same_census(*daemon_, before);
}

}  // namespace
}  // namespace epd::test
