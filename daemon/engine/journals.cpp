// Engine: members whose operations are commands. What the device says that it has done, and when it is to
// stop.

#include "base/log.h"
#include "commands.h"
#include "engine.h"

#include <algorithm>

namespace epd {

using kernels::cuda::OpError;

namespace {

constexpr std::uint64_t kBusyNs = 100'000'000;     // so long after the last command others are awaited
constexpr std::uint64_t kBusyLookNs = 1'000'000;   // nobody rings for what a command has done, and nobody
constexpr std::uint64_t kIdleLookNs = 20'000'000;  // waits for that; operations take longer to fill a journal
constexpr std::uint64_t kHaltingLookNs = 50'000;
constexpr std::uint64_t kGraceNs = 100'000'000;  // see halt_commands

}  // namespace

bool Engine::read_journals() {
  if (!device_->traits().has_streams) return false;  // no commands there, and there may be many members
  bool progress = false;
  for (const auto& [id, group] : groups_) {
    for (const auto& member : group->members) progress |= read_journal(*member);
  }
  return progress;
}

bool Engine::read_journal(Member& member) {
  if (member.commands == nullptr) return false;
  Commands& commands = *member.commands;
  bool progress = false;
  while (const kernels::cuda::JournalEntry* entry = commands.front()) {
    commands.last_end_ns = clock_.round_ns();
    read_entry(member, *entry);
    commands.pop();
    progress = true;
  }
  if (member.group.life.is_active() && !member.stopped() && member.failed_from == kNoFailure) {
    commands.look(page_, clock_.round_ns());
  } else {
    commands.show_none();
  }
  return progress;
}

void Engine::read_entry(Member& member, const kernels::cuda::JournalEntry& entry) {
  Commands& commands = *member.commands;
  if (const std::string why = commands.illegal(entry); !why.empty()) {
    if (member.session != nullptr && !member.session->ended()) end_session(*member.session, why);
    return;
  }
  const abi::Op op = commands.submission(entry).op;
  count(page_->ops_submitted);
  count_taken(member, op);
  abi::Completion completion{};  // which nobody gets: for counting
  const bool done = entry.result.error == OpError::kNone;
  if (done && op != abi::Op::kNoop) {
    member.next_number = commands.index_of(entry) + 1;
    member.publish_next_index();
    renew_numbers(member);
    count_rows(page_, member, op, commands.rows_of(entry));
    count_ran(member, saturated_us(0, entry.result.ran_ns));
  } else if (!done) {
    completion.status = fail_command(member, entry);
  }
  count(done ? page_->ops_completed : page_->ops_failed);
  count_ended(member, abi::Op::kNone, completion);  // nobody knows when it was enqueued
}

// What was aborted, was so because the group breaks or ends, or this rank does. It has failed though every
// rank may have completed it: its stream has gone on, perhaps without the last rows.
StatusCode Engine::fail_command(Member& member, const kernels::cuda::JournalEntry& entry) {
  if (member.commands->submission(entry).op == abi::Op::kNoop) return StatusCode::kAborted;
  member.next_number = member.commands->index_of(entry);
  member.failed_from = std::min(member.failed_from, member.next_number);
  if (entry.result.error == OpError::kAborted) return StatusCode::kAborted;
  const Failure failure = member.commands->failure(entry, clock_.round_ns());
  request_break(member.group, as_break(member.group, failure));
  return failure.cause;
}

// A group that is lost may still complete what every rank has begun (Break::fail_from): as long as commands
// end, and a little longer.
void Engine::halt_commands() {
  for (const auto& [id, group] : groups_) {
    if (!group->life.is(GroupPhase::kLosing)) continue;
    for (const auto& member : group->members) {
      if (member->commands == nullptr) continue;
      const std::uint64_t since = std::max(group->broken_ns, member->commands->last_end_ns);
      if (member->next_index() >= group->cause.fail_from || member->failed_from != kNoFailure ||
          clock_.round_ns() >= since + kGraceNs)
        member->commands->halt();
    }
  }
}

bool Engine::commands_halted(const Group& group) const {
  return std::all_of(group.members.begin(), group.members.end(), [](const auto& member) {
    return member->commands == nullptr || member->commands->halted();
  });
}

// What a rank has submitted is known when nothing of it runs any more.
void Engine::answer_stops() {
  std::erase_if(stops_, [this](abi::MemberRef& reply) {
    Group* group = find_group(reply.group_id);
    if (group == nullptr) return true;
    Member* member = find_member(*group, reply.rank);
    if (member != nullptr && member->commands != nullptr) {
      if (!member->commands->halted()) return false;
      read_journal(*member);
    }
    reply.next_submit = member != nullptr ? member->next_number : group->resume_index;
    link_.send(abi::LinkType::kMemberStopped, reply);
    return true;
  });
}

bool Engine::journal_pending() const {
  return device_->traits().has_streams && std::any_of(groups_.begin(), groups_.end(), [](const auto& entry) {
           return std::any_of(entry.second->members.begin(), entry.second->members.end(),
                              [](const auto& member) {
                                return member->commands != nullptr && member->commands->front() != nullptr;
                              });
         });
}

std::uint64_t Engine::next_journal_look_ns(std::uint64_t now) const {
  std::uint64_t next = kNever;
  if (!device_->traits().has_streams) return next;
  for (const auto& [id, group] : groups_) {
    for (const auto& member : group->members) {
      if (member->commands == nullptr) continue;
      const bool halting = group->life.awaits_device() || member->stopped();
      const bool busy = now < member->commands->last_end_ns + kBusyNs;
      const std::uint64_t wait = busy ? kBusyLookNs : kIdleLookNs;
      next = std::min(next, now + (halting ? kHaltingLookNs : wait));
    }
  }
  return next;
}

}  // namespace epd
