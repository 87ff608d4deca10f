// What the registry wants done. It never does anything itself: the supervisor takes the list after
// each event and carries it out in order; tests read it.
#pragma once

#include "common/status.h"
#include "membership/group.h"
#include "proto/attach.h"
#include "proto/link.h"

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

namespace epd::membership {

// Tell an engine of a group: kGroupBegin, kGroupRank..., kGroupMember..., kGroupCommit.
struct StartGroup {
  std::uint32_t device;
  std::uint64_t group_id;
  bool broken;
};
// kGroupRank to an engine that knows the group: a rank that has come, or (active_since 0) is masked.
struct SendRank {
  std::uint32_t device;
  std::uint64_t group_id;
  std::uint32_t rank;
  std::uint64_t active_since;
};
// kGroupMember of a rank that has come, to the engine that serves it.
struct SendMember {
  std::uint32_t device;
  std::uint64_t group_id;
  std::uint32_t rank;
};
struct SendStopMember {
  std::uint32_t device;
  abi::MemberRef message;
};
struct SendBreak {
  std::uint32_t device;
  abi::Break message;
};
struct SendRelease {
  std::uint32_t device;
  abi::GroupRef message;
};
struct SendResume {
  std::uint32_t device;
  abi::Resume message;
};
struct SendRemoveGroup {
  std::uint32_t device;
  abi::GroupRef message;
};
// kCloseStreams to an engine that does not serve the rank, of which no engine ever will.
struct CloseStreams {
  std::uint32_t device;
  std::uint64_t group_id;
  std::uint32_t rank;
};
// The engine has not answered in time: end it, unless it is stopped; its death then takes its usual course.
// Said again while it is silent.
struct KillEngine {
  std::uint32_t device;
  std::string text;
};
// The user arena and the board of this rank go with it.
struct ReplyJoined {
  std::uint64_t session_id;
  std::uint32_t request_id;
  abi::Joined message;
};
struct ReplyLeft {
  std::uint64_t session_id;
  std::uint32_t request_id;
  abi::Left message;
};
struct ReplyRefused {
  std::uint64_t session_id;
  std::uint32_t request_id;
  Status status;
};
// Something that the client reads in shared memory has been written for it while no engine could.
struct WakeSession {
  std::uint64_t session_id;
};

using Action = std::variant<StartGroup, SendRank, SendMember, SendStopMember, SendBreak, SendRelease,
                            SendResume, SendRemoveGroup, CloseStreams, KillEngine, ReplyJoined, ReplyLeft,
                            ReplyRefused, WakeSession>;
using Actions = std::vector<Action>;

// "break device=1 group=3 epoch=2 fatal=1 cause=RANK_LOST culprit=2 fail_from=7": for logs and tests.
std::string to_string(const Action& action);

// Whose memory, and on which device.
struct MemoryOwner {
  std::uint64_t group_id = 0;
  std::uint32_t rank = 0;
  std::uint32_t uid = 0;
  std::uint32_t device = 0;
};

// The memory of members, as far as the registry must know it. Calls return at once.
class MemberMemory {
 public:
  virtual ~MemberMemory() = default;
  // OK, or UNSUPPORTED: engines of these devices can't map each other's memory.
  virtual Status check_reach(std::uint32_t device, std::uint32_t other) const = 0;
  // Makes the arenas and the board of a rank, and keeps what its regions are bound to; RESOURCE_EXHAUSTED if
  // a quota says no, INVALID_ARGUMENT for memory of the client's that can't be used.
  virtual Status acquire(const MemoryOwner& owner, const UserQuotas& quotas, const abi::GroupShape& shape,
                         const abi::Bindings& bindings, const ClientMemory& memory) = 0;
  // Gives them up. Mappings of others live on until they drop them.
  virtual void release(std::uint64_t group_id, std::uint32_t rank) = 0;
  // Board::next_index. Used only while no engine serves the rank.
  virtual std::uint64_t next_index(std::uint64_t group_id, std::uint32_t rank) = 0;
  // kCloseStreams for the rank to the next engine of the device, which has none now, whatever becomes of the
  // rank's memory until then.
  virtual void close_streams_later(std::uint32_t device, std::uint64_t group_id, std::uint32_t rank) = 0;
  // Says on the board that the group is lost. Used only while no engine serves the rank.
  virtual void mark_lost(std::uint64_t group_id, std::uint32_t rank, const std::string& text,
                         StatusCode cause, std::int32_t culprit_rank) = 0;
};

}  // namespace epd::membership
