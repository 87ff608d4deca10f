// The process at the other end of a unix socket, as the kernel knows it.
#pragma once

#include "common/fd.h"
#include "common/status.h"

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace epd {

struct PeerIdentity {
  std::int32_t pid = 0;  // 0: it has no number here, or has ended
  bool has_been_reaped = false;
  std::uint32_t uid = 0;
  std::uint32_t gid = 0;
  std::vector<std::uint32_t> gids;  // the primary first, then the supplementary
  UniqueFd pidfd;                   // invalid if there is no number
  // For people to find the process by; see name_program. Both are printable ASCII, and "" if /proc does not
  // show them.
  std::string program;  // its name, which the process may choose
  std::string cgroup;   // its control group: in a pod or a job it has its name
};

// Root, or the daemon's own user. Other users can't keep them out.
bool is_privileged(std::uint32_t uid);
// Returns the process as it was when it connected. An error: no descriptor was left.
Result<PeerIdentity> peer_identity(int socket);
// Fills in program and cgroup from /proc, while the process lives.
void name_program(PeerIdentity& peer);

// Users and groups of this system, by name or by number.
inline constexpr std::uint32_t kMaxAccountId = 0xffff'fffe;  // the last one means "none"

// Looks for a name, then for a number. No value: neither exists. Asks the name service, which may be slow, so
// it must not run on a loop.
std::optional<std::uint32_t> find_user_id(const std::string& name_or_number);
std::optional<std::uint32_t> find_group_id(const std::string& name_or_number);

}  // namespace epd
