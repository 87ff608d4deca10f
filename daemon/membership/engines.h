// Engines that come up, get ready, wait, do not answer, and die.
#pragma once

#include "breaks.h"
#include "departures.h"
#include "desk.h"
#include "forming.h"
#include "group_table.h"
#include "members.h"
#include "nodes.h"
#include "pairs.h"
#include "rejoins.h"
#include "steps.h"

#include <cstdint>
#include <string>

namespace epd::membership {

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

  // What engines owe the group and is late. May forget the group.
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
