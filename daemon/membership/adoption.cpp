#include "adoption.h"

#include <algorithm>

namespace epd::membership {
namespace {

bool told_alike(const GroupDescription& a, const GroupDescription& b) {
  const auto same = [](const RankDescription& x, const RankDescription& y) {
    return x.rank == y.rank && x.active_since == y.active_since &&
           (x.active_since == 0 || x.engine == y.engine);
  };
  return a.label.uid == b.label.uid && a.label.name == b.label.name && a.shape == b.shape &&
         a.epoch == b.epoch && a.view == b.view && a.epoch_key == b.epoch_key &&
         std::equal(a.ranks.begin(), a.ranks.end(), b.ranks.begin(), b.ranks.end(), same);
}

Group begin(const GroupReport& report) {
  Group group;
  group.id = report.told.label.id;
  group.uid = report.told.label.uid;
  group.name = report.told.label.name;
  group.shape = report.told.shape;
  group.asked_sum_ranks = report.asked_sum_ranks;
  group.epoch = report.told.epoch;
  group.resume_index = report.told.resume_index;
  group.view = report.told.view;
  group.epoch_key = report.told.epoch_key;
  group.state = Group::Active{};
  return group;
}

// Nobody else says that it takes part.
bool is_told(const GroupDescription& told, const Member& member) {
  return member.rank < told.ranks.size() && told.ranks[member.rank].engine == member.engine &&
         told.ranks[member.rank].active_since == member.active_since && member.active_since != 0;
}

}  // namespace

void Adoption::add(std::uint32_t node, const GroupReport& report) {
  const auto [found, first] = groups_.try_emplace(report.told.label.id, Reports{report, true, begin(report)});
  Reports& reports = found->second;
  if (!told_alike(reports.first.told, report.told)) reports.alike = false;
  for (const RankReport& r : report.ranks) {
    Member member;
    member.session = {node, r.session};
    member.rank = r.rank;
    member.member = r.member;
    member.uid = r.uid;
    member.pid = r.pid;
    member.engine = {node, r.device};
    member.sms = r.sms;
    member.priority = r.priority;
    member.bound = r.bound;
    member.join_request = r.join_request;
    member.active_since = r.active_since;
    member.first_index = r.first_index;
    member.announced = true;
    member.holds_memory = true;
    if (!is_told(report.told, member)) reports.alike = false;
    reports.group.engines[member.engine].state = EngineSlot::Serving{};
    if (!reports.group.members.emplace(r.rank, std::move(member)).second) reports.alike = false;
  }
}

std::vector<Group> Adoption::whole() const {
  std::vector<Group> groups;
  for (const auto& [id, reports] : groups_) {
    const Group& group = reports.group;
    const auto& ranks = reports.first.told.ranks;
    const auto told = std::count_if(ranks.begin(), ranks.end(),
                                    [](const RankDescription& rank) { return rank.active_since != 0; });
    if (reports.alike && group.members.size() == static_cast<std::size_t>(told)) groups.push_back(group);
  }
  return groups;
}

}  // namespace epd::membership
