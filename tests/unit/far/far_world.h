// A group's far sides on several nodes, whose messages travel in any order, each once.
#pragma once

#include "far/far_group.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <utility>
#include <vector>

namespace epd::far::testing_world {

inline abi::GroupShape small_shape(std::uint32_t ranks, std::uint32_t depth) {
  abi::GroupShape shape{ranks, 2 * ranks, 8, 128, 2, depth, {}, {}, {}};
  shape.sum_ranks = 1;
  return shape;
}

// One engine on each node.
class World {
  class Books final : public Ledger {
   public:
    abi::FarCounters& counters(EngineId engine) override { return counters_[engine]; }
    std::string node_name(EngineId engine) const override { return "node-" + std::to_string(engine - 100); }

   private:
    std::map<EngineId, abi::FarCounters> counters_;
  };

 public:
  World(const abi::GroupShape& shape, std::vector<std::uint32_t> nodes, std::uint32_t seed,
        abi::FarCheck check = abi::FarCheck::kCrc, std::uint64_t gap_ns = 0)
      : nodes_(std::move(nodes)), random_(seed) {
    for (const std::uint32_t node : nodes_) engines_.push_back(100 + node);
    for (const std::uint32_t node : nodes_) {
      if (groups_.contains(node)) continue;
      ports_[node] = std::make_unique<PortOf>(*this, 100 + node);
      FarGroup::Facts facts{kGroup, shape, 100 + node, 1024, 3072, &ledgers_[node], check, gap_ns};
      groups_[node] = std::make_unique<FarGroup>(facts, *ports_[node]);
    }
  }

  static constexpr std::uint64_t kGroup = 5;

  void begin(std::uint64_t epoch, std::uint64_t first_index = 0) {
    for (auto& [node, group] : groups_) group->begin(of(epoch, node, first_index));
  }
  FarGroup::Epoch of(std::uint64_t epoch, std::uint32_t node, std::uint64_t first_index = 0) const {
    return {epoch, first_index, nodes_, engines_, {}, node, key(epoch)};
  }
  static EpochKey key(std::uint64_t epoch) { return {epoch * 77, epoch * 99}; }
  FarGroup& group(std::uint32_t node) { return *groups_.at(node); }
  FarGroup& of_rank(std::uint32_t rank) { return group(nodes_[rank]); }
  std::uint32_t below(std::uint32_t bound) { return static_cast<std::uint32_t>(random_() % bound); }

  // Everybody's turn, and one message if there is one. False: nothing moves.
  bool step() {
    bool moved = false;
    now_ns_ += 10'000;
    for (auto& [node, group] : groups_) moved |= group->step(now_ns_);
    if (on_its_way_.empty()) return moved;
    const std::size_t which = random_() % on_its_way_.size();
    std::swap(on_its_way_[which], on_its_way_.back());
    const auto [from, message] = std::move(on_its_way_.back());
    on_its_way_.pop_back();
    deliver(from, message->engine, message->header, message->bytes());
    return true;
  }
  void deliver(EngineId from, EngineId to, const abi::FarHeader& header, std::span<const std::byte> body) {
    auto memory = std::make_unique<std::byte[]>(body.size() + 1);
    if (!body.empty()) std::memcpy(memory.get(), body.data(), body.size());
    const Body held{memory.get(), body.size(), ++last_hold_};
    held_[last_hold_] = std::move(memory);
    group(static_cast<std::uint32_t>(to - 100)).received(from, std::as_bytes(std::span(&header, 1)), held);
  }
  // The ledger of that node's engine.
  Ledger& ledger(std::uint32_t node) { return ledgers_.at(node); }
  std::size_t on_its_way() const { return on_its_way_.size(); }
  void lose_all() { on_its_way_.clear(); }
  std::size_t held() const { return held_.size(); }

 private:
  class PortOf final : public Port {
   public:
    PortOf(World& world, EngineId engine) : world_(world), engine_(engine) {}
    bool send(std::unique_ptr<Message>& message) override {
      if (world_.below(5) == 0) return false;
      world_.on_its_way_.emplace_back(engine_, std::move(message));
      return true;
    }
    void release(const Body& body) override {
      ASSERT_EQ(world_.held_.erase(body.hold), 1u) << "released twice";
    }

   private:
    World& world_;
    const EngineId engine_;
  };

  std::vector<std::uint32_t> nodes_;
  std::vector<EngineId> engines_;
  std::mt19937 random_;
  std::map<std::uint32_t, std::unique_ptr<PortOf>> ports_;
  std::vector<std::pair<EngineId, std::unique_ptr<Message>>> on_its_way_;
  std::map<std::uint64_t, std::unique_ptr<std::byte[]>> held_;
  std::map<std::uint32_t, Books> ledgers_;  // by node
  std::map<std::uint32_t, std::unique_ptr<FarGroup>> groups_;
  std::uint64_t last_hold_ = 0;
  std::uint64_t now_ns_ = 1;
};

}  // namespace epd::far::testing_world
