// Groups that span nodes: results are the same wherever the ranks run.
#include "support/cases.h"
#include "support/client.h"
#include "support/daemon_cluster.h"
#include "support/ranks.h"
#include "support/script.h"

#include <cstdlib>

namespace epd::test {
namespace {

// By rank: its node.
struct Places {
  const char* name;
  std::vector<std::string> nodes;
};

class SamePlaces : public ClusterOfDaemons {
 protected:
  void SetUp() override {
    ASSERT_TRUE(prepare());
    for (const char* letter : {"a", "b", "c", "d"}) start(letter);
    for (const char* letter : {"b", "c", "d"}) await("a", letter, "up");
  }

  void run(const Places& places, std::uint32_t cases);
};

std::uint64_t base_seed() {
  const char* text = std::getenv("EPD_TEST_SEED");
  return text == nullptr ? 1 : std::strtoull(text, nullptr, 10);
}

// Everything follows from the number; `ranks` of a domain.
std::pair<Case, ScriptOptions> numbered_case(std::uint32_t number, std::uint32_t ranks) {
  Case c = random_case(base_seed() * 10'000 + number, ranks);
  c.span = EPD_SPAN_CLUSTER;
  c.sum_ranks = 1 + number % ranks;
  add_formats(c);
  ScriptOptions options;
  options.rounds = 2 + number % 2;
  options.order = static_cast<Order>(number % 5);
  if (options.order == Order::kTraining) c.num_handles = handles_needed(c);
  return {c, options};
}

void SamePlaces::run(const Places& places, std::uint32_t cases) {
  SCOPED_TRACE(places.name);
  const auto ranks = static_cast<std::uint32_t>(places.nodes.size());
  expect_all_ok(run_ranks(ranks, 300, [&](std::uint32_t rank) {
    Daemon& daemon = at(places.nodes[rank]);
    note("attach");
    const Session session(daemon.socket(), daemon.device(rank));
    std::string stats;
    for (std::uint32_t number = 0; number < cases; ++number) {
      const auto [c, options] = numbered_case(number, ranks);
      const std::string name = std::string(places.name) + "." + std::to_string(number);
      note("join " + name + ", " + c.describe());
      const Group group(session, c.config(name.c_str(), rank), c.bound_on(rank));
      stats = ScriptRunner(group, c, rank, options).run().to_string();
    }
    return stats;
  }));
}

// Each is compared with the reference bit by bit, so they are equal to each other.
constexpr std::uint32_t kCases = 200;

TEST_F(SamePlaces, OneNodeOfFour) {
  run({"1x4", {"b", "b", "b", "b"}}, kCases);
}
TEST_F(SamePlaces, TwoNodesOfTwo) {
  run({"2x2", {"a", "a", "b", "b"}}, kCases);
}
TEST_F(SamePlaces, ThreeAndOne) {
  run({"3and1", {"b", "b", "b", "c"}}, kCases);
}
TEST_F(SamePlaces, FourNodesOfOne) {
  run({"4x1", {"d", "c", "b", "a"}}, kCases);
}

}  // namespace
}  // namespace epd::test
