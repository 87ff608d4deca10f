#include "losses.h"

#include "base/event.h"
#include "session/session_table.h"

namespace epd::supervisor {

void record_loss(const membership::GroupLabel& group, const membership::Member& member,
                 const std::string& how) {
  const bool orderly = membership::is_orderly(how);
  record_of_user(group.uid, orderly ? EventKind::kRankLeft : EventKind::kRankLost,
                 how == session::kDied ? LogLevel::kWarning : LogLevel::kInfo,
                 orderly ? "rank left" : "rank lost",
                 {{"group", group.id},
                  {"name", group.name},
                  {"rank", member.rank},
                  {"session", member.session.number},
                  {"pid", member.pid},
                  {"how", how}});
}

void record_losses(const membership::Deciders& deciders, std::uint64_t session_id,
                   std::optional<std::uint32_t> member_id, const std::string& how) {
  deciders.each([&](const membership::Group& group) {
    // A member that leaves before its group has formed is not lost.
    if (member_id && group.engines.empty()) return;
    for (const auto& [rank, member] : group.members) {
      if (member.session.number != session_id || member.gone()) continue;
      if (member_id && member.member != *member_id) continue;
      record_loss(group.label(), member, how);
    }
  });
}

}  // namespace epd::supervisor
