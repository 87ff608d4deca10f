// Engines of different nodes that can't reach each other. What an engine says counts if the other one has not
// died within a moment: then its group breaks, and shows in its next epoch whether the two reach each other
// again. If they do not, one of the two nodes is put out.
#pragma once

#include "breaks.h"
#include "departures.h"
#include "desk.h"
#include "group_table.h"
#include "membership/group.h"
#include "nodes.h"

#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace epd::membership {

class Pairs {
 public:
  // For an engine's death to be heard of, and for what others say of the same fault.
  static constexpr std::uint64_t kCollectMs = 100;
  // A pair for which its group has broken so often within so long does not reach each other, though each of
  // these breaks went well.
  static constexpr std::size_t kMaxBreaks = 3;
  static constexpr std::uint64_t kBreaksMs = 60'000;

  Pairs(Desk& desk, GroupTable& groups, const Nodes& nodes, Breaks& breaks, Departures& departures)
      : desk_(desk), groups_(groups), nodes_(nodes), breaks_(breaks), departures_(departures) {}

  void on(const PeerLost& event);
  void engine_down(EngineId engine);
  void node_lost(std::uint32_t node);
  // May forget groups.
  void tick();
  std::uint64_t next_due_ns() const;

 private:
  using Pair = std::pair<EngineId, EngineId>;  // who says it, of whom
  struct Report {
    Pair pair;
    std::string text;
    abi::PeerLoss loss{};
    std::uint64_t group_id = 0;
    std::uint64_t epoch = 0;
    std::uint64_t due_ns = 0;
  };

  template <typename Test>
  void forget(const Test& test);
  void judge(Group& group, const std::vector<Report>& reports);
  bool breaks_too_often(const Group& group, Report& report);
  void count_break(const Group& group, const std::vector<Report>& reports);
  void put_out(Group& group, const std::vector<Report>& broken);
  std::uint32_t worst_node(const Group& group, const std::vector<Report>& broken) const;
  std::string in_words(const Report& report) const;

  Desk& desk_;
  GroupTable& groups_;
  const Nodes& nodes_;
  Breaks& breaks_;
  Departures& departures_;
  std::vector<Report> reports_;
  // The last epoch of a group that was broken since one of the pair does not reach the other.
  std::map<std::pair<std::uint64_t, Pair>, std::uint64_t> tried_;
  // When a group was broken for a pair, whoever of the two said it: the lower one first.
  std::map<std::pair<std::uint64_t, Pair>, std::deque<std::uint64_t>> breaks_ns_;
};

}  // namespace epd::membership
