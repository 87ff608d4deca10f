// What an engine keeps of past dispatches: a bounded number in memory, all of them in the exchange arena.
#include "route.h"
#include "engine_fixture.h"

#include <sys/mman.h>
#include <memory>
#include <vector>

namespace epd::test {
namespace {

// Of so many choices that few routings are kept.
constexpr abi::GroupShape kLarge = [] {
  abi::GroupShape shape = kShape;
  shape.num_ranks = 1;
  shape.num_experts = 4;
  shape.max_tokens = 65536;
  shape.topk = 32;
  shape.depth = 2;
  shape.layout = abi::Layout::kPacked;
  shape.num_handles = 6;
  return shape;
}();
static_assert(abi::kept_routes(kLarge) == 2 && kLarge.num_routes() == 8);

class ExchangeArena {
 public:
  explicit ExchangeArena(const abi::GroupShape& shape)
      : fd_(make_sealed_memfd("test", abi::ExchangeArenaLayout(shape).total_bytes).value()),
        mapping_(Mapping::map(fd_.get(), abi::ExchangeArenaLayout(shape).total_bytes, Access::kReadWrite)
                     .value()) {}
  std::byte* bytes() const { return mapping_.bytes(); }

 private:
  UniqueFd fd_;
  Mapping mapping_;
};

// A dispatch of 3 tokens, that chose `expert` and nothing else.
void plan_for(std::int32_t expert, Route& route) {
  std::vector<std::int32_t> choices(3 * std::size_t{kLarge.topk}, -1);
  for (std::size_t token = 0; token < 3; ++token) choices[token * kLarge.topk] = expert;
  kernels::RoutingInput input;
  input.topk_idx = choices.data();
  input.per_expert = true;
  input.num_tokens = 3;
  input.topk = kLarge.topk;
  input.num_ranks = 1;
  input.num_experts = kLarge.num_experts;
  ASSERT_FALSE(kernels::build_routing_plan(input, route.plan).bad);
  route.placement.reset(1, kLarge.num_experts, true);
}

void keep(RouteTable& table, std::uint32_t record, const std::shared_ptr<Route>& route, std::byte* arena) {
  table.begin_keep(record, *route, arena);
  std::size_t done = 0;
  while (!table.keep_choices(record, *route, arena, done)) {
  }
  table.end_keep(record, route, arena);
}

// Unbounded, they were real memory that no quota counted: 33 MB for each of up to 4112 records of a rank.
TEST(RouteTable, KeepsSoManyInMemoryAndReadsOthersBack) {
  const ExchangeArena arena(kLarge);
  RouteTable table(kLarge);
  std::vector<std::weak_ptr<Route>> made;
  for (std::uint32_t record = 0; record < kLarge.num_routes(); ++record) {
    std::shared_ptr<Route> route = table.renew(record);
    made.push_back(route);
    plan_for(static_cast<std::int32_t>(record % 4), *route);
    route->handle = 100 + record + 1;
    route->epoch = 1;
    keep(table, record, route, arena.bytes());
    table.give_back(std::move(route));
  }
  std::vector<const Route*> alive;
  for (const auto& route : made) {
    if (!route.expired()) alive.push_back(route.lock().get());
  }
  std::sort(alive.begin(), alive.end());
  alive.erase(std::unique(alive.begin(), alive.end()), alive.end());
  EXPECT_LE(alive.size(), abi::kept_routes(kLarge) + kLarge.depth);

  EXPECT_NE(table.find(7, 107), nullptr);
  EXPECT_EQ(table.find(0, 100), nullptr) << "the one used longest ago";
  const auto saved = table.saved(0, 100, arena.bytes());
  ASSERT_TRUE(saved.has_value());
  EXPECT_FALSE(table.saved(0, 99, arena.bytes()).has_value()) << "of another dispatch";
  std::shared_ptr<Route> back = table.renew(0);
  ASSERT_FALSE(kernels::build_routing_plan(*saved, back->plan).bad);
  ASSERT_TRUE(table.restore(0, 100, arena.bytes(), back));
  EXPECT_EQ(back->plan.expert_counts, (std::vector<std::uint32_t>{3, 0, 0, 0}));
  EXPECT_EQ(table.find(0, 100), back);
}

TEST(RouteTable, RoutingsOfNobodyTakeNoMore) {
  RouteTable table(kLarge);
  std::shared_ptr<Route> first = table.empty(1);
  const Route* const place = first.get();
  table.give_back(std::move(first));
  std::shared_ptr<Route> again = table.empty(2);
  EXPECT_EQ(again.get(), place);
  EXPECT_EQ(again->plan.num_tokens(), 0u);
  EXPECT_EQ(again->handle, 3u);
}

TEST(RouteTable, WhatWasOverwrittenWhileItWasReadBackIsStale) {
  const ExchangeArena arena(kLarge);
  RouteTable table(kLarge);
  std::shared_ptr<Route> route = table.renew(5);
  plan_for(1, *route);
  route->handle = 8;
  keep(table, 5, route, arena.bytes());
  RouteTable later(kLarge);  // as after a restart
  const auto saved = later.saved(5, 7, arena.bytes());
  ASSERT_TRUE(saved.has_value());
  std::shared_ptr<Route> back = later.renew(5);
  ASSERT_FALSE(kernels::build_routing_plan(*saved, back->plan).bad);
  route->handle = 9;
  table.begin_keep(5, *route, arena.bytes());
  EXPECT_FALSE(later.restore(5, 7, arena.bytes(), back));
}

class EngineRoutes : public EngineFixture {};

// Dispatches under more handles than are kept in memory; then each is combined.
TEST_F(EngineRoutes, RoutingsThatLeftMemoryAreUsedAgain) {
  RawSession session(300);
  session.add_to(*engine_view_[0]);
  const RawGroup group(300, kLarge);
  group.add_to_engine({engine_view_[0]}, {&session}, 0, false);
  const auto run = [&](Op op, std::uint32_t record, std::uint32_t num_tokens, std::uint64_t handle) {
    abi::Submission s = submission(0, op, 0);
    s.route = record;
    s.num_tokens = num_tokens;
    s.handle = handle;
    session.submit(s);
    const auto done = session.wait(30000);
    EXPECT_TRUE(done.has_value() && done->status == StatusCode::kOk) << "record " << record;
    return done.value_or(abi::Completion{});
  };
  const auto value = [](std::uint32_t record, std::uint32_t token) {
    return kernels::float_to_bf16(static_cast<float>(10 * record + token + 1));
  };
  for (std::uint32_t record = 2; record < kLarge.num_routes(); ++record) {
    auto* choices = group.region<std::int32_t>(0, 0, Region::kTopkIdx);
    std::fill_n(choices, 3 * kLarge.topk, -1);
    for (std::uint32_t token = 0; token < 3; ++token)  // each record has an order of its own
      choices[token * kLarge.topk] = static_cast<std::int32_t>((record + token * record) % 4);
    EXPECT_EQ(run(Op::kDispatch, record, 3, 0).num_recv_rows, 3u);
  }
  for (std::uint32_t record = 2; record < kLarge.num_routes(); ++record) {
    // Rows lie by expert, and within one by token.
    std::vector<std::uint32_t> order = {0, 1, 2};
    std::stable_sort(order.begin(), order.end(), [&](std::uint32_t a, std::uint32_t b) {
      return (record + a * record) % 4 < (record + b * record) % 4;
    });
    auto* y = group.region<std::uint16_t>(0, 0, Region::kY);
    for (std::uint32_t row = 0; row < 3; ++row)
      std::fill_n(y + std::size_t{row} * kLarge.hidden, kLarge.hidden, value(record, order[row]));
    run(Op::kCombine, record, 0, record - 2);
    const auto* out = group.region<std::uint16_t>(0, 0, Region::kOut);
    for (std::uint32_t token = 0; token < 3; ++token)
      EXPECT_EQ(out[std::size_t{token} * kLarge.hidden], value(record, token)) << record << ' ' << token;
  }
}

// An engine that could not map an arena ended, and so did its successors, which were told of the same groups.
TEST_F(EngineRoutes, AnArenaThatCantBeMappedCostsItsRankAndNotTheEngine) {
  constexpr std::uint64_t kId = 301;
  abi::GroupBegin begin{};
  begin.group_id = kId;
  begin.epoch = 1;
  begin.shape = kShape;
  begin.shape.num_ranks = 1;
  EngineThread& engine = *engine_view_[0];
  engine.send(LinkType::kGroupBegin, begin);
  const UniqueFd made = make_sealed_memfd("test", abi::UserArenaLayout(begin.shape).total_bytes).value();
  const UniqueFd unusable = reopen_read_only(made.get()).value();  // the kernel refuses to map it for writing
  engine.send(LinkType::kGroupRank, abi::GroupRank{kId, 0, 0, 1, 1, 0, {}},
              {unusable.get(), unusable.get(), engine.bell().get(), engine.page().get()});
  const auto refused = engine.expect(LinkType::kRankRefused);
  ASSERT_TRUE(refused.has_value());
  EXPECT_EQ(refused->read<abi::RankRefused>().value().group_id, kId);
  engine.send(LinkType::kRemoveGroup, abi::GroupRef{kId});
  EXPECT_TRUE(engine.expect(LinkType::kGroupRemoved).has_value()) << "it goes on";
}

}  // namespace
}  // namespace epd::test
