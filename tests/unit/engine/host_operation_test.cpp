// The operation that a host carries out, and what it keeps of past dispatches: a bounded number of plans in
// memory, all routings in the exchange arena.
#include "host_operation.h"

#include "engine_fixture.h"

#include "proto/route_memory.h"

#include <algorithm>
#include <array>
#include <memory>
#include <vector>

namespace epd::test {
namespace {

using device::HostOperation;
using device::HostPlan;
using device::HostPlans;

// The group has so many choices that few routings are kept.
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

constexpr std::uint64_t tag_of(std::uint64_t index) {
  return abi::op_tag(1, index);
}

// Unbounded, they were real memory that no quota counted: 33 MB for each of up to 4112 records of a rank.
TEST(HostPlans, KeepsSoManyInMemory) {
  HostPlans plans(abi::kept_routes(kLarge));
  std::vector<std::weak_ptr<HostPlan>> made;
  for (std::uint32_t record = 0; record < kLarge.num_routes(); ++record) {
    std::shared_ptr<HostPlan> plan = plans.renew(record);
    made.push_back(plan);
    plan->tag = tag_of(100 + record);
    plans.keep(record, plan);
    plans.give_back(std::move(plan));
  }
  std::vector<const HostPlan*> alive;
  for (const auto& plan : made) {
    if (!plan.expired()) alive.push_back(plan.lock().get());
  }
  std::sort(alive.begin(), alive.end());
  alive.erase(std::unique(alive.begin(), alive.end()), alive.end());
  EXPECT_LE(alive.size(), abi::kept_routes(kLarge) + kLarge.depth);

  EXPECT_NE(plans.find(7, tag_of(107)), nullptr);
  EXPECT_EQ(plans.find(7, tag_of(106)), nullptr) << "of another dispatch";
  EXPECT_EQ(plans.find(0, tag_of(100)), nullptr) << "the one used longest ago";
  EXPECT_EQ(plans.take_all().size(), alive.size());
  EXPECT_EQ(plans.find(7, tag_of(107)), nullptr);
}

TEST(HostPlans, PlansOfNobodyTakeNoMore) {
  HostPlans plans(2);
  std::shared_ptr<HostPlan> first = plans.renew(1);
  first->tag = tag_of(1);
  const HostPlan* const place = first.get();
  plans.give_back(std::move(first));
  const std::shared_ptr<HostPlan> again = plans.renew(2);
  EXPECT_EQ(again.get(), place);
  EXPECT_EQ(again->tag, 0u);
}

// A group of one rank, whose memory is the test's.
class HostOperations : public ::testing::Test, private device::OperationPeers {
 protected:
  static constexpr std::size_t kTokens = 3;
  static constexpr std::size_t kChoices = 2;
  static constexpr std::size_t kHidden = 128;

  HostOperations() {
    own_.ready = &ready_;
    own_.arrived = &arrived_;
    own_.announcement = &announcement_;
    own_.rank_counts = &rank_counts_;
    own_.expert_counts = expert_counts_.data();
    own_.target = {recv_x_.data(), nullptr, recv_idx_.data(), recv_weights_.data(), recv_src_.data()};
    own_.source = {recv_x_.data(), nullptr};
  }

  kernels::Peer peer(std::uint32_t) const override { return own_; }
  std::span<const std::uint8_t> masked() const override { return {}; }
  void ring() const override {}

  kernels::Operation operation(std::uint64_t index, std::uint64_t routing) {
    kernels::Operation op;
    op.shape.num_ranks = 1;
    op.shape.num_experts = 4;
    op.shape.topk = kChoices;
    op.shape.hidden = kHidden;
    op.shape.recv_rows = kTokens;
    op.shape.format.hidden = kHidden;
    op.shape.format.x_bytes = op.shape.format.row_bytes = kHidden * 2;
    op.num_tokens = kTokens;
    op.tag = op.announcement.tag = tag_of(index);
    op.announcement.routing = routing;
    op.routing = {topk_.data(), nullptr, placement_.data(), &head_, nullptr, index + 1, 1};
    op.topk_idx = choices_.data();
    op.x = x_.data();
    op.out = out_.data();
    return op;
  }
  std::unique_ptr<HostOperation> begin(kernels::Kind kind, const kernels::Operation& op) {
    return std::make_unique<HostOperation>(kind, op, HostOperation::Needs{*this, plans_, 0, {}});
  }
  static void run(HostOperation& operation) {
    for (int step = 0; step < 1000 && !operation.ended(); ++step) operation.advance();
    ASSERT_TRUE(operation.ended());
  }

