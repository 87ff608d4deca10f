#include "memberships.h"

#include <algorithm>
#include <iterator>
#include <string>

namespace epd::membership {

Result<std::uint32_t> Memberships::take(const JoinRequest& request, std::uint64_t group_id,
                                        std::uint32_t rank) {
  const SessionId session = request.id.session;
  std::vector<Place>& places = sessions_[session];
  auto place = std::find_if(places.begin(), places.end(), [](const Place& p) { return p.group_id == 0; });
  if (place == places.end() && places.size() >= kMaxPerSession) {
    return resource_exhausted("session " + to_string(session) + " is in " + std::to_string(places.size()) +
                              " groups; allowed: " + std::to_string(kMaxPerSession));
  }
  if (place == places.end()) place = places.emplace(places.end());
  const std::uint32_t generation = std::max(place->generation, request.last_generation) % 0xffffu + 1;
  const auto index = static_cast<std::uint32_t>(place - places.begin());
  *place = {group_id, rank, generation, make_member_id(first_index_ + index, generation)};
  return place->member;
}

void Memberships::adopt(SessionId session, std::uint32_t member, std::uint64_t group_id, std::uint32_t rank) {
  std::vector<Place>& places = sessions_[session];
  const std::size_t index = member_index(member) - first_index_;
  if (places.size() <= index) places.resize(index + 1);
  if (places[index].group_id != 0) places.emplace_back();
  Place& place = places[index].group_id == 0 ? places[index] : places.back();
  place = {group_id, rank, member_generation(member), member};
}

void Memberships::free(SessionId session, std::uint32_t member) {
  if (Place* place = find_place(session, member)) place->group_id = 0;
}

const Memberships::Place* Memberships::find(SessionId session, std::uint32_t member) const {
  return const_cast<Memberships*>(this)->find_place(session, member);
}

Memberships::Place* Memberships::find_place(SessionId session, std::uint32_t member) {
  const auto found = sessions_.find(session);
  if (found == sessions_.end()) return nullptr;
  const auto place = std::find_if(found->second.begin(), found->second.end(),
                                  [member](const Place& p) { return p.group_id != 0 && p.member == member; });
  return place == found->second.end() ? nullptr : &*place;
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
