// Calls, as one thread of CTA 0 takes them: it looks for them between operations, judges them, and tells
// the host of their ends. The README of this room has the memory ordering. For device and host, see
// proto/ordered.h.
#pragma once

#include "cuda/ending.h"
#include "kernels/calls.h"

namespace epd::kernels::cuda {

// What that thread keeps, in shared memory: nobody else reads or writes it. Device memory has the state only
// between kernels.
struct Watch {
  static constexpr std::uint32_t kRoutes = 16;  // records of buffer slots come first
  CommandState state;
  TakenCall running;
  abi::PackedCall call;  // which that was
  bool runs;             // `running` does
  std::uint32_t entry;   // next one of the queue
  std::uint32_t journal_read;
  std::uint32_t known_routes;  // set of those in `routes`
  RouteState routes[kRoutes];
};

// ---- what does not change while a turn lasts, and so is read once from L2 (a third of a microsecond each)

EPD_DEVICE inline RouteState route_of(const CommandArguments& own, Watch& watch, std::uint32_t record) {
  static_assert(sizeof(RouteState) == 16);
  EPD_BELOW(record, own.limits.num_routes);
  const bool kept = record < Watch::kRoutes;
  if (kept && ((watch.known_routes >> record) & 1) != 0) return watch.routes[record];
  const Words words = load_here(reinterpret_cast<const Words*>(own.routes + record));
  const RouteState route{std::uint64_t{words.y} << 32 | words.x, words.z, words.w};
  if (kept) {
    watch.routes[record] = route;
    watch.known_routes |= 1u << record;
  }
  return route;
}

EPD_DEVICE inline void store_route(const CommandArguments& own, Watch& watch, std::uint32_t record,
                                   const RouteState& route) {
  own.routes[record] = route;
  if (record < Watch::kRoutes) {
    watch.routes[record] = route;
    watch.known_routes |= 1u << record;
  }
}

// ---- turns

// Once in a lane's life: from then on nobody else knows better.
EPD_DEVICE inline void set_sequence(const CommandArguments& own, Watch& watch) {
  const CommandStart& start = own.host->start;
  if (watch.state.sequence_set != 0 || load_relaxed_system(&start.sets) == 0) return;
  watch.state.sequence_set = 1;
  watch.state.sequence = load_relaxed_system(&start.sequence);
}

// When a kernel begins: where the one before has ended.
EPD_DEVICE inline void begin_watch(const ResidentArguments& own, Watch& watch) {
  watch.entry = load_here(&own.state->next);
  watch.runs = false;
  if (own.commands.words == nullptr) return;
  load_whole(watch.state, *own.commands.state);
  watch.journal_read = watch.state.journal_read;
  watch.known_routes = 0;
  set_sequence(own.commands, watch);
}

// And before it ends. The host's words in the same place are left alone.
EPD_DEVICE inline void end_watch(const ResidentArguments& own, const Watch& watch) {
  own.state->next = watch.entry;
  if (own.commands.words == nullptr) return;
  CommandState& to = *own.commands.state;
  to.epoch = watch.state.epoch;
  to.index = watch.state.index;
  to.changed_epoch = watch.state.changed_epoch;
  to.sequence = watch.state.sequence;
  to.journal = watch.state.journal;
  to.turn_taken = watch.state.turn_taken;
  to.failed = watch.state.failed;
  to.noops = watch.state.noops;
  to.sequence_set = watch.state.sequence_set;
}

// The host has said something new, and nothing runs. Here alone host memory is read: a few microseconds.
EPD_DEVICE inline void take_turn(const CommandArguments& own, Watch& watch) {
  const std::uint32_t turn = load_acquire_system(&own.state->turn);
  watch.known_routes = 0;
  if (turn % 2 != 0) {
    const CommandStart& start = own.host->start;
    set_sequence(own, watch);
    watch.state.epoch = load_relaxed_system(&start.epoch);
    watch.state.index = load_relaxed_system(&start.index);
    watch.state.changed_epoch = load_relaxed_system(&start.changed_epoch);
    watch.state.failed = 0;
    const std::uint32_t routes = load_relaxed_system(&start.num_routes);
    EPD_AT_MOST(routes, own.limits.num_routes);
    const auto* const routes_at = reinterpret_cast<const std::uint64_t*>(&start.routes);
    const auto* const from = reinterpret_cast<const Words*>(load_relaxed_system(routes_at));
    for (std::uint32_t i = 0; i < routes; ++i)
      reinterpret_cast<Words*>(own.routes)[i] = load_of_host(from + i);
  }
  watch.state.turn_taken = turn;
  store_release_system(&own.host->turn, turn);
}

// ---- the journal

EPD_DEVICE inline bool journal_is_full(const CommandArguments& own, Watch& watch) {
  if (watch.state.journal - watch.journal_read < kJournalEntries) return false;
  watch.journal_read = load_acquire_system(&own.state->journal_read);
  return watch.state.journal - watch.journal_read >= kJournalEntries;
}

EPD_DEVICE inline JournalEntry& next_entry_of(const CommandArguments& own, const Watch& watch) {
  EPD_BELOW(watch.state.journal - watch.journal_read, kJournalEntries);
  return own.host->journal[watch.state.journal % kJournalEntries];
}

// Behind the result, which is there. Stores to host memory, for which the last one waits: a microsecond or
// two that the client's stream does not see.
EPD_DEVICE inline void write_journal(const CommandArguments& own, Watch& watch, const abi::PackedCall& call,
                                     std::uint64_t index) {
  JournalEntry& entry = next_entry_of(own, watch);
  for (std::uint32_t i = 0; i < abi::PackedCall::kWords; ++i) entry.call.words[i] = call.words[i];
  entry.index = index;
  store_release_system(&entry.number, ++watch.state.journal);
}

// ---- ends

// Of a call that was not run. Those before it, if it is not the one that was awaited, are lost with it.
EPD_DEVICE inline void end_call(const CommandArguments& own, Watch& watch, const abi::Call& call, bool well) {
  EPD_BELOW(abi::flag_of(call.op, call.slot), abi::kCommandFlags);
  const std::uint32_t ended = call.number + 1 - watch.state.sequence;
  watch.state.sequence = call.number + 1;
  if (!well) add_system(&own.words->failed, ended);
  if (call.flagged) store_release_system(&own.words->flags[abi::flag_of(call.op, call.slot)], 1u);
  store_release(&own.words->done, call.number + 1);
}

EPD_DEVICE inline void write_result(const CommandArguments& own, const Watch& watch,
                                    const Judgement& judgement, std::uint64_t tag) {
  OpResult result = ended(judgement.error, -1);
  result.rows = judgement.rows;
  result.room = judgement.room;
  result.tag = tag;
  next_entry_of(own, watch).result = result;
}

// A noop too is done here: no other CTA hears of it.
EPD_DEVICE inline void end_unheralded(const CommandArguments& own, Watch& watch,
                                      const abi::PackedCall& packed, const Judgement& judgement) {
  const bool well = judgement.verdict == Verdict::kNoop;
  const abi::Call call = abi::unpack(packed);
  end_call(own, watch, call, well);
  if (judgement.verdict == Verdict::kDiscard) return;
  if (!well) watch.state.failed = 1;
  write_result(own, watch, judgement, well ? ++watch.state.noops : 0);
  write_journal(own, watch, packed, watch.state.index);
}

// All CTAs have left the operation that was heralded last.
EPD_DEVICE inline void conclude(const CommandArguments& own, Watch& watch, bool failed) {
  if (!watch.runs) return;
  watch.runs = false;
  const TakenCall& call = watch.running;
  if (failed) watch.state.failed = 1;
  if (!failed && makes_routing(call)) store_route(own, watch, call.route, made_route(call));
  write_journal(own, watch, watch.call, watch.state.index - 1);
}

// ---- what CTA 0 looks for

// Looks without a pause for some milliseconds, then now and then. (A look takes 0.7 us.)
inline constexpr std::uint32_t kEagerLooks = 4096;
inline constexpr std::uint32_t kPauseNs = 200;
EPD_DEVICE inline void pause(std::uint32_t looks) {
  if (looks > kEagerLooks)
    look_after(looks, kPauseNs);
  else
    look_again(looks);
}

// What CTA 0 tells the others to do; 0: nothing.
using HeraldWord = std::uint32_t;  // low half of Herald::entry

// Judges the call. 0: it is not there, or it has ended.
EPD_DEVICE inline HeraldWord accept_call(const CommandArguments& own, Watch& watch,
                                         const abi::PackedCall& packed) {
  Judgement judgement = judge_call(watch.state, own.limits, packed);
  if (judgement.verdict == Verdict::kWait) return 0;
  // What the host has to hear of waits until it can; a turn may come meanwhile.
  if (judgement.verdict != Verdict::kDiscard && journal_is_full(own, watch)) return 0;
  const abi::Call call = abi::unpack(packed);
  RouteState route;
  if (judgement.verdict == Verdict::kRun) {
    route = route_of(own, watch, call.route);
    judgement = judge_routing(watch.state, call, route);
  }
  if (judgement.verdict != Verdict::kRun) {
    end_unheralded(own, watch, packed, judgement);
    return 0;
  }
  watch.running = take(watch.state, own.limits.depth, call, route);
  watch.call = packed;
  watch.runs = true;
  ++watch.state.index;
  watch.state.sequence = call.number + 1;
  return static_cast<HeraldWord>(Herald::kByCommand) |
         static_cast<HeraldWord>(task_of(call.op, own.per_expert)) << 16;
}

// ---- stepping aside

// Looks for each one at the host's memory, which takes two microseconds: one in a millisecond or two.
inline constexpr std::uint32_t kLooksPerRound = kLooksInMilliseconds;

EPD_DEVICE inline bool round_is_over(const ResidentArguments& own) {
  return load_relaxed_system(own.round) != own.own_round;
}

// A stop for a kernel that had stepped aside before it came to that.
EPD_DEVICE inline bool is_of_former_round(const ResidentArguments& own, std::uint64_t entry) {
  return static_cast<Task>(entry >> 16 & 0xffff) == Task::kStop &&
         (entry & 0xffff) != own.own_round % kStopRounds;
}

// Whether to leave, or 0. Not before what has been told: its client's kernel may wait, and the stream that
// brings entries be held up.
EPD_DEVICE EPD_NO_INLINE inline HeraldWord look_aside(const ResidentArguments& own, const Watch& watch) {
  if (!round_is_over(own)) return 0;
  const std::uint64_t entry = load_acquire_system(own.told + watch.entry % kQueueEntries);
  const bool is_there = static_cast<std::uint32_t>(entry >> 32) == watch.entry + 1;
  const auto task = static_cast<Task>(entry >> 16 & 0xffff);
  // A stop stays where it is, for the next kernel to pass over.
  return is_there && task != Task::kStop ? static_cast<HeraldWord>(entry)
                                         : static_cast<HeraldWord>(Herald::kAside);
}

// ---- until there is work

// Two words of the host's, of which each counts by itself.
struct HostWords {
  std::uint32_t first;
  std::uint32_t second;
};
EPD_DEVICE inline HostWords load_pair(const std::uint32_t* first) {
  const std::uint64_t both = load_relaxed_system(reinterpret_cast<const std::uint64_t*>(first));  // NOLINT
  return {static_cast<std::uint32_t>(both), static_cast<std::uint32_t>(both >> 32)};
}

// Until the queue has an entry, or a call is to be run. All loads of a look but the last are relaxed, so
// that they are on their way together and a look stays one round trip. The last one acquires: it is the
// call's. What else turns out to be new is looked at again.
EPD_DEVICE inline HeraldWord await_work(const ResidentArguments& own, Watch& watch) {
  const CommandArguments& commands = own.commands;
  for (std::uint32_t looks = 0;; ++looks) {
    const std::uint64_t* const at = own.state->entries + watch.entry % kQueueEntries;
    const std::uint32_t sequence = watch.state.sequence;
    const std::uint64_t entry = load_relaxed_system(at);
    const HostWords turn = load_pair(&commands.state->turn);
    const HostWords journal = load_pair(&commands.state->journal_read);
    const std::uint64_t* const words = commands.words->calls[sequence % abi::kCommandSlots].words;
    abi::PackedCall call;
    for (std::uint32_t i = 1; i < abi::PackedCall::kWords; ++i)
      call.words[i] = load_relaxed_system(words + i);
    call.words[0] = load_acquire_system(words);
    if (static_cast<std::uint32_t>(entry >> 32) == watch.entry + 1) {
      if (!is_of_former_round(own, entry)) return static_cast<HeraldWord>(load_acquire_system(at));
      ++watch.entry;
      continue;
    }
    if (turn.first != watch.state.turn_taken) {
      take_turn(commands, watch);
      looks = 0;
      continue;
    }
    watch.state.sms = turn.second;
    watch.state.timeout_ms = journal.second;
    const HeraldWord work = accept_call(commands, watch, call);
    if (work != 0) return work;
    if (sequence != watch.state.sequence) looks = 0;
    if (looks % kLooksPerRound == kLooksPerRound - 1) {
      const HeraldWord aside = look_aside(own, watch);
      if (aside != 0) return aside;
    }
    pause(looks);
  }
}

}  // namespace epd::kernels::cuda
