// What the store has to know of a group that spans nodes before anybody is told of it: which ranks take part.
#pragma once

#include "desk.h"
#include "membership/group.h"
#include "nodes.h"

namespace epd::membership {

class Views {
 public:
  Views(Desk& desk, const Nodes& nodes) : desk_(desk), nodes_(nodes) {}

  // The group's ranks as they are now. True: they wait for the store, which is asked once for each view.
  bool ask(Group& group);
  // The store learns of ranks that take part already.
  void record(const Group& group);
  // Of a group that has started.
  void drop(const Group& group);

 private:
  Desk& desk_;
  const Nodes& nodes_;
};

}  // namespace epd::membership
