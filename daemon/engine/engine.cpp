#include "engine.h"

#include "commands.h"

#include <poll.h>
#include <sched.h>
#include <unistd.h>
#include <algorithm>
#include <cerrno>
#include <limits>
#include <vector>

namespace epd {
namespace {

constexpr std::uint64_t kLinkPollNs = 100'000;        // look at the link this often while busy
constexpr std::uint64_t kTurnNs = 50'000;             // of a session's operations
constexpr std::uint32_t kTurnsPerLowChunk = 16;       // see take_turn
constexpr std::uint64_t kMaxSleepNs = 1'000'000'000;  // so that the heartbeat advances
constexpr std::uint64_t kLeaveNs = 1'000'000'000;

}  // namespace

Engine::Engine(SupervisorLink& link, Bell& bell, Page& page, std::unique_ptr<Device> device,
               const Clock& clock)
    : link_(link),
      bell_(bell),
      page_(page),
      clock_(clock),
      device_(std::move(device)),
      watch_(*device_, page),
      reclaimer_(clock) {
  listen();
}

Engine::~Engine() = default;

int Engine::run() {
  page_.start(device_->num_sms());
  link_.send(abi::LinkType::kReady, abi::EngineReady{::getpid(), device_->max_sms()});
  while (!link_.exit_code()) {
    clock_.begin_round();
    const std::uint64_t now_ns = clock_.round_ns();
    count(page_->loops);
    page_->heartbeat_ns.store(now_ns, std::memory_order_relaxed);
    page_->sms.store(device_->num_sms(), std::memory_order_relaxed);  // may follow a setting later
    if (now_ns - last_link_ns_ >= kLinkPollNs) {
      last_link_ns_ = now_ns;
      link_.receive(clock_, clock_.now_ns() + kShareNs);
      if (link_.exit_code()) break;
    }
    bool progress = poll_sessions();
    progress |= answer_stray_orphans();
    progress |= step_operations();
    progress |= read_journals();
    halt_commands();
    watch_.advance();
    answer_stops();
    finish_starts();
    acknowledge_breaks();
    finish_removals();
    progress |= remove_sessions();
    progress |= reclaim();
    watch_.check(now_ns);
    if (progress || spin()) continue;
    sleep();
  }
  return leave();
}

int Engine::leave() {
  schedule_.for_each([](Operation& operation) { operation.abandon(); });
  for (const auto& [id, group] : groups_) {
    for (const auto& member : group->members) {
      if (member->commands != nullptr) member->commands->halt();
    }
  }
  const std::uint64_t patience_ns = clock_.now_ns() + kLeaveNs;
  const auto busy = [this](const auto& entry) { return !settled(*entry.second); };
  while (std::any_of(groups_.begin(), groups_.end(), busy)) {
    if (clock_.now_ns() > patience_ns)
      ::_exit(*link_.exit_code());  // a device that hangs does not hold up the end
    device_->advance();
    ::sched_yield();
  }
  schedule_.clear();
  groups_.clear();
  while (device_->advance()) {
    if (clock_.now_ns() > patience_ns) ::_exit(*link_.exit_code());
    ::sched_yield();
  }
  return *link_.exit_code();
}

// Sessions in turn, until each has had its own or the round has lasted long enough.
bool Engine::step_operations() {
  if (schedule_.empty()) return false;
  bool progress = false;
  const std::int32_t first = schedule_.moving_priority();
  std::uint64_t now = clock_.now_ns();
  const std::uint64_t end = now + kShareNs;
  for (std::size_t left = schedule_.num_sessions(); left > 0 && now < end && !schedule_.empty(); --left) {
    const bool moved = take_turn(schedule_.next_session(), first, now + kTurnNs);
    idle_turns_ = moved ? 0 : idle_turns_ + 1;
    progress |= moved;
    now = clock_.now_ns();
  }
  return progress || idle_turns_ < schedule_.num_sessions();
}

// The operations of one session, each until it waits. While rows of a higher priority can move, those of a
// lower one stand back; now and then they get a chunk, so that they end.
bool Engine::take_turn(Schedule::Queue& queue, std::int32_t first, std::uint64_t until_ns) {
  const std::int32_t moves_from = ++queue.turns % kTurnsPerLowChunk == 0 ? kNoPriority : first;
  bool progress = false;
  bool over = false;
  for (std::size_t left = queue.size(); left > 0 && !over; --left) {
    Operation* operation = queue.next();
    if (operation == nullptr) break;
    StepResult result;
    do {
      result = step(*operation, moves_from);
      progress |= result == StepResult::kProgress;
      over = result != StepResult::kIdle && clock_.now_ns() >= until_ns;
    } while (result == StepResult::kProgress && !over);
    if (operation->can_move()) queue.note_moving(operation->member().group.priority);
    progress |= end_if_done(*operation, result);
  }
  return progress;
}

bool Engine::end_if_done(Operation& operation, StepResult result) {
  if (result == StepResult::kDone) {
    finish(operation, StatusCode::kOk, {});
  } else if (operation.verdict() && operation.settled()) {
    finish(operation, operation.verdict()->cause, *operation.verdict());
  } else {
    return false;
  }
  schedule_.remove(operation);
  return true;
}

StepResult Engine::step(Operation& operation, std::int32_t first) {
  Group& group = operation.member().group;
  if (operation.stage() == abi::OpStage::kBreaking) {
    const bool counts = operation.settled() && group.life.counts_ends() && operation.completed_anyway();
    return counts ? StepResult::kDone : StepResult::kIdle;
  }
  const bool stands_back = group.priority < first && operation.can_move();
  StepResult result = stands_back ? StepResult::kIdle : operation.step(clock_.round_ns());
  if (result == StepResult::kIdle && clock_.round_ns() >= operation.deadline_ns())
    result = operation.expire(clock_.round_ns());
  if (result != StepResult::kFailed) return result;
  if (group.life.is_lost() || !operation.is_collective()) {
    operation.set_verdict(operation.failure());  // the group will not break (once more) for it
  } else {
    request_break(group, operation.failure());
  }
  return StepResult::kIdle;
}

void Engine::request_break(Group& group, const abi::Break& failure) {
  if (!group.life.may(GroupPhase::kAsking)) return;
  group.life.enter(GroupPhase::kAsking);
  link_.send(abi::LinkType::kBreakRequest, failure);
}

// Any rank's engine asks, whichever comes there first. To the clients it is a break like any other.
void Engine::renew_numbers(const Member& member) {
  Group& group = member.group;
  if (group.in_tags(member.next_number) < abi::kTagRenewal) return;
  request_break(group,
                as_break(group, {StatusCode::kAborted, -1,
                                 "epoch " + std::to_string(group.epoch) + " has no numbers left after " +
                                     std::to_string(member.next_number - group.resume_index) +
                                     " operations; the next one has"}));
}

namespace {

std::vector<Operation*> operations_of(const Group& group) {
  std::vector<Operation*> all;
  for (const auto& member : group.members)
    all.insert(all.end(), member->operations.begin(), member->operations.end());
  return all;
}

}  // namespace

// What everybody has finished is finished here too, though this engine may not have looked yet: an operation
// that the peers saw succeed must not fail for a break that came later.
void Engine::finish_arrived(Group& group) {
  for (Operation* operation : operations_of(group)) {
    if (operation->may_be_done() && operation->step(clock_.round_ns()) == StepResult::kDone) {
      finish(*operation, StatusCode::kOk, {});
      schedule_.remove(*operation);
    }
  }
}

// Those that the device has not left yet end when it has.
void Engine::fail_operations(Group& group, std::uint64_t from, const abi::Break& cause) {
  for (Operation* operation : operations_of(group)) {
    if (operation->index() < from && operation->stage() != abi::OpStage::kBreaking) continue;
    if (operation->settled()) {
      finish(*operation, cause.cause, cause);
      schedule_.remove(*operation);
    } else {
      operation->set_verdict(cause);
    }
  }
}

bool Engine::settled(const Group& group) const {
  return commands_halted(group) &&
         std::all_of(group.members.begin(), group.members.end(), [](const auto& member) {
           return std::all_of(member->operations.begin(), member->operations.end(),
                              [](const Operation* operation) { return operation->settled(); });
         });
}

void Engine::acknowledge_breaks() {
  for (const auto& [id, group] : groups_) {
    give_up_memory(*group);
    const bool gone = group->life.is(GroupPhase::kUnmapped);
    if (!gone && (!group->life.is(GroupPhase::kBreaking) || !settled(*group))) continue;
    for (const auto& member : group->members) read_journal(*member);
    std::uint64_t next = std::numeric_limits<std::uint64_t>::max();
    for (const auto& member : group->members) {
      if (!member->stopped()) next = std::min(next, member->next_index());
    }
    group->life.enter(gone ? GroupPhase::kLost : GroupPhase::kBroken);
    link_.send(abi::LinkType::kBroken, abi::Broken{id, group->cause.epoch, next});
  }
}

// Of a lost group, when its operations have ended. The supervisor is not told before nothing of it is mapped
// here any more: who closes a memory last has all its pages to free.
void Engine::give_up_memory(Group& group) {
  if (!group.life.is(GroupPhase::kLosing) || group.has_operations() || !commands_halted(group)) return;
  for (const auto& member : group.members) {
    read_journal(*member);
    close_streams_of(*member);
    member->commands.reset();
    if (member->lane != nullptr) reclaimer_.take(*member->lane);
    member->lane.reset();
  }
  for (GroupRankMemory& rank : group.ranks) reclaimer_.take(rank);
  group.ranks.clear();  // nothing touches an arena of this group any more
  group.peers.clear();
  group.life.enter(GroupPhase::kUnmapping);
  reclaimer_.then([this, id = group.id] {
    if (Group* lost = find_group(id); lost != nullptr) lost->life.enter(GroupPhase::kUnmapped);
  });
}

bool Engine::reclaim() {
  if (reclaimer_.empty()) return false;
  const std::uint64_t end = clock_.now_ns() + kShareNs;
  do {
    reclaimer_.step();
  } while (!reclaimer_.empty() && clock_.now_ns() < end);
  return true;
}

bool Engine::remove_sessions() {
  bool removed = false;
  for (auto it = sessions_.begin(); it != sessions_.end();) {
    SessionPort& session = *it->second;
    if (!session.removing || schedule_.has(it->first)) {
      ++it;
      continue;
    }
    for (const auto& [number, member] : session.members) member->session = nullptr;
    const abi::SessionRef reply{it->first};
    it = sessions_.erase(it);
    link_.send(abi::LinkType::kSessionRemoved, reply);
    removed = true;
  }
  return removed;
}

// Polls on for a while when that pays: a short wait costs less than a sleep. Yields meanwhile, because
// engines and clients may outnumber the cores.
bool Engine::spin() {
  if (spin_budget_ns_ == 0) return false;
  const std::uint64_t start = clock_.now_ns();
  while (clock_.now_ns() - start < spin_budget_ns_) {
    if (anything_pending()) {
      grow_spin_budget();
      return true;
    }
    ::sched_yield();
  }
  spin_budget_ns_ = spin_budget_ns_ < spin_limit_ns() / 16 ? 0 : spin_budget_ns_ / 2;
  return false;
}

std::uint64_t Engine::spin_limit_ns() const {
  return std::uint64_t{settings_.spin_us} * 1000;
}

void Engine::grow_spin_budget() {
  spin_budget_ns_ = std::min(spin_limit_ns(), spin_budget_ns_ + spin_limit_ns() / 4);
}

// True if a round of the loop would find something to do: the same looks, without the work.
bool Engine::anything_pending() {
  for (const auto& [id, session] : sessions_) {
    if (session->has_submission() || session->can_flush()) return true;
  }
  return !reclaimer_.empty() || journal_pending() || device_->has_news() ||
         schedule_.find([](const Operation& operation) { return operation.runnable(); }) != nullptr;
}

void Engine::set_sleeping(bool sleeping) {
  page_->sleep.sleeping.store(sleeping ? 1 : 0, std::memory_order_relaxed);
  for (const auto& [id, session] : sessions_) session->set_sleeping(sleeping);
}

void Engine::sleep() {
  set_sleeping(true);
  // Pairs with the fence of whoever rings: either it sees us sleeping, or we see what it published.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (anything_pending()) {
    set_sleeping(false);
    return;
  }
  const std::uint64_t now = clock_.now_ns();
  const std::uint64_t until = next_look_ns(now);
  const std::uint64_t wait_ns = until <= now ? 0 : std::min(until - now, kMaxSleepNs);
  const timespec wait{static_cast<time_t>(wait_ns / 1'000'000'000),
                      static_cast<long>(wait_ns % 1'000'000'000)};
  pollfd waiting[] = {{bell_.fd(), POLLIN, 0}, {link_.fd(), POLLIN, 0}};
  count(page_->sleeps);
  const int ready = ::ppoll(waiting, 2, &wait, nullptr);
  set_sleeping(false);
  // A sleep so short that polling on would have won.
  if (ready > 0 && clock_.now_ns() - now < 2 * spin_limit_ns()) grow_spin_budget();
  if (ready <= 0) return;
  if (waiting[0].revents != 0) bell_.take();
  if (waiting[1].revents != 0) {
    clock_.begin_round();
    link_.receive(clock_, clock_.now_ns() + kShareNs);
  }
}

std::uint64_t Engine::next_look_ns(std::uint64_t now) const {
  std::uint64_t next = std::min(watch_.next_look_ns(now), next_journal_look_ns(now));
  schedule_.for_each([&](const Operation& operation) {
    if (operation.needs_polling()) next = std::min(next, now + kDeviceLookNs);
    if (operation.stage() != abi::OpStage::kBreaking) next = std::min(next, operation.deadline_ns());
  });
  return next;
}

}  // namespace epd
