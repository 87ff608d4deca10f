// Clients whose operations, joins and routings are as large as they may be: each takes its turn in pieces, or
// is refused by a limit with a name. No engine hangs, ends, or is restarted.
#include "hostile_fixture.h"

#include <sys/resource.h>
#include <algorithm>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

namespace epd::test {
namespace {

constexpr std::uint32_t kSessions = 4;
constexpr std::uint32_t kGroupsOfEach = 6;
constexpr std::uint32_t kTokens = 65536;
constexpr std::uint32_t kTopk = 32;

// The most choices that there can be, and no rows.
epd_group_config_t many_choices(const char* name) {
  epd_group_config_t config;
  epd_group_config_init(&config);
  config.name = name;
  config.num_ranks = 1;
  config.num_experts = kTopk;
  config.max_tokens = kTokens;
  config.hidden = 128;
  config.topk = kTopk;
  config.depth = 1;
  config.layout = EPD_LAYOUT_PACKED;
  config.max_recv_rows = 1;
  config.timeout_ms = 60'000;
  return config;
}

// Sessions with groups of one rank each, whose choices are all -1.
class ManyChoices {
 public:
  explicit ManyChoices(const std::string& socket) {
    for (std::uint32_t s = 0; s < kSessions; ++s) {
      sessions_.push_back(std::make_unique<Session>(socket, "host:0", EPD_WAIT_BY_MEMOP, 60'000));
      for (std::uint32_t g = 0; g < kGroupsOfEach; ++g) {
        const std::string name = "many-" + std::to_string(s) + "-" + std::to_string(g);
        groups_.push_back(std::make_unique<Group>(*sessions_.back(), many_choices(name.c_str())));
        std::fill_n(static_cast<std::int32_t*>(groups_.back()->buffers(0).topk_idx), kTokens * kTopk, -1);
      }
    }
  }

  // One dispatch in each group, all at once.
  void dispatch_all() {
    std::vector<epd_ticket_t> tickets(groups_.size());
    for (std::size_t i = 0; i < groups_.size(); ++i) {
      epd_dispatch_args_t args;
      epd_dispatch_args_init(&args);
      args.num_tokens = kTokens;
      args.timeout_ms = 120'000;
      epd_handle_t handle = 0;
      must(groups_[i]->dispatch(&args, &tickets[i], &handle), "dispatch");
    }
    for (std::size_t i = 0; i < groups_.size(); ++i) {
      epd_result_t result;
      epd_result_init(&result);
      must(groups_[i]->wait(tickets[i], 120'000, &result), "wait");
      RANK_CHECK(result.num_recv_rows == 0, std::to_string(result.num_recv_rows) + " rows of no choice");
    }
  }

 private:
  std::vector<std::unique_ptr<Session>> sessions_;
  std::vector<std::unique_ptr<Group>> groups_;  // left before the sessions
};

TEST_F(Hostile, DispatchesOfTheMostChoicesTakeTurns) {
  attack({[&] {
            ManyChoices many(socket());
            for (int round = 0; round < 3; ++round) many.dispatch_all();
          },
          [&] {  // another user of the device, whose every request must be answered in time
            const Session session(socket(), "host:0");
            const double end = now_s() + 3;
            for (int i = 0; now_s() < end; ++i) {
              const std::string name = "comes-and-goes-" + std::to_string(i);
              epd_group_config_t config = many_choices(name.c_str());
              config.max_tokens = 8;
              const Group group(session, config);
            }
          }},
         170);
}

std::uint64_t virtual_bytes(pid_t pid) {
  std::ifstream statm("/proc/" + std::to_string(pid) + "/statm");
  std::uint64_t pages = 0;
  statm >> pages;
  return pages * 4096;
}

TEST_F(Hostile, AnEngineThatCanMapNoMoreRefusesTheRank) {
  attack([&] {
    const Session session(socket(), "host:0");
    for (const pid_t engine : daemon().engines()) {  // room for what the bystander does, and not for an arena
      const rlimit limit{virtual_bytes(engine) + (std::uint64_t{96} << 20), RLIM_INFINITY};
      RANK_CHECK(::prlimit(engine, RLIMIT_AS, &limit, nullptr) == 0, "prlimit");
    }
    epd_group_config_t large = many_choices("too-large-to-map");
    large.hidden = 1024;
    epd_group_t* refused = nullptr;
    must(epd_group_join(session.get(), &large, &refused), "join", EPD_RESOURCE_EXHAUSTED);
    must_say("mapping");
    for (const pid_t engine : daemon().engines()) {
      const rlimit limit{RLIM_INFINITY, RLIM_INFINITY};
      RANK_CHECK(::prlimit(engine, RLIMIT_AS, &limit, nullptr) == 0, "prlimit");
    }
    const Group group(session, large);  // the same again, where there is space
  });
}

TEST_F(Hostile, RoutingsOverTheLimitAreRefusedAtTheJoin) {
  if (!root()) GTEST_SKIP() << "needs root, to become another user";
  attack([&] {
    become(kMallory);
    const Session session(socket(), "host:0");
    const Group group(session, many_choices("within"));
    epd_group_config_t more = many_choices("beyond");
    more.depth = 16;
    epd_group_t* refused = nullptr;
    must(epd_group_join(session.get(), &more, &refused), "join", EPD_RESOURCE_EXHAUSTED);
    for (const char* word :
         {"routings of this rank", "user 61001 has", "allowed: 134217728", "access.rule 2"})
      must_say(word);
  });
}

}  // namespace
}  // namespace epd::test
