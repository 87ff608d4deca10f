// Which session is which rank of which group, by member number.
#pragma once

#include "common/status.h"
#include "membership/messages.h"

#include <cstdint>
#include <map>
#include <vector>

namespace epd::membership {

class Memberships {
 public:
  static constexpr std::uint32_t kMaxPerSession = 256;

  // The least index of each session.
  explicit Memberships(std::uint32_t first_index) : first_index_(first_index) {}

  struct Place {
    std::uint64_t group_id = 0;  // 0: free
    std::uint32_t rank = 0;
    std::uint32_t generation = 0;
    std::uint32_t member = 0;  // its number
  };

  // The number of a new membership; RESOURCE_EXHAUSTED: the session has as many as it may.
  Result<std::uint32_t> take(const JoinRequest& request, std::uint64_t group_id, std::uint32_t rank);
  // A membership that has this number; others of the session may have the same index.
  void adopt(SessionId session, std::uint32_t member, std::uint64_t group_id, std::uint32_t rank);
  // Only when no engine knows the membership any more: its index is given out again.
  void free(SessionId session, std::uint32_t member);
  void forget(const EndedSessions& ended) {
    std::erase_if(sessions_, [&ended](const auto& entry) { return ended.contains(entry.first); });
  }

  // Null: the session has no such membership.
  const Place* find(SessionId session, std::uint32_t member) const;
  // Those that are taken.
  std::vector<Place> of(SessionId session) const;

 private:
  Place* find_place(SessionId session, std::uint32_t member);

  const std::uint32_t first_index_;
  std::map<SessionId, std::vector<Place>> sessions_;
};

}  // namespace epd::membership
