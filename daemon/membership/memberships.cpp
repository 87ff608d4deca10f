#include "memberships.h"

#include <algorithm>
#include <iterator>
#include <string>

namespace epd::membership {

Result<std::uint32_t> Memberships::take(SessionId session, std::uint64_t group_id, std::uint32_t rank) {
  std::vector<Place>& places = sessions_[session];
  auto place = std::find_if(places.begin(), places.end(), [](const Place& p) { return p.group_id == 0; });
  if (place == places.end() && places.size() >= kMaxPerSession) {
    return resource_exhausted("session " + to_string(session) + " is in " + std::to_string(places.size()) +
                              " groups; allowed: " + std::to_string(kMaxPerSession));
  }
  if (place == places.end()) place = places.emplace(places.end());
  *place = {group_id, rank, place->generation % 0xffffu + 1};
  return make_member_id(first_index_ + static_cast<std::uint32_t>(place - places.begin()), place->generation);
}

void Memberships::free(SessionId session, std::uint32_t member) {
  if (find(session, member) != nullptr)
    sessions_.at(session)[member_index(member) - first_index_].group_id = 0;
}

const Memberships::Place* Memberships::find(SessionId session, std::uint32_t member) const {
  const auto found = sessions_.find(session);
  const std::uint32_t index = member_index(member);
  if (found == sessions_.end() || index < first_index_ || index - first_index_ >= found->second.size())
    return nullptr;
  const Place& place = found->second[index - first_index_];
  return place.group_id != 0 && make_member_id(index, place.generation) == member ? &place : nullptr;
}

std::vector<Memberships::Place> Memberships::of(SessionId session) const {
  std::vector<Place> taken;
  const auto found = sessions_.find(session);
  if (found == sessions_.end()) return taken;
  std::copy_if(found->second.begin(), found->second.end(), std::back_inserter(taken),
               [](const Place& place) { return place.group_id != 0; });
  return taken;
}

}  // namespace epd::membership
