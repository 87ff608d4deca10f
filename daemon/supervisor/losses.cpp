#include "losses.h"

#include "base/event.h"

namespace epd::supervisor {

void record_losses(const Deciders& deciders, std::uint64_t session_id, std::optional<std::uint32_t> member_id,
                   const std::string& how) {
  deciders.each([&](const membership::Group& group) {
    // Nobody leaves by name what it has not joined yet.
    if (member_id && group.engines.empty()) return;
    for (const auto& [rank, member] : group.members) {
      if (member.session.number != session_id || member.gone()) continue;
      if (member_id && member.member != *member_id) continue;
      record_of_user(group.uid, EventKind::kRankLost, LogLevel::kInfo, "rank lost",
                     {{"group", group.id},
                      {"name", group.name},
                      {"rank", rank},
                      {"session", session_id},
                      {"pid", member.pid},
                      {"how", how}});
    }
  });
}

}  // namespace epd::supervisor