  kernels::Peer own_;
  abi::SignalLine ready_{};
  abi::SignalLine arrived_{};
  abi::OpAnnouncement announcement_{};
  std::uint32_t rank_counts_ = 0;
  std::array<std::uint32_t, 4> expert_counts_{};
  std::array<std::int32_t, kTokens * kChoices> choices_{0, 1, -1, -1, 3, -1};
  std::array<std::int32_t, kTokens * kChoices> topk_{};
  std::array<std::int32_t, 64> placement_{};
  abi::RoutingRecord head_{};
  alignas(64) std::array<std::uint16_t, kTokens * kHidden> x_{};
  alignas(64) std::array<std::uint16_t, kTokens * kHidden> recv_x_{};
  alignas(64) std::array<std::uint16_t, kTokens * kHidden> out_{};
  std::array<std::int32_t, kTokens * kChoices> recv_idx_{};
  std::array<float, kTokens * kChoices> recv_weights_{};
  std::array<std::int32_t, kTokens * 2> recv_src_{};
  HostPlans plans_{2};
};

TEST_F(HostOperations, AnEngineThatHasForgottenThePlanReadsItBack) {
  for (std::size_t token = 0; token < kTokens; ++token)
    std::fill_n(&x_[token * kHidden], kHidden, kernels::float_to_bf16(static_cast<float>(token + 1)));
  const auto dispatch = begin(kernels::Kind::kDispatch, operation(7, 0));
  run(*dispatch);
  ASSERT_EQ(dispatch->result().error, kernels::OpError::kNone);
  EXPECT_EQ(dispatch->result().num_recv_rows, 2u) << "one token goes nowhere";
  EXPECT_EQ(head_.handle, 8u);
  EXPECT_EQ(head_.num_recv_rows, 2u);

  plans_.take_all();  // as after a restart
  EXPECT_EQ(plans_.find(0, tag_of(7)), nullptr);
  const auto combine = begin(kernels::Kind::kCombine, operation(8, tag_of(7)));
  run(*combine);
  ASSERT_EQ(combine->result().error, kernels::OpError::kNone);
  EXPECT_EQ(out_[0], x_[0]);
  EXPECT_EQ(out_[kHidden], 0) << "of the token that went nowhere";
  EXPECT_EQ(out_[2 * kHidden], x_[2 * kHidden]);
  EXPECT_NE(plans_.find(0, tag_of(7)), nullptr) << "it is kept again";
}

TEST_F(HostOperations, OneThatIsAbortedSaysWhereItWasAndNamesWhoItWaitedFor) {
  const auto dispatch = begin(kernels::Kind::kDispatch, operation(7, 0));
  while (dispatch->stage() != abi::OpStage::kWaitReady) dispatch->advance();
  ready_.tag = 0;  // as if the rank had not come
  EXPECT_FALSE(dispatch->advance());
  EXPECT_EQ(dispatch->awaited(0), 0u);
  EXPECT_EQ(dispatch->awaited(1), device::OperationInFlight::kNobody);
  dispatch->abort();
  EXPECT_TRUE(dispatch->ended());
  EXPECT_EQ(dispatch->result().error, kernels::OpError::kAborted);
  EXPECT_EQ(dispatch->result().failed_rank, 0);
  EXPECT_EQ(dispatch->stage(), abi::OpStage::kWaitReady);
  EXPECT_EQ(dispatch->awaited(0), 0u);
  EXPECT_EQ(head_.handle, 0u) << "no record was written";
}

class EngineRoutes : public EngineFixture {
 protected:
  EngineRoutes() : EngineFixture("host") {}
};

// Dispatches under more handles than are kept in memory; then each is combined.
TEST_F(EngineRoutes, RoutingsThatLeftMemoryAreUsedAgain) {
  RawSession session(300);
  session.add_to(*engine_view_[0]);
  const RawGroup group(300, kLarge);
  group.add_to_engine({engine_view_[0]}, {&session}, 0, false);
  Ringer ringer = group.host_ringer(0, session);
  const auto run = [&](Op op, std::uint32_t record, std::uint32_t num_tokens) {
    abi::Call call = call_on(op, 0);
    call.route = record;
    const std::uint32_t number = ringer.ring(call, num_tokens, 1);
    EXPECT_TRUE(ringer.ends_well(number, 30'000)) << "record " << record;
    return ringer.end(number).num_recv_rows;
  };
  const auto value = [](std::uint32_t record, std::uint32_t token) {
    return kernels::float_to_bf16(static_cast<float>(10 * record + token + 1));
  };
  for (std::uint32_t record = 2; record < kLarge.num_routes(); ++record) {
    auto* choices = group.region<std::int32_t>(0, 0, Region::kTopkIdx);
    std::fill_n(choices, 3 * kLarge.topk, -1);
    for (std::uint32_t token = 0; token < 3; ++token)  // each record has an order of its own
      choices[std::size_t{token} * kLarge.topk] = static_cast<std::int32_t>((record + token * record) % 4);
    EXPECT_EQ(run(Op::kDispatch, record, 3), 3u);
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
    run(Op::kCombine, record, 0);
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
  engine.send(LinkType::kGroupRank, abi::GroupRank{kId, 0, 0, 1, 0},
              {unusable.get(), unusable.get(), engine.bell().get(), engine.page().get()});
  const auto refused = engine.expect(LinkType::kRankRefused);
  ASSERT_TRUE(refused.has_value());
  EXPECT_EQ(refused->read<abi::RankRefused>().value().group_id, kId);
  engine.send(LinkType::kRemoveGroup, abi::GroupRef{kId});
  EXPECT_TRUE(engine.expect(LinkType::kGroupRemoved).has_value()) << "it goes on";
}

}  // namespace
}  // namespace epd::test
