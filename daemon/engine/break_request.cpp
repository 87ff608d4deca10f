#include "break_request.h"

#include "failures.h"

namespace epd::engine {

void request_break(Group& group, const abi::Break& failure, SupervisorLink& link) {
  if (!group.life.may(GroupPhase::kAsking)) return;
  group.life.enter(GroupPhase::kAsking);
  link.send(abi::LinkType::kBreakRequest, failure);
}

// Any rank's engine asks, whichever comes there first. To the clients it is a break like any other.
void renew_numbers(const Member& member, SupervisorLink& link) {
  Group& group = member.group;
  if (group.in_tags(member.next_number) < abi::kTagRenewal) return;
  const Failure failure{StatusCode::kAborted, -1,
                        "epoch " + std::to_string(group.epoch) + " has no numbers left after " +
                            std::to_string(member.next_number - group.resume_index) +
                            " operations; the next one has"};
  request_break(group, as_break(group, failure), link);
}

}  // namespace epd::engine
