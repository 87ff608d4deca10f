// Windows and credits: alone, and in groups whose operations send batches that arrive in any order.
#include "far/flow.h"

#include "far_world.h"

#include <deque>
#include <iostream>

namespace epd::far {
namespace {

TEST(FarFlow, NoBatchOfALaterOperationBeforeTheEarlierHasTakenAll) {
  Window window(2);
  window.enter(10);
  window.enter(11);
  EXPECT_EQ(window.available(11), 0u);
  EXPECT_EQ(window.available(10), 2u);
  window.take(10);
  window.take(10);
  EXPECT_EQ(window.available(10), 0u);
  window.leave(10);
  EXPECT_EQ(window.available(11), 0u) << "no credit";
  EXPECT_TRUE(window.give_back(1));
  EXPECT_EQ(window.available(11), 1u);
  EXPECT_FALSE(window.give_back(2)) << "so many are not out";
  EXPECT_EQ(window.credits(), 1u);
}

TEST(FarFlow, CreditsAreOwedUntilAMessageTakesThemAlong) {
  Debt debt(4);
  for (int i = 0; i < 4; ++i) EXPECT_TRUE(debt.receive());
  EXPECT_FALSE(debt.receive()) << "beyond the window";
  debt.settle(1000);
  EXPECT_FALSE(debt.is_due(1000));
  EXPECT_TRUE(debt.is_due(1000 + Debt::kPatienceNs));
  debt.settle(2000);
  EXPECT_TRUE(debt.is_due(2000)) << "half the window";
  EXPECT_FALSE(debt.receive()) << "owed is not given back";
  EXPECT_EQ(debt.take(), 2u);
  EXPECT_EQ(debt.due_ns(), 0u);
  EXPECT_TRUE(debt.receive());
}

// An operation of one rank, as a dispatch or a combine uses the windows: sends so many batches to each
// gateway, answers what comes; of a combine by sums in the order of the asks.
class FlowOperation final : public Receiver {
 public:
  FlowOperation(testing_world::World& world, std::uint32_t rank, std::uint64_t index, bool combine)
      : world_(world),
        group_(world.of_rank(rank)),
        rank_(rank),
        tag_(abi::op_tag(1, index)),
        combine_(combine) {
    for (const std::uint32_t node : group_.span().far_nodes()) {
      const std::uint32_t gateway = group_.span().gateway(rank, node);
      to_send_[gateway] = batches_of(rank, gateway);
      awaited_ += combine_ ? to_send_[gateway] : 0;
      group_.rows_window(rank, gateway).enter(tag_);
    }
    for (const std::uint32_t far_rank : group_.span().served_by(rank)) {
      owed_[far_rank] = batches_of(far_rank, rank);
      if (combine_) group_.sums_window(rank, far_rank).enter(tag_);
    }
    group_.open(rank, tag_, *this);
  }
  ~FlowOperation() override {
    group_.close(rank_, tag_);
    for (const Arrival& arrival : held_) group_.settle(arrival);
  }

  Drop receive(const Arrival& arrival) override {
    if (arrival.header.type == abi::FarType::kSums) --awaited_;
    held_.push_back(arrival);
    return Drop::kNone;
  }

  void step() {
    for (auto& [gateway, left] : to_send_) {
      if (left != 0 && group_.room_for_rows(rank_, gateway, tag_) != 0) {
        post(combine_ ? abi::FarType::kAsk : abi::FarType::kRows, gateway,
             group_.take_rows(rank_, gateway, tag_));
        --left;
      }
      if (left == 0) group_.rows_window(rank_, gateway).leave(tag_);
    }
    if (held_.empty()) return;
    std::swap(held_[world_.below(static_cast<std::uint32_t>(held_.size()))], held_.back());
    const Arrival arrival = held_.back();
    if (arrival.header.type == abi::FarType::kAsk) {
      const std::uint32_t owner = arrival.header.from_rank;
      if (group_.room_for_sums(rank_, owner, tag_) == 0) return;
      post(abi::FarType::kSums, owner, group_.take_sums(rank_, owner, tag_));
    }
    held_.pop_back();
    group_.settle(arrival);
    if (arrival.header.type != abi::FarType::kSums && --owed_[arrival.header.from_rank] == 0 && combine_)
      group_.sums_window(rank_, arrival.header.from_rank).leave(tag_);
  }

