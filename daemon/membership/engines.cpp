#include "engines.h"

#include <algorithm>
#include <set>
#include <tuple>
#include <utility>

namespace epd::membership {

// ---- pairs

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
    // A group that has broken since will show which pairs reach each other.
    if (group == nullptr || !group->is(GroupPhase::kActive)) continue;
    std::erase_if(of_group, [group](const Report& report) {
      return report.epoch != group->epoch || !group->needs(report.pair.first) ||
             !group->needs(report.pair.second);
    });
    if (!of_group.empty()) judge(*group, of_group);
  }
}

// A pair is out of reach if the group was broken for it and the engine has served no epoch since, or if
// breaks have helped too often only for a moment. A corrupted message did arrive, so it counts for the latter
// alone.
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

// Puts out nearly the fewest nodes: always the one that most others can't reach.
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

// Returns the node of `broken` that can't reach most others, in `broken` or by a break of the last minute. (A
// node that corrupts what it sends breaks with all in turn, and one of these pairs is the first to break too
// often.) Among equals, it is the node with fewer ranks in the group, then the higher number.
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

// ---- engines

namespace {

// How often an engine may go down while it starts a group. A new group is given up earlier: the engine's
// other groups are started with it each time and look the same.
constexpr std::uint32_t kMostFailedStarts = 3;
constexpr std::uint32_t kMostFailedRestarts = 6;

}  // namespace

void Engines::on(const EngineUp& event) {
  parts_.nodes.engine_up(event);
  std::set<EngineId> told;
  for (auto& [id, group] : parts_.groups.all()) {
    parts_.rejoins.admit(group);
    parts_.steps.close_streams(group, event.engine);
    if (!group.is(GroupPhase::kStarting) && !group.is(GroupPhase::kBreaking)) continue;
    const auto slot = group.engines.find(event.engine);
    if (slot == group.engines.end() || !slot->second.is(EnginePhase::kAbsent)) continue;
    parts_.steps.introduce(group, event.engine, told);
    parts_.steps.start(group, event.engine);
  }
}

void Engines::on(const EngineDown& event) {
  parts_.nodes.engine_down(event.engine);
  parts_.pairs.engine_down(event.engine);
  keep_boards(event.engine, event.boards);
  for (const std::uint64_t id : parts_.groups.ids()) {
    if (parts_.groups.find_slot(id, event.engine) != nullptr)
      down_for(*parts_.groups.find(id), event.engine, event.text);
  }
}

// An engine's report counts only for ranks on its own device.
void Engines::keep_boards(EngineId engine, const std::vector<BoardIndex>& boards) {
  for (const BoardIndex& board : boards) {
    Group* group = parts_.groups.find(board.group_id);
    if (group == nullptr) continue;
    const auto member = group->members.find(board.rank);
    if (member != group->members.end() && member->second.engine == engine)
      member->second.board_index = board.next_index;
  }
}

// The texts of engines reach clients of all nodes, so they name the node.
std::string Engines::said_by(EngineId engine) const {
  return engine.node == kLocalNode ? "" : parts_.nodes.name_of(engine.node) + ": ";
}

void Engines::down_for(Group& group, EngineId engine, const std::string& text) {
  EngineSlot& slot = group.engines.at(engine);
  const bool started = slot.is(EnginePhase::kStarting);
  const bool over =
      group.is(GroupPhase::kFailing) || group.is(GroupPhase::kLost) || group.is(GroupPhase::kRemoving);
  const std::uint32_t failed_starts = slot.failed_starts + (started ? 1 : 0);
  slot = EngineSlot{};
  slot.failed_starts = failed_starts;
  if (over) slot.state = EngineSlot::Done{};
  for (auto& [rank, member] : group.members) {
    if (member.engine != engine) continue;
    member.announced = false;
    const bool stopped = std::holds_alternative<Member::Stopped>(member.calls);
    const bool awaited = !stopped && (member.gone() || group.is(GroupPhase::kFailing));
    if (awaited) parts_.members.has_stopped(member, member.board_index);
  }
  switch (group.phase()) {
    case GroupPhase::kForming: return;
    case GroupPhase::kStarting:
      if (started) gives_up(group, engine, text);
      return;
    case GroupPhase::kBreaking:
      if (started && group.needs(engine) && gives_up(group, engine, text)) return;
      if (!group.needs(engine)) parts_.breaks.slot_free(group, engine);
      return;
    case GroupPhase::kActive:
      if (group.needs(engine)) {
        parts_.breaks.begin(group, group.reason_of_end(engine, said_by(engine) + text));
      } else {
        parts_.breaks.slot_free(group, engine);
      }
      return;
    case GroupPhase::kFailing:
      parts_.steps.mark_lost(group, engine);
      parts_.breaks.advance(group);
      return;
    case GroupPhase::kLost: parts_.steps.mark_lost(group, engine); return;
    case GroupPhase::kRemoving: parts_.breaks.forget_if_removed(group); return;
  }
}

bool Engines::gives_up(Group& group, EngineId engine, const std::string& text) {
  const bool is_new = group.is(GroupPhase::kStarting);
  const std::uint32_t failed = group.engines.at(engine).failed_starts;
  if (failed < (is_new ? kMostFailedStarts : kMostFailedRestarts)) return false;
  not_ready(group, engine,
            Status(StatusCode::kInternal, parts_.nodes.in_words(engine) + " went down " +
                                              std::to_string(failed) + " times while it started group \"" +
                                              group.name + "\", at last: " + text));
  return true;
}

