#include "pairs.h"

#include <algorithm>
#include <set>
#include <tuple>

namespace epd::membership {

void Pairs::on(const PeerLost& event) {
  const Pair pair(event.engine, event.far);
  if (event.engine.node == event.far.node) return;
  for (const auto& [id, group] : groups_.all()) {
    const bool shared = group.is(GroupPhase::kActive) && group.needs(event.engine) && group.needs(event.far);
    const bool known = std::any_of(reports_.begin(), reports_.end(), [&, id = id](const Report& report) {
      return report.group_id == id && report.pair == pair;
    });
    if (shared && !known)
      reports_.push_back({pair, event.text, event.loss, id, group.epoch, desk_.due_in_ms(kCollectMs)});
  }
}

template <typename Test>
void Pairs::forget(const Test& test) {
  const auto of = [&test](const Pair& pair) { return test(pair.first) || test(pair.second); };
  std::erase_if(reports_, [&of](const Report& report) { return of(report.pair); });
  std::erase_if(tried_, [&of](const auto& entry) { return of(entry.first.second); });
  std::erase_if(breaks_ns_, [&of](const auto& entry) { return of(entry.first.second); });
}

void Pairs::engine_down(EngineId engine) {
  forget([engine](EngineId other) { return other == engine; });
}

void Pairs::node_lost(std::uint32_t node) {
  forget([node](EngineId engine) { return engine.node == node; });
}

std::uint64_t Pairs::next_due_ns() const {
  std::uint64_t due = kNever;
  for (const Report& report : reports_) due = std::min(due, report.due_ns);
  return due;
}

void Pairs::tick() {
  const auto over = [this](const auto& entry) { return groups_.find(entry.first.first) == nullptr; };
  std::erase_if(tried_, over);
  std::erase_if(breaks_ns_, over);
  while (next_due_ns() <= desk_.now_ns()) {
    const auto first = std::min_element(reports_.begin(), reports_.end(),
                                        [](const Report& a, const Report& b) { return a.due_ns < b.due_ns; });
    const std::uint64_t id = first->group_id;
    std::vector<Report> of_group;
    std::copy_if(reports_.begin(), reports_.end(), std::back_inserter(of_group),
                 [id](const Report& report) { return report.group_id == id; });
    std::erase_if(reports_, [id](const Report& report) { return report.group_id == id; });
    Group* group = groups_.find(id);
    // A group that has broken meanwhile shows by itself which pairs reach each other.
    if (group == nullptr || !group->is(GroupPhase::kActive)) continue;
    std::erase_if(of_group, [group](const Report& report) {
      return report.epoch != group->epoch || !group->needs(report.pair.first) ||
             !group->needs(report.pair.second);
    });
    if (!of_group.empty()) judge(*group, of_group);
  }
}

// A pair is broken if its group was broken as the two don't reach each other, and the engine has not served
// an epoch since; or if breaks have helped too often for no more than a moment. What came corrupted has come.
void Pairs::judge(Group& group, const std::vector<Report>& reports) {
  std::vector<Report> broken;
  for (Report report : reports) {
    bool failed = false;
    if (report.loss == abi::PeerLoss::kUnreachable) {
      const auto [tried, first] = tried_.emplace(std::pair(group.id, report.pair), group.epoch);
      failed = !first && group.engines.at(report.pair.first).resumed <= tried->second;
      tried->second = group.epoch;
    }
    if (breaks_too_often(group, report) || failed) broken.push_back(std::move(report));
  }
  if (broken.empty()) {
    count_break(group, reports);
    breaks_.begin(group, {StatusCode::kAborted, -1, in_words(reports.front())});
  } else {
    put_out(group, broken);
  }
}

namespace {

template <typename Pair>
Pair lower_first(const Pair& pair) {
  return std::minmax(pair.first, pair.second);
}

}  // namespace

bool Pairs::breaks_too_often(const Group& group, Report& report) {
  const auto found = breaks_ns_.find({group.id, lower_first(report.pair)});
  if (found == breaks_ns_.end()) return false;
  std::deque<std::uint64_t>& times = found->second;
  while (!times.empty() && times.front() + kBreaksMs * 1'000'000 <= desk_.now_ns()) times.pop_front();
  if (times.size() < kMaxBreaks) return false;
  report.text += "; the group has broken " + std::to_string(times.size()) + " times within a minute for it";
  return true;
}

void Pairs::count_break(const Group& group, const std::vector<Report>& reports) {
  std::set<Pair> pairs;
  for (const Report& report : reports) pairs.insert(lower_first(report.pair));
  for (const Pair& pair : pairs) breaks_ns_[{group.id, pair}].push_back(desk_.now_ns());
}

std::string Pairs::in_words(const Report& report) const {
  const auto name = [this](EngineId engine) {
    return "device " + std::to_string(engine.device) + " of " + nodes_.name_of(engine.node);
  };
  return name(report.pair.first) + " has lost " + name(report.pair.second) + ": " + report.text;
}

// The fewest nodes, nearly: always the one that most of the others can't reach.
void Pairs::put_out(Group& group, const std::vector<Report>& broken) {
  std::set<std::uint32_t> nodes;
  std::vector<Report> left = broken;
  while (!left.empty()) {
    const std::uint32_t worst = worst_node(group, left);
    nodes.insert(worst);
    std::erase_if(left, [worst](const Report& report) {
      return report.pair.first.node == worst || report.pair.second.node == worst;
    });
  }
  const auto is_over = [&](const auto& entry) {
    const auto& [id, pair] = entry.first;
    return id == group.id && (nodes.contains(pair.first.node) || nodes.contains(pair.second.node));
  };
  std::erase_if(tried_, is_over);
  std::erase_if(breaks_ns_, is_over);
  departures_.put_out(group, nodes, in_words(broken.front()));
}

// Of those in `broken`: the one that is apart from most others, there or by a break of the last minute. A
// node that spoils what it sends breaks with all in turn, and one pair of them is the first to break too
// often. Of equals the one with fewer ranks in the group, of equals the higher number.
std::uint32_t Pairs::worst_node(const Group& group, const std::vector<Report>& broken) const {
  std::map<std::uint32_t, std::set<std::uint32_t>> apart;  // by node: nodes
  for (const Report& report : broken) {
    apart[report.pair.first.node].insert(report.pair.second.node);
    apart[report.pair.second.node].insert(report.pair.first.node);
  }
  for (const auto& [of, times_ns] : breaks_ns_) {
    const auto& [id, pair] = of;
    if (id != group.id || times_ns.empty() || times_ns.back() + kBreaksMs * 1'000'000 <= desk_.now_ns())
      continue;
    for (const auto& [node, other] : {pair, Pair(pair.second, pair.first)}) {
      if (const auto found = apart.find(node.node); found != apart.end()) found->second.insert(other.node);
    }
  }
  const auto ranks_of = [&group](std::uint32_t node) {
    return std::count_if(group.members.begin(), group.members.end(), [node](const auto& entry) {
      return entry.second.engine.node == node && !entry.second.gone();
    });
  };
  std::uint32_t worst = apart.begin()->first;
  for (const auto& [node, others] : apart) {
    const auto badness = [&](std::uint32_t of) { return std::tuple(apart.at(of).size(), -ranks_of(of), of); };
    if (badness(node) > badness(worst)) worst = node;
  }
  return worst;
}

}  // namespace epd::membership
