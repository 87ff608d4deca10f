// Calls in the resident kernel. Between operations, one thread of CTA 0 polls for calls, validates them and
// reports their ends to the host. kernels/MEMORY_ORDERING.md explains the memory ordering. The code compiles
// for device and host (proto/ordered.h).
#pragma once

#include "cuda/common/ending.h"
#include "kernels/calls.h"

namespace epd::kernels::cuda {

// What this thread keeps, in shared memory. The other threads of CTA 0 only read `running`.
// Device memory holds the state only between two kernels.
struct Watch {
  // The number of routing records that are kept here. The records of slots come first.
  static constexpr std::uint32_t kRoutes = 16;
  CallState state;
  TakenCall running;
  abi::PackedCall call;  // the call of `running`
  bool runs;             // `running` has not ended
  CallRing last;         // the ring of the last accepted call
  std::uint32_t journal_read;
  std::uint32_t known_routes;  // set of valid entries of `routes`
  RouteState routes[kRoutes];
};

// ---- routing records. They are constant in an enabled epoch, so each is read once from L2 (0.3 us).

// Returns the state of a routing record.
EPD_DEVICE inline RouteState route_of(const CallArguments& own, Watch& watch, std::uint32_t record) {
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

// Stores the state of a routing record, here and in device memory.
EPD_DEVICE inline void store_route(const CallArguments& own, Watch& watch, std::uint32_t record,
                                   const RouteState& route) {
  own.routes[record] = route;
  if (record < Watch::kRoutes) {
    watch.routes[record] = route;
    watch.known_routes |= 1u << record;
  }
}

// ---- enabled epochs

// Takes the host's numbers of the rings' next calls, once in a lane's life. Afterwards the kernel's own
// numbers count.
EPD_DEVICE inline void set_sequence(const CallArguments& own, Watch& watch) {
  const CallStart& start = own.host->start;
  if (watch.state.sequence_set != 0 || load_relaxed_system(&start.sets) == 0) return;
  watch.state.sequence_set = 1;
  for (std::uint32_t ring = 0; ring < kCallRings; ++ring)
    watch.state.sequence[ring] = load_relaxed_system(&start.sequence[ring]);
}

// Loads the state at the kernel's begin. It is the state that the kernel before has left.
EPD_DEVICE inline void begin_watch(const ResidentArguments& own, Watch& watch) {
  watch.runs = false;
  watch.last = kByStreams;
  load_whole(watch.state, *own.calls.state);
  watch.journal_read = watch.state.journal_read;
  watch.known_routes = 0;
  set_sequence(own.calls, watch);
}

// Stores the state at the kernel's end. The host's words in the same struct stay untouched.
EPD_DEVICE inline void end_watch(const ResidentArguments& own, const Watch& watch) {
  CallState& to = *own.calls.state;
  to.epoch = watch.state.epoch;
  to.index = watch.state.index;
  to.changed_epoch = watch.state.changed_epoch;
  to.index_base = watch.state.index_base;
  for (std::uint32_t ring = 0; ring < kCallRings; ++ring) to.sequence[ring] = watch.state.sequence[ring];
  to.journal = watch.state.journal;
  to.enabled_epoch_taken = watch.state.enabled_epoch_taken;
  to.failed = watch.state.failed;
  to.noops = watch.state.noops;
  to.results = watch.state.results;
  to.sequence_set = watch.state.sequence_set;
  to.together = watch.state.together;
  to.called = watch.state.called;
  to.called_ns = watch.state.called_ns;
  to.told = watch.state.told;
}

// Takes over a new enabled epoch from the host, while no operation runs. It reads CallStart in host
// memory, which takes a few microseconds.
EPD_DEVICE inline void take_enabled_epoch(const CallArguments& own, Watch& watch) {
  const std::uint32_t enabled_epoch = load_acquire_system(&own.state->enabled_epoch);
  watch.known_routes = 0;
  watch.state.told = 0;  // other ranks' memory may be gone
  if (enabled_epoch % 2 != 0) {
    const CallStart& start = own.host->start;
    set_sequence(own, watch);
    watch.state.epoch = load_relaxed_system(&start.epoch);
    watch.state.index = load_relaxed_system(&start.index);
    watch.state.index_base = load_relaxed_system(&start.index_base);
    watch.state.changed_epoch = load_relaxed_system(&start.changed_epoch);
    watch.state.failed = 0;
    watch.state.together = load_here(&own.view->group.together);
    watch.state.called = 0;
    const std::uint32_t routes = load_relaxed_system(&start.num_routes);
    EPD_AT_MOST(routes, own.limits.num_routes);
    const auto* const routes_at = reinterpret_cast<const std::uint64_t*>(&start.routes);
    const auto* const from = reinterpret_cast<const Words*>(load_relaxed_system(routes_at));
    for (std::uint32_t i = 0; i < routes; ++i)
      reinterpret_cast<Words*>(own.routes)[i] = load_of_host(from + i);
  }
  watch.state.enabled_epoch_taken = enabled_epoch;
  store_release_system(&own.host->enabled_epoch, enabled_epoch);
}

// ---- the journal

// Returns whether the journal has no free entry. The host's progress is read only if necessary.
EPD_DEVICE inline bool journal_is_full(const CallArguments& own, Watch& watch) {
  if (watch.state.journal - watch.journal_read < kJournalEntries) return false;
  watch.journal_read = load_acquire_system(&own.state->journal_read);
  return watch.state.journal - watch.journal_read >= kJournalEntries;
}

// The entry to be written next.
EPD_DEVICE inline JournalEntry& next_entry_of(const CallArguments& own, const Watch& watch) {
  EPD_BELOW(watch.state.journal - watch.journal_read, kJournalEntries);
  return own.host->journal[watch.state.journal % kJournalEntries];
}

// Completes the next journal entry; its result is written already. The release at the end waits for the
// stores to host memory, one or two microseconds. The client's stream does not wait for it.
EPD_DEVICE inline void write_journal(const CallArguments& own, Watch& watch, const abi::PackedCall& call,
                                     CallRing ring, std::uint64_t index) {
  JournalEntry& entry = next_entry_of(own, watch);
  for (std::uint32_t i = 0; i < abi::PackedCall::kWords; ++i) entry.call.words[i] = call.words[i];
  entry.index = index;
  entry.ring = ring;
  store_release_system(&entry.number, ++watch.state.journal);
}

// ---- results

// Returns how often a replayed call has ended with this result before, as device memory says.
EPD_DEVICE inline ResultRuns runs_of(const CallArguments& own, std::uint32_t result) {
  const std::uint32_t place = abi::place_of(result);
  if (place < abi::kOnceResults) return {};
  const std::uint64_t word = load_relaxed(reinterpret_cast<const std::uint64_t*>(  // NOLINT
      own.runs + (place - abi::kOnceResults)));
  return {static_cast<std::uint32_t>(word), static_cast<std::uint32_t>(word >> 32)};
}

// Writes the part of a call's result that CTA 0 writes. `index` is the operation's, or the next one's if
// there is no operation.
EPD_DEVICE inline void conclude_result(const CallArguments& own, Watch& watch, const ResultOut& out,
                                       std::uint32_t result, ResultRuns before, std::uint64_t index) {
  const std::uint32_t place = abi::place_of(result);
  EPD_BELOW(place, abi::kResultPlaces);
  const std::uint32_t runs = before.result == result + 1 ? before.runs + 1 : 1;
  if (place >= abi::kOnceResults) own.runs[place - abi::kOnceResults] = {result + 1, runs};
  const std::uint64_t number = index + watch.state.index_base;
  write_word(out, abi::CallResult::kResult, result);
  write_word(out, abi::CallResult::kIndexLow, static_cast<std::uint32_t>(number));
  write_word(out, abi::CallResult::kIndexHigh, static_cast<std::uint32_t>(number >> 32));
  write_word(out, abi::CallResult::kRuns, runs);
  watch.state.results = out.number;
}

// ---- the ends of calls

// Publishes that all calls of the ring up to `number` have ended.
EPD_DEVICE inline void publish_ended(const CallArguments& own, CallRing ring, std::uint32_t number) {
  if (ring == kByHost) {
    store_relaxed_system(&own.results->host_ended, number + 1);
  } else {
    store_release(&own.words->done, number + 1);
  }
}

// Ends a call that was not run. If calls before it were never found, they are lost and end with it.
EPD_DEVICE inline void end_call(const CallArguments& own, Watch& watch, CallRing ring, const abi::Call& call,
                                bool well) {
  EPD_BELOW(abi::flag_of(call.op, call.slot), abi::kCallFlags);
  const std::uint32_t ended = call.number + 1 - watch.state.sequence[ring];
  watch.state.sequence[ring] = call.number + 1;
  if (!well) add_system(&own.words->failed, ended);
  if (ring == kByStreams && call.flagged)
    store_release_system(&own.words->flags[abi::flag_of(call.op, call.slot)], 1u);
  publish_ended(own, ring, call.number);
}

// Returns the ending of a call that was not run.
EPD_DEVICE inline abi::CallEnding ending_of(Verdict verdict) {
  if (verdict == Verdict::kNoop) return abi::CallEnding::kCarriedOut;
  return verdict == Verdict::kDiscard ? abi::CallEnding::kDiscarded : abi::CallEnding::kFailed;
}

// Publishes the result of a call that was not run. The client may name a result that does not exist; that is
// ignored.
EPD_DEVICE inline void publish_result(const CallArguments& own, Watch& watch, const abi::Call& call,
                                      abi::CallEnding ending) {
  const std::uint32_t place = abi::place_of(call.result);
  if (place >= abi::kResultPlaces) return;
  const ResultOut out{&own.results->places[place], next_writing(watch.state)};
  write_ending(out, ending, ended(OpError::kNone, -1));
  conclude_result(own, watch, out, call.result, runs_of(own, call.result), watch.state.index);
}

// Writes the result into the next journal entry, for a call that was not run.
EPD_DEVICE inline void write_result(const CallArguments& own, const Watch& watch, const Judgement& judgement,
                                    std::uint64_t tag) {
  OpResult result = ended(judgement.error, judgement.failed_rank);
  result.rows = judgement.rows;
  result.room = judgement.room;
  result.tag = tag;
  next_entry_of(own, watch).result = result;
}

// Ends a call that was not run, noops included. The other CTAs hear nothing of it.
EPD_DEVICE inline void end_without_broadcast(const CallArguments& own, Watch& watch, CallRing ring,
                                             const abi::PackedCall& packed, const Judgement& judgement) {
  const bool well = judgement.verdict == Verdict::kNoop;
  const abi::Call call = abi::unpack(packed);
  end_call(own, watch, ring, call, well);
  publish_result(own, watch, call, ending_of(judgement.verdict));
  if (judgement.verdict == Verdict::kDiscard) return;
  if (!well) watch.state.failed = 1;
  write_result(own, watch, judgement, well ? ++watch.state.noops : 0);
  write_journal(own, watch, packed, ring, watch.state.index);
}

// Reports the end of the last operation, when all CTAs have left it. `runs` is runs_of() its result; it was
// loaded while they left.
EPD_DEVICE inline void conclude(const CallArguments& own, Watch& watch, bool failed, ResultRuns runs) {
  if (!watch.runs) return;
  watch.runs = false;
  const TakenCall& call = watch.running;
  if (failed) watch.state.failed = 1;
  if (!failed && makes_routing(call)) store_route(own, watch, call.route, made_route(call));
  const auto ring = static_cast<CallRing>(call.ring);
  conclude_result(own, watch, {&own.results->places[abi::place_of(call.result)], call.writing}, call.result,
                  runs, watch.state.index - 1);
  if (ring == kByHost) publish_ended(own, ring, call.number);
  write_journal(own, watch, watch.call, ring, watch.state.index - 1);
}

// ---- accepting calls

// The thread polls without a pause for some milliseconds, then with pauses. A poll takes 0.7 us.
inline constexpr std::uint32_t kEagerPolls = 4096;
inline constexpr std::uint32_t kPauseNs = 200;
EPD_DEVICE inline void pause(std::uint32_t polls) {
  if (polls > kEagerPolls)
    look_after(polls, kPauseNs);
  else
    look_again(polls);
}

// Where the ring's next call will be.
EPD_DEVICE inline const std::uint64_t* next_call(const CallArguments& own, const Watch& watch,
                                                 CallRing ring) {
  const abi::PackedCall* const calls = ring == kByHost ? own.words->host_calls : own.words->calls;
  return calls[watch.state.sequence[ring] % abi::kCallSlots].words;
}

// Validates a call. Returns true if it is to be run; then it is in watch.running. Returns false if it is not
// there yet or has already ended.
EPD_DEVICE inline bool accept_call(const CallArguments& own, Watch& watch, CallRing ring,
                                   const abi::PackedCall& packed) {
  Judgement judgement = judge_call(watch.state, own.limits, ring, packed);
  if (judgement.verdict == Verdict::kWait) return false;
  // A call with a journal entry waits for a free entry. An enabled epoch may end meanwhile.
  if (judgement.verdict != Verdict::kDiscard && journal_is_full(own, watch)) return false;
  watch.last = ring;
  const abi::Call call = abi::unpack(packed);
  RouteState route;
  if (judgement.verdict == Verdict::kRun) {
    route = route_of(own, watch, call.route);
    judgement = judge_routing(watch.state, call, route);
  }
  if (judgement.verdict != Verdict::kRun) {
    end_without_broadcast(own, watch, ring, packed, judgement);
    return false;
  }
  watch.running = take(watch.state, own.limits.depth, ring, call, route);
  watch.call = packed;
  watch.runs = true;
  ++watch.state.index;
  watch.state.sequence[ring] = call.number + 1;
  return true;
}

// ---- polling

// Two words of the host's that are read at once. They are independent of each other.
struct HostWords {
  std::uint32_t first;
  std::uint32_t second;
};
// Reads two neighbouring words by one access.
EPD_DEVICE inline HostWords load_pair(const std::uint32_t* first) {
  const std::uint64_t both = load_relaxed_system(reinterpret_cast<const std::uint64_t*>(first));  // NOLINT
  return {static_cast<std::uint32_t>(both), static_cast<std::uint32_t>(both >> 32)};
}

// Returns whether the host's next call may be there, given its first word. Only then is it worth loading the
// rest.
EPD_DEVICE inline bool has_host_call(const Watch& watch, std::uint64_t first_word) {
  const auto number = static_cast<std::uint32_t>(first_word >> 32) - 1;
  return static_cast<std::int32_t>(number - watch.state.sequence[kByHost]) >= 0;
}

// Loads the host's next call. The first word is loaded last, with acquire.
EPD_DEVICE EPD_NO_INLINE inline abi::PackedCall load_host_call(const CallArguments& own, const Watch& watch) {
  const std::uint64_t* const words = next_call(own, watch, kByHost);
  abi::PackedCall call;
  for (std::uint32_t i = 1; i < abi::PackedCall::kWords; ++i) call.words[i] = load_relaxed_system(words + i);
  call.words[0] = load_acquire_system(words);
  return call;
}

// Accepts a call of one of the rings. If both have one, the rings alternate. `of_host` is the first word of
// the host's call.
EPD_DEVICE inline bool accept_in_turn(const CallArguments& own, Watch& watch,
                                      const abi::PackedCall& of_streams, std::uint64_t of_host) {
  const CallRing second = watch.last;
  const CallRing first = second == kByStreams ? kByHost : kByStreams;
  EPD_NO_UNROLL
  for (std::uint32_t i = 0; i < kCallRings; ++i) {
    const CallRing ring = i == 0 ? first : second;
    if (ring == kByHost && !has_host_call(watch, of_host)) continue;
    const abi::PackedCall call = ring == kByHost ? load_host_call(own, watch) : of_streams;
    if (accept_call(own, watch, ring, call)) return true;
  }
  return false;
}

// ---- ranks of one device

// Returns the `called` lines of an exchange arena for this rank's next operation.
EPD_DEVICE inline abi::SignalLine* called_lines(const CallArguments& own, const Watch& watch,
                                                std::uint8_t* arena) {
  const abi::ExchangeArenaLayout& layout = own.view->group.exchange;
  return reinterpret_cast<abi::SignalLine*>(
      arena + layout.block_bytes * block_of(watch.state.index, own.limits.depth) + layout.called);
}

// Stores this rank's `called` of its next operation at all active ranks.
EPD_DEVICE inline void tell_called(const CallArguments& own, const Watch& watch, std::uint64_t tag) {
  const GroupView& group = own.view->group;
  EPD_NO_UNROLL
  for (std::uint32_t rank = 0; rank < group.shape.num_ranks; ++rank) {
    std::uint8_t* const arena = own.view->peers[rank].exchange;
    if (arena != nullptr) store_relaxed_system(&called_lines(own, watch, arena)[group.rank].tag, tag);
  }
  fence_sequential_system();  // before others' lines are looked at
}

// Returns the ranks of `together` that have not called the operation `tag`.
EPD_DEVICE inline std::uint32_t missing_calls(const CallArguments& own, const Watch& watch,
                                              std::uint64_t tag) {
  const abi::SignalLine* const lines = called_lines(own, watch, own.view->group.exchange_arena);
  std::uint32_t missing = 0;
  EPD_NO_UNROLL
  for (std::uint32_t ranks = watch.state.together; ranks != 0; ranks &= ranks - 1) {
    if (load_relaxed_system(&lines[lowest_bit(ranks)].tag) < tag) missing |= ranks & (0u - ranks);
  }
  return missing;
}

// Tells that this rank has a call for its next operation. Returns the ranks of `together` that have none.
EPD_DEVICE inline std::uint32_t call_together(const CallArguments& own, Watch& watch) {
  const std::uint64_t tag = abi::op_tag(watch.state.epoch, watch.state.index);
  if (watch.state.called != tag) watch.state.called_ns = nanoseconds();
  if (watch.state.called != tag || watch.state.told == 0) tell_called(own, watch, tag);
  watch.state.called = tag;
  watch.state.told = 1;
  return missing_calls(own, watch, tag);
}

// Returns whether the kernel may leave. What it has told of a call is withdrawn, since nobody may begin the
// operation while this rank cannot. If all have called by then, the operation is begun after all. Nothing is
// withdrawn in an enabled epoch that is over: tags of the next one are higher.
EPD_DEVICE EPD_NO_INLINE inline bool may_leave(const CallArguments& own, Watch& watch) {
  const std::uint64_t tag = abi::op_tag(watch.state.epoch, watch.state.index);
  if (watch.state.called != tag || watch.state.told == 0) return true;
  fence_sequential_system();  // the host halts calls before it stops the kernel, and then frees memory
  if (load_relaxed_system(&own.state->enabled_epoch) != watch.state.enabled_epoch_taken) return true;
  tell_called(own, watch, tag - 1);
  watch.state.told = 0;
  return missing_calls(own, watch, tag) != 0;
}

// Loads the streams' next call as poll_for_work() does.
EPD_DEVICE inline abi::PackedCall load_stream_call(const CallArguments& own, const Watch& watch) {
  const std::uint64_t* const words = next_call(own, watch, kByStreams);
  abi::PackedCall call;
  for (std::uint32_t i = 1; i < abi::PackedCall::kWords; ++i) call.words[i] = load_relaxed_system(words + i);
  call.words[0] = load_acquire_system(words);
  return call;
}

// Returns whether a call is there that may be accepted, and makes it its ring's turn. One that has to wait
// for the ranks of `together` may not, and calls of the other ring come behind it. So no kernel is inside an
// operation that waits for a client of the same GPU: that GPU may begin no kernels until this one has left it
// (daemon/device/README.md, "Yielding"). If the call's time is up, it ends here.
EPD_DEVICE EPD_NO_INLINE inline bool may_accept(const CallArguments& own, Watch& watch) {
  const CallRing last = watch.last;
  EPD_NO_UNROLL
  for (std::uint32_t i = 0; i < kCallRings; ++i) {
    const CallRing ring = (i == 0) == (last == kByStreams) ? kByHost : kByStreams;
    const abi::PackedCall packed =
        ring == kByHost ? load_host_call(own, watch) : load_stream_call(own, watch);
    Verdict verdict = judge_call(watch.state, own.limits, ring, packed).verdict;
    if (verdict == Verdict::kWait) continue;
    watch.last = ring == kByHost ? kByStreams : kByHost;
    const abi::Call call = abi::unpack(packed);
    if (verdict == Verdict::kRun)
      verdict = judge_routing(watch.state, call, route_of(own, watch, call.route)).verdict;
    if (verdict != Verdict::kRun) return true;
    const std::uint32_t missing = call_together(own, watch);
    if (missing == 0) return true;
    const std::uint64_t timeout_ms = call.timeout_ms != 0 ? call.timeout_ms : watch.state.timeout_ms;
    if (nanoseconds() - watch.state.called_ns < timeout_ms * 1'000'000 || journal_is_full(own, watch))
      return false;
    Judgement late{Verdict::kRefuse, OpError::kDeadline};
    late.failed_rank = lowest_bit(missing);
    end_without_broadcast(own, watch, ring, packed, late);
    return false;
  }
  return false;
}

// Accepts the call whose turn it is. What it has waited for others' calls is taken from its time.
EPD_DEVICE inline bool accept_together(const CallArguments& own, Watch& watch,
                                       const abi::PackedCall& of_streams, std::uint64_t of_host) {
  if (!may_accept(own, watch)) return false;
  const bool by_host = watch.last == kByStreams;
  if (by_host && !has_host_call(watch, of_host)) return false;
  const abi::PackedCall call = by_host ? load_host_call(own, watch) : of_streams;
  if (!accept_call(own, watch, by_host ? kByHost : kByStreams, call)) return false;
  const std::uint64_t waited_ms = (nanoseconds() - watch.state.called_ns) / 1'000'000;
  std::uint32_t& timeout_ms = watch.running.timeout_ms;
  timeout_ms = waited_ms < timeout_ms ? timeout_ms - static_cast<std::uint32_t>(waited_ms) : 1;
  return true;
}

// Polls between two checks of the yield epoch. A check reads host memory, which takes two microseconds, so it
// happens once in a millisecond or two.
inline constexpr std::uint32_t kPollsPerYieldCheck = kLooksInMilliseconds;

// Returns whether the host has changed the yield epoch. Then the kernel must leave the SMs.
EPD_DEVICE EPD_NO_INLINE inline bool must_yield(const ResidentArguments& own) {
  return load_relaxed_system(own.yield_epoch) != own.own_yield_epoch;
}

EPD_DEVICE EPD_NO_INLINE inline Task await_work_together(const ResidentArguments& own, Watch& watch);

// Polls until a call is to be run or the kernel must leave. All loads of a poll but the last are relaxed, so
// they are in flight together and a poll takes one round trip. The last load acquires; it is the first word
// of the streams' next call. Whatever else turns out to be new is read again with acquire. Ranks that share
// their device with others of the group have a function of their own, which costs the others nothing.
template <bool kTogether>
EPD_DEVICE inline Task poll_for_work(const ResidentArguments& own, Watch& watch) {
  const CallArguments& calls = own.calls;
  for (std::uint32_t polls = 0;; ++polls) {
    const std::uint32_t sequences = watch.state.sequence[kByStreams] + watch.state.sequence[kByHost];
    const HostWords enabled_epoch = load_pair(&calls.state->enabled_epoch);
    const HostWords journal = load_pair(&calls.state->journal_read);
    const std::uint32_t stop = load_relaxed_system(&calls.state->stop);
    const std::uint64_t of_host = load_relaxed_system(next_call(calls, watch, kByHost));
    abi::PackedCall call;
    for (std::uint32_t i = 1; i < abi::PackedCall::kWords; ++i)
      call.words[i] = load_relaxed_system(next_call(calls, watch, kByStreams) + i);
    call.words[0] = load_acquire_system(next_call(calls, watch, kByStreams));
    if (stop == own.number && (!kTogether || may_leave(calls, watch))) return Task::kStop;
    if (enabled_epoch.first != watch.state.enabled_epoch_taken) {
      take_enabled_epoch(calls, watch);
      if (!kTogether && watch.state.together != 0) return await_work_together(own, watch);
      polls = 0;
      continue;
    }
    watch.state.sms = enabled_epoch.second;
    watch.state.timeout_ms = journal.second;
    const bool accepted = kTogether && watch.state.together != 0
                              ? accept_together(calls, watch, call, of_host)
                              : accept_in_turn(calls, watch, call, of_host);
    if (accepted) return task_of(watch.running.op(), calls.per_expert);
    if (sequences != watch.state.sequence[kByStreams] + watch.state.sequence[kByHost]) polls = 0;
    if (polls % kPollsPerYieldCheck == kPollsPerYieldCheck - 1 && must_yield(own) &&
        (!kTogether || may_leave(calls, watch)))
      return Task::kStop;
    pause(polls);
  }
}
EPD_DEVICE EPD_NO_INLINE inline Task await_work_together(const ResidentArguments& own, Watch& watch) {
  return poll_for_work<true>(own, watch);
}
EPD_DEVICE inline Task await_work(const ResidentArguments& own, Watch& watch) {
  return watch.state.together != 0 ? await_work_together(own, watch) : poll_for_work<false>(own, watch);
}

}  // namespace epd::kernels::cuda