  bool ended() {
    for (auto& [far_rank, left] : owed_) {
      if (left == 0 && combine_) group_.sums_window(rank_, far_rank).leave(tag_);
    }
    const auto none = [](const auto& entry) { return entry.second == 0; };
    return held_.empty() && awaited_ == 0 && std::all_of(to_send_.begin(), to_send_.end(), none) &&
           std::all_of(owed_.begin(), owed_.end(), none);
  }

 private:
  std::uint32_t batches_of(std::uint32_t from, std::uint32_t to) const {
    return static_cast<std::uint32_t>((from * 7 + to * 3 + tag_) % 6);
  }
  void post(abi::FarType type, std::uint32_t to, Buffer buffer) {
    abi::FarHeader header{};
    header.type = type;
    header.tag = tag_;
    header.from_rank = static_cast<std::uint16_t>(rank_);
    header.to_rank = static_cast<std::uint16_t>(to);
    header.records = 1;
    const FarSizes& sizes = group_.sizes();
    header.body_bytes = type == abi::FarType::kRows  ? sizes.row_stride[0]
                        : type == abi::FarType::kAsk ? sizes.ask_stride
                                                     : sizes.sum_stride[0];
    group_.post(header, std::move(buffer));
  }

  testing_world::World& world_;
  FarGroup& group_;
  const std::uint32_t rank_;
  const std::uint64_t tag_;
  const bool combine_;
  std::map<std::uint32_t, std::uint32_t> to_send_;  // by gateway
  std::map<std::uint32_t, std::uint32_t> owed_;     // by rank served
  std::uint32_t awaited_ = 0;
  std::vector<Arrival> held_;
};

// Groups of up to four nodes; each rank has up to `depth` operations in flight, which dispatch and combine in
// turn. Window::take and Debt::settle check that nothing goes below zero.
TEST(FarFlow, EverythingArrivesInAnyOrderAndAllCreditsComeBack) {
  for (std::uint32_t seed = 1; seed <= 200; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    const std::uint32_t ranks = 2 + random() % 5;
    const std::uint32_t depth = 1 + random() % 3;
    std::vector<std::uint32_t> nodes(ranks);
    for (std::uint32_t& node : nodes) node = random() % 4;
    testing_world::World world(testing_world::small_shape(ranks, depth), nodes, seed);
    world.begin(1);
    constexpr std::uint64_t kOperations = 8;
    std::vector<std::deque<std::unique_ptr<FlowOperation>>> in_flight(ranks);
    std::vector<std::uint64_t> begun(ranks), ended(ranks);
    std::uint64_t turn = 0;
    const auto all_ended = [&](std::uint64_t index) {
      return std::all_of(ended.begin(), ended.end(), [&](std::uint64_t n) { return n >= index; });
    };
    for (; turn < 100'000 && !all_ended(kOperations); ++turn) {
      world.step();
      const std::uint32_t rank = world.below(ranks);
      auto& operations = in_flight[rank];
      // As the blocks have it: operation i + depth begins when i has ended everywhere.
      if (begun[rank] < kOperations && begun[rank] < ended[rank] + depth &&
          (begun[rank] < depth || all_ended(begun[rank] - depth + 1)))
        operations.push_back(
            std::make_unique<FlowOperation>(world, rank, begun[rank]++, begun[rank] % 2 == 0));
      for (const auto& operation : operations) operation->step();
      while (!operations.empty() && operations.front()->ended()) {
        operations.pop_front();
        ++ended[rank];
      }
    }
    ASSERT_TRUE(all_ended(kOperations)) << "nothing moves any more";
    for (int i = 0; i < 2000; ++i) world.step();
    for (const std::uint32_t node : nodes) {
      EXPECT_EQ(world.group(node).unsettled(), "");
      EXPECT_EQ(world.group(node).drops().text(), "none");
    }
    EXPECT_EQ(world.held(), 0u);
    if (::testing::Test::HasFailure()) return;
  }
}

}  // namespace
}  // namespace epd::far