void Engines::on(const GroupReady& event) {
  const abi::GroupReady& message = event.message;
  EngineSlot* slot = parts_.groups.find_slot(message.group_id, event.engine);
  if (slot == nullptr || !slot->is(EnginePhase::kStarting)) return;
  Group& group = *parts_.groups.find(message.group_id);
  slot->waits_for.clear();
  slot->failed_starts = 0;
  if (message.status != StatusCode::kOk) {
    slot->state = EngineSlot::Broken{kNever};
    not_ready(group, event.engine,
              {said_cause(message.status, StatusCode::kInternal),
               said_by(event.engine) + std::string(message.text, abi::text_length(message.text))});
  } else if (group.is(GroupPhase::kStarting)) {
    slot->state = EngineSlot::Serving{};
    parts_.forming.engine_ready(group);
  } else {
    keep_boards(event.engine, event.boards);
    std::uint64_t next_index = kNever;
    for (const auto& [rank, member] : group.members) {
      if (member.engine == event.engine && member.holds_memory && member.presence == Presence::kHere)
        next_index = std::min(next_index, member.board_index);
    }
    slot->state = EngineSlot::Broken{next_index, false, false, true};
    parts_.breaks.advance(group);
  }
}

void Engines::not_ready(Group& group, EngineId engine, const Status& status) {
  if (group.is(GroupPhase::kStarting)) {
    parts_.forming.abort_start(group, status);
  } else if (group.is(GroupPhase::kBreaking)) {
    parts_.departures.cannot_serve(group, engine, status);
  } else {
    if (auto* failing = std::get_if<Group::Failing>(&group.state)) failing->fail_from = 0;
    parts_.breaks.advance(group);
  }
}

// The engine waits for others, so it is not killed. The deadlines of joins bound a start and a rejoin.
// Nothing else bounds a start during a break, so its one deadline stays.
void Engines::on(const GroupWaits& event) {
  EngineSlot* slot = parts_.groups.find_slot(event.message.group_id, event.engine);
  const bool owes = slot != nullptr && slot->due_ns() != nullptr &&
                    (slot->is(EnginePhase::kStarting) || slot->is(EnginePhase::kServing));
  if (!owes) return;
  const bool bounded = slot->is(EnginePhase::kServing) ||
                       parts_.groups.find(event.message.group_id)->is(GroupPhase::kStarting);
  if (bounded) *slot->due_ns() = desk_.due_in_ms(desk_.limits().engine_start_ms);
  slot->waits_for.assign(event.message.text, abi::text_length(event.message.text));
}

void Engines::on(const Resumed& event) {
  EngineSlot* slot = parts_.groups.find_slot(event.message.group_id, event.engine);
  auto* serving = slot == nullptr ? nullptr : std::get_if<EngineSlot::Serving>(&slot->state);
  if (serving == nullptr) return;
  Group& group = *parts_.groups.find(event.message.group_id);
  if (event.message.epoch != group.epoch) return;
  slot->resumed = group.epoch;
  serving->due_ns = 0;
  slot->waits_for.clear();
  // On CUDA devices a newcomer may look at its peers' signals only after all of them have cleared those.
  const bool all = group.device_kind == abi::DeviceKind::kCuda;
  if (all && std::any_of(group.engines.begin(), group.engines.end(), [](auto& entry) {
        return entry.second.is(EnginePhase::kServing) && entry.second.due_ns() != nullptr;
      })) {
    return;
  }
  for (auto& [rank, member] : group.members) {
    if ((!all && member.engine != event.engine) || member.presence != Presence::kJoining) continue;
    member.presence = Presence::kHere;
    group.late.erase(rank);
    parts_.members.reply_joined(group, member);
  }
}

// After a missed deadline the next one is engine_ack_ms later.
bool Engines::is_overdue(std::uint64_t* due_ns) const {
  if (due_ns == nullptr || *due_ns > desk_.now_ns()) return false;
  *due_ns = desk_.due_in_ms(desk_.limits().engine_ack_ms);
  return true;
}

// Kills engines that miss a deadline. An engine that is alive then is stopped, and will not answer.
void Engines::tick(Group& group) {
  for (auto& [engine, slot] : group.engines) {
    if (!is_overdue(slot.due_ns())) continue;
    const auto* failing = std::get_if<Group::Failing>(&group.state);
    if (failing != nullptr && failing->told && failing->fail_from != 0) {
      parts_.breaks.fail_everything(group);
    } else {
      desk_.emit(KillEngine{engine, "no answer to a step of group " + std::to_string(group.id) + " in time"});
    }
  }
  const bool stopped = tick_stopping(group);
  const auto* breaking = std::get_if<Group::Breaking>(&group.state);
  if (breaking != nullptr && breaking->release_due_ns <= desk_.now_ns()) parts_.steps.release_failed(group);
  if (stopped) parts_.breaks.advance(group);
}

// Returns whether the answer for a rank is given up. Nobody knows then what the rank had submitted.
bool Engines::tick_stopping(Group& group) {
  bool stopped = false;
  for (auto& [rank, member] : group.members) {
    auto* stopping = std::get_if<Member::Stopping>(&member.calls);
    if (stopping == nullptr || !is_overdue(&stopping->due_ns)) continue;
    desk_.emit(KillEngine{member.engine, "rank " + std::to_string(rank) + " of group " +
                                             std::to_string(group.id) + " was not stopped in time"});
    if (!std::exchange(stopping->asked_again, true)) continue;
    parts_.members.has_stopped(member, 0);
    stopped = true;
  }
  return stopped;
}

}  // namespace epd::membership
