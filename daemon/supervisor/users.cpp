// The holdings and limits of each user.
#include "control_reads.h"
#include "live_config.h"
#include "member_memory_store.h"
#include "membership/deciders.h"
#include "session/session_table.h"

#include <map>
#include "epd/v1/control.pb.h"

namespace epd::supervisor {
namespace {

struct Use {
  const PeerIdentity* peer = nullptr;  // of its first session: rules may name groups of users
  std::uint64_t sessions = 0;
  std::uint64_t groups = 0;
  std::uint64_t arena_bytes = 0;
  std::uint64_t routing_bytes = 0;
};

void add(v1::UserUse& user, const char* key, std::uint64_t used, const Quota& quota) {
  v1::LimitUse& limit = *user.add_limits();
  limit.set_key(key);
  limit.set_used(used);
  limit.set_allowed(quota.limit);
}

}  // namespace

// As attaches and joins are judged. Users without a session are left out, also if there is memory of ranks of
// theirs: their groups of users, and so what they may have, are not known.
void ControlReads::add_users(v1::ListSessionsResponse& list) const {
  std::map<std::uint32_t, Use> users;
  for (const auto& [id, session] : rooms_.sessions.connections()) {
    if (!session.attached) continue;
    Use& use = users[session.peer.uid];
    if (use.peer == nullptr) use.peer = &session.peer;
    ++use.sessions;
  }
  rooms_.deciders.each([&](const membership::Group& group) {
    if (const auto owner = users.find(group.uid); owner != users.end()) ++owner->second.groups;
    for (const auto& [rank, member] : group.members) {
      const MemberArenas* arenas = rooms_.memory.find(group.id, rank);
      const auto user = arenas == nullptr ? users.end() : users.find(arenas->uid);
      if (user == users.end()) continue;
      user->second.arena_bytes += arenas->bytes;
      user->second.routing_bytes += arenas->routing_bytes;
    }
  });
  for (const auto& [uid, use] : users) {
    const Caller caller{uid, use.peer->gids};
    v1::UserUse& user = *list.add_users();
    user.set_uid(uid);
    add(user, "limits.max_sessions_per_user", use.sessions, rooms_.config->max_sessions_of(caller));
    add(user, "limits.max_groups_per_user", use.groups, rooms_.config->max_groups_of(caller));
    add(user, "limits.max_arena_bytes_per_user", use.arena_bytes, rooms_.config->max_arena_bytes_of(caller));
    add(user, "limits.max_routing_bytes_per_user", use.routing_bytes,
        rooms_.config->max_routing_bytes_of(caller));
  }
}

}  // namespace epd::supervisor
