#include "adoption.h"

#include "membership/group.h"
#include "membership/ids.h"
#include "proto/shape_rules.h"
#include "tables.h"

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
  group.take(report.told);
  group.asked_sum_ranks = report.asked_sum_ranks;
  group.state = Group::Active{};
  return group;
}

}  // namespace

bool Adoption::is_sound(const GroupDescription& told) {
  constexpr std::uint64_t kSpanning = std::uint64_t{1} << 63;
  const std::uint64_t id = told.label.id;
  const bool fine = (id & kSpanning) != 0 && check_group_name(told.label.name).ok() &&
                    abi::check_shape(told.shape).empty() && told.shape.span == abi::Span::kCluster &&
                    told.shape.sum_ranks != 0 && told.epoch != 0 && told.ranks.size() == told.shape.num_ranks;
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
  return described.engine == EngineId{reporter.number, r.device} && r.device < reporter.num_devices &&
         described.active_since == r.active_since && r.active_since != 0 && r.uid == told.label.uid &&
         index >= kFirstSpanningIndex && index < kFirstSpanningIndex + Memberships::kMaxPerSession &&
         member_generation(r.member) != 0 && r.priority >= abi::kMinPriority &&
         r.priority <= abi::kMaxPriority && !members_.contains({reporter.index, r.session, r.member});
}

Adoption::Reports& Adoption::reports_of(const Reporter& reporter, const GroupReport& report) {
  std::vector<Reports>& all = groups_[report.told.label.id];
  for (Reports& each : all) {
    if (each.term == reporter.term && told_alike(each.first.told, report.told)) return each;
  }
  return all.emplace_back(Reports{report, reporter.term, true, begin(report), {}});
}

void Adoption::add(const Reporter& reporter, const GroupReport& report) {
  const abi::GroupShape& shape = report.told.shape;
  const bool asked = report.asked_sum_ranks == 0 || report.asked_sum_ranks == shape.sum_ranks;
  if (reporter.number == 0 || !is_sound(report.told) || !asked || report.ranks.empty()) return;
  std::set<std::uint32_t> ranks;
  std::set<std::pair<std::uint64_t, std::uint32_t>> members;
  for (const RankReport& r : report.ranks) {
    const bool first = ranks.insert(r.rank).second && members.emplace(r.session, r.member).second;
    if (!first || !is_sound(reporter, report.told, r)) return;
  }
  if (!reported_.emplace(reporter.index, report.told.label.id).second) return;
  for (const RankReport& r : report.ranks) members_.emplace(reporter.index, r.session, r.member);
  Reports& reports = reports_of(reporter, report);
  reports.numbers[reporter.index] = reporter.number;
  for (const RankReport& r : report.ranks) {
    Member member;
    member.session = {reporter.number, r.session};
    member.rank = r.rank;
    member.member = r.member;
    member.uid = r.uid;
    member.pid = r.pid;
    member.engine = {reporter.number, r.device};
    member.sms = r.sms;
    member.priority = r.priority;
    member.join_request = r.join_request;
    member.active_since = r.active_since;
    member.first_index = r.first_index;
    member.announced = true;
    member.holds_memory = true;
    reports.group.engines[member.engine].state = EngineSlot::Serving{};
    if (!reports.group.members.emplace(r.rank, std::move(member)).second) reports.sound = false;
  }
}

bool Adoption::is_whole(const Reports& reports) {
  const auto& ranks = reports.first.told.ranks;
  const auto told = std::count_if(ranks.begin(), ranks.end(),
                                  [](const RankDescription& rank) { return rank.active_since != 0; });
  return reports.sound && reports.group.members.size() == static_cast<std::size_t>(told);
}

Adoption::Adopted Adoption::take(std::size_t most) {
  std::vector<Reports*> whole;
  for (auto& [id, all] : groups_) {
    for (Reports& each : all) {
      if (is_whole(each)) whole.push_back(&each);
    }
  }
  std::stable_sort(whole.begin(), whole.end(), [](const Reports* a, const Reports* b) {
    return std::pair(a->numbers.size(), a->term) > std::pair(b->numbers.size(), b->term);
  });
  Adopted adopted;
  std::map<std::uint32_t, std::uint32_t> holders;  // index by number
  std::set<std::uint64_t> ids;
  std::map<std::uint32_t, std::uint64_t> alone;  // groups of that node alone, by index
  for (Reports* each : whole) {
    const bool is_alone = each->numbers.size() == 1;
    if (is_alone && adopted.groups.size() >= most) break;
    if (is_alone && alone[each->numbers.begin()->first]++ >= share_of_one(most)) continue;
    const bool agrees = std::all_of(each->numbers.begin(), each->numbers.end(), [&](const auto& node) {
      const auto holder = holders.find(node.second);
      return holder == holders.end() || holder->second == node.first;
    });
    if (!agrees || !ids.insert(each->group.id).second) continue;
    for (const auto& [index, number] : each->numbers) {
      adopted.numbers[index] = number;
      holders[number] = index;
    }
    adopted.groups.push_back(std::move(each->group));
  }
  return adopted;
}

}  // namespace epd::membership
