#pragma once

#include "breaks.h"
#include "departures.h"
#include "forming.h"
#include "joins.h"
#include "membership/group.h"
#include "steps.h"
#include "tables.h"

#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace epd::membership {

// Engines of different nodes that can't reach each other. A report counts if neither engine dies within a
// moment. Then the group breaks, and its next epoch shows whether the two reach each other again. If they do
// not, one of the two nodes is put out.
class Pairs {
 public:
  // Time for the engine's death, or other reports of the same fault, to arrive.
  static constexpr std::uint64_t kCollectMs = 100;
  // A pair for which the group has broken this often within this time counts as out of reach, even if each of
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
  using Pair = std::pair<EngineId, EngineId>;  // the reporter, and the engine that it can't reach
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
  // The last epoch of each group that was broken because the pair was out of reach.
  std::map<std::pair<std::uint64_t, Pair>, std::uint64_t> tried_;
  // When a group was broken for a pair, whichever of the two reported it; the lower one is first.
  std::map<std::pair<std::uint64_t, Pair>, std::deque<std::uint64_t>> breaks_ns_;
};

// Engines that come up, get ready, wait, do not answer, and die.
class Engines {
 public:
  struct Parts {
    GroupTable& groups;
    Nodes& nodes;
    Members& members;
    Steps& steps;
    Breaks& breaks;
    Forming& forming;
    Rejoins& rejoins;
    Departures& departures;
    Pairs& pairs;
  };
  Engines(Desk& desk, const Parts& parts) : desk_(desk), parts_(parts) {}

  void on(const EngineUp& event);
  void on(const EngineDown& event);
  void on(const GroupReady& event);
  void on(const GroupWaits& event);
  void on(const Resumed& event);

  // Acts on answers that engines owe the group and that are late. May forget the group.
  void tick(Group& group);

 private:
  void keep_boards(EngineId engine, const std::vector<BoardIndex>& boards);
  void down_for(Group& group, EngineId engine, const std::string& text);
  std::string said_by(EngineId engine) const;
  bool gives_up(Group& group, EngineId engine, const std::string& text);  // may forget the group
  void not_ready(Group& group, EngineId engine, const Status& status);    // may forget the group
  bool is_overdue(std::uint64_t* due_ns) const;
  bool tick_stopping(Group& group);

  Desk& desk_;
  const Parts parts_;
};

}  // namespace epd::membership
