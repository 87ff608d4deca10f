#include "adoption.h"

#include "membership/join_rules.h"
#include "membership/limits.h"
#include "memberships.h"
#include "proto/binding_rules.h"
#include "proto/shape_rules.h"

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

}  // namespace

bool Adoption::is_sound(const GroupDescription& told) const {
  constexpr std::uint64_t kSpanning = std::uint64_t{1} << 63;
  const std::uint64_t id = told.label.id;
  const bool fine = (id & kSpanning) != 0 && id >> 32 != first_group_id_ >> 32 &&
                    check_group_name(told.label.name).ok() && abi::check_shape(told.shape).empty() &&
                    told.shape.span == abi::Span::kCluster && told.shape.sum_ranks != 0 && told.epoch != 0 &&
                    told.ranks.size() == told.shape.num_ranks;
  if (!fine) return false;
  for (std::uint32_t rank = 0; rank < told.ranks.size(); ++rank) {
    if (told.ranks[rank].rank != rank || told.ranks[rank].active_since > told.epoch) return false;
  }
  return true;
}

bool Adoption::is_sound(const Reporter& reporter, const GroupDescription& told, const RankReport& r) const {
  if (r.rank >= told.ranks.size()) return false;
  const RankDescription& described = told.ranks[r.rank];
  const std::uint32_t index = member_index(r.member);
  return described.engine == EngineId{reporter.node, r.device} && r.device < reporter.num_devices &&
         described.active_since == r.active_since && r.active_since != 0 && r.uid == told.label.uid &&
         index >= kFirstSpanningIndex && index < kFirstSpanningIndex + Memberships::kMaxPerSession &&
         member_generation(r.member) != 0 && r.priority >= abi::kMinPriority &&
         r.priority <= abi::kMaxPriority && abi::check_bound(told.shape, r.bound).empty() &&
         !members_.contains({{reporter.node, r.session}, r.member});
}

void Adoption::add(const Reporter& reporter, const GroupReport& report) {
  const std::uint32_t node = reporter.node;
  const abi::GroupShape& shape = report.told.shape;
  const bool asked = report.asked_sum_ranks == 0 || report.asked_sum_ranks == shape.sum_ranks;
  if (!is_sound(report.told) || !asked || report.ranks.empty()) return;
  std::set<std::uint32_t> ranks;
  std::set<std::pair<std::uint64_t, std::uint32_t>> members;
  for (const RankReport& r : report.ranks) {
    const bool first = ranks.insert(r.rank).second && members.emplace(r.session, r.member).second;
    if (!first || !is_sound(reporter, report.told, r)) return;
  }
  for (const RankReport& r : report.ranks) members_.insert({{node, r.session}, r.member});
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
