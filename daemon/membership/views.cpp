#include "views.h"

#include <utility>

namespace epd::membership {

bool Views::ask(Group& group) {
  if (!desk_.spans()) return false;
  if (group.storing) return true;
  group.storing = group.view;
  record(group);
  return true;
}

void Views::record(const Group& group) {
  StoreView action{group.label(), group.shape, group.view, {}};
  for (const auto& [rank, member] : group.members) {
    if (member.gone()) continue;
    const EngineId engine = member.engine;
    action.ranks.push_back({rank, engine.device, nodes_.name_of(engine.node), nodes_.boot_of(engine.node)});
  }
  desk_.emit(std::move(action));
}

void Views::drop(const Group& group) {
  if (desk_.spans() && !group.is(GroupPhase::kForming)) desk_.emit(DropView{group.id});
}

}  // namespace epd::membership
