// The gate: takes the next call of a lane, or ends calls that are not to be run. One thread does this, with
// words that its warp has loaded before. A main kernel that lingers for the next call does the same.
// kernels/MEMORY_ORDERING.md explains the memory ordering. The code compiles for device and host
// (proto/ordered.h).
#pragma once

#include "cuda/workers/ends.h"

namespace epd::kernels::cuda {

// The words that a gate has read at its begin, and those that its thread keeps. In shared memory.
struct Gate {
  // The number of routing records that are loaded. The records of slots come first.
  static constexpr std::uint32_t kRoutes = 16;
  CallState state;
  alignas(32) abi::PackedCall calls[kCallRings][abi::kCallSlots];
  RouteState routes[kRoutes];
  std::uint32_t asked;          // SMs of SmCredits, before the call is known; 0 in a main kernel
  std::uint32_t lingering;      // CTAs of a main kernel that lingers; 0 in a gate
  std::uint32_t enabled_epoch;  // as the door said
  std::uint32_t generation;     // as the rank's exchange arena said
  std::uint32_t held;           // of SmCredits, with those that this gate asks for
  std::uint32_t limit;          // of SmCredits
  // The gate's decision.
  Work work;
  WorkEnd end;
};

// ---- routing records. They are constant in an enabled epoch.

// Returns the state of a routing record.
EPD_DEVICE inline RouteState route_of(const CallArguments& own, const Gate& gate, std::uint32_t record) {
  static_assert(sizeof(RouteState) == 16);
  EPD_BELOW(record, own.limits.num_routes);
  if (record < Gate::kRoutes) return gate.routes[record];
  const Words words = load_here(reinterpret_cast<const Words*>(own.routes + record));
  return {std::uint64_t{words.y} << 32 | words.x, words.z, words.w};
}

// ---- enabled epochs

// Takes over a new enabled epoch from the host. It reads CallStart in host memory, which takes a few
// microseconds.
EPD_DEVICE EPD_NO_INLINE inline void take_enabled_epoch(const CallArguments& own, Gate& gate) {
  CallState& state = gate.state;
  fence_system();  // the host has written CallStart before the enabled epoch
  if (gate.enabled_epoch % 2 != 0) {
    const CallStart& start = own.host->start;
    state.epoch = load_relaxed_system(&start.epoch);
    state.index = load_relaxed_system(&start.index);
    state.index_base = load_relaxed_system(&start.index_base);
    state.changed_epoch = load_relaxed_system(&start.changed_epoch);
    state.failed = 0;
    state.together = load_here(&own.view->group.together);
    state.others = load_here(&own.view->group.others);
    state.called = 0;
    const std::uint32_t routes = load_relaxed_system(&start.num_routes);
    EPD_AT_MOST(routes, own.limits.num_routes);
    const auto* const routes_at = reinterpret_cast<const std::uint64_t*>(&start.routes);
    const auto* const from = reinterpret_cast<const Words*>(load_relaxed_system(routes_at));
    EPD_NO_UNROLL
    for (std::uint32_t i = 0; i < routes; ++i) {
      const Words words = load_of_host(from + i);
      reinterpret_cast<Words*>(own.routes)[i] = words;
      if (i < Gate::kRoutes) gate.routes[i] = {std::uint64_t{words.y} << 32 | words.x, words.z, words.w};
    }
  }
  state.enabled_epoch_taken = gate.enabled_epoch;
}

// ---- calls that are not to be run

// Returns whether the journal has no free entry.
EPD_DEVICE inline bool journal_is_full(const Gate& gate) {
  return gate.state.journal - gate.state.journal_read >= kJournalEntries;
}

// Ends a call that was not run. If calls before it were never found, they are lost and end with it.
EPD_DEVICE inline void end_call(const CallArguments& own, Gate& gate, CallRing ring, const abi::Call& call,
                                bool well) {
  EPD_BELOW(abi::flag_of(call.op, call.slot), abi::kCallFlags);
  const std::uint32_t ended = call.number + 1 - gate.state.sequence[ring];
  gate.state.sequence[ring] = call.number + 1;
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
EPD_DEVICE inline void publish_result(const CallArguments& own, Gate& gate, const abi::Call& call,
                                      abi::CallEnding ending) {
  const std::uint32_t place = abi::place_of(call.result);
  if (place >= abi::kResultPlaces) return;
  const ResultOut out{&own.results->places[place], next_writing(gate.state)};
  write_ending(out, ending, ended(OpError::kNone, -1));
  conclude_result(own, out, call.result, runs_of(own, call.result), gate.state.index + gate.state.index_base);
  gate.state.results = out.number;
}

// Ends a call that was not run, noops included.
EPD_DEVICE EPD_NO_INLINE inline void end_unrun(const CallArguments& own, Gate& gate, CallRing ring,
                                               const abi::PackedCall& packed, const Judgement& judgement) {
  const bool well = judgement.verdict == Verdict::kNoop;
  const abi::Call call = abi::unpack(packed);
  end_call(own, gate, ring, call, well);
  publish_result(own, gate, call, ending_of(judgement.verdict));
  if (judgement.verdict == Verdict::kDiscard) return;
  if (!well) gate.state.failed = 1;
  OpResult result = ended(judgement.error, judgement.failed_rank);
  result.rows = judgement.rows;
  result.room = judgement.room;
  result.tag = well ? ++gate.state.noops : 0;
  own.host->journal[gate.state.journal % kJournalEntries].result = result;
  write_journal(own, gate.state.journal++, packed, ring, gate.state.index);
}

// ---- ranks that have to call first

// Returns the ranks that must have called an operation before this rank begins it. If ranks of the group
// share the device, a main kernel that waits for a rank whose client needs this device could wait for ever.
// An operation that defers receiving holds no SM while other ranks are late.
EPD_DEVICE inline std::uint32_t awaited_ranks(const CallState& state, std::uint32_t flags) {
  return (flags & abi::kFlagDefer) != 0 ? state.others : state.together;
}

// Returns the `called` lines of an exchange arena for the operation `tag`.
EPD_DEVICE inline abi::SignalLine* called_lines(const CallArguments& own, std::uint64_t tag,
                                                std::uint8_t* arena) {
  const abi::ExchangeArenaLayout& layout = own.view->group.exchange;
  const std::uint32_t block = block_of(abi::index_of_tag(tag), own.limits.depth);
  return reinterpret_cast<abi::SignalLine*>(arena + layout.block_bytes * block + layout.called);
}

// Tells all active ranks that this rank has called the operation, and whether it waits for all of them.
EPD_DEVICE inline void tell_called(const CallArguments& own, std::uint64_t tag, bool waits) {
  const GroupView& group = own.view->group;
  EPD_NO_UNROLL
  for (std::uint32_t rank = 0; rank < group.shape.num_ranks; ++rank) {
    std::uint8_t* const arena = own.view->peers[rank].exchange;
    if (arena == nullptr) continue;
    abi::SignalLine& line = called_lines(own, tag, arena)[group.rank];
    store_relaxed_system(&line.tag, tag);
    if (waits) store_relaxed_system(&line.waiting, tag);
  }
  fence_sequential_system();  // before others' lines are looked at
}

// Returns those of `ranks` whose word `word` of the `called` line does not have `tag` yet.
EPD_DEVICE inline std::uint32_t not_there(const abi::SignalLine* lines, std::uint32_t ranks,
                                          std::uint64_t abi::SignalLine::*word, std::uint64_t tag) {
  std::uint32_t missing = 0;
  EPD_NO_UNROLL
  for (; ranks != 0; ranks &= ranks - 1) {
    if (load_relaxed_system(&(lines[lowest_bit(ranks)].*word)) < tag) missing |= ranks & (0u - ranks);
  }
  return missing;
}

// Tells that this rank has called the operation, and rings the ranks that wait for no other rank now. Of
// those that tell at the same time, the last one finds that all have told. Returns the ranks that have not
// called.
EPD_DEVICE EPD_NO_INLINE inline std::uint32_t call_and_ring(const WorkerArguments& own, const Gate& gate,
                                                            std::uint64_t tag, bool waits) {
  const CallArguments& calls = own.calls;
  const CallState& state = gate.state;
  tell_called(calls, tag, waits);
  const abi::SignalLine* const lines = called_lines(calls, tag, calls.view->group.exchange_arena);
  const std::uint32_t missing = not_there(lines, state.others, &abi::SignalLine::tag, tag);
  std::uint32_t rung = (missing & state.together) == 0 ? state.together : 0;
  if (missing == 0) rung |= state.others & ~not_there(lines, state.others, &abi::SignalLine::waiting, tag);
  EPD_NO_UNROLL
  for (; rung != 0; rung &= rung - 1) {
    std::uint32_t* const bell = own.bells->of[lowest_bit(rung)];
    if (bell != nullptr) store_relaxed_system(bell, 1u);
  }
  return missing;
}

// How long a gate waits for other ranks. If they call later, it is rung again, which takes some microseconds
// more.
inline constexpr std::uint64_t kPromptNs = 10'000;

// Tells that this rank has called its next operation. Returns those of `ranks` that have not.
EPD_DEVICE EPD_NO_INLINE inline std::uint32_t await_calls(const WorkerArguments& own, Gate& gate,
                                                          std::uint32_t ranks) {
  const CallArguments& calls = own.calls;
  CallState& state = gate.state;
  const std::uint64_t tag = abi::op_tag(state.epoch, state.index);
  if (state.called != tag) {
    state.called = tag;
    state.called_ns = nanoseconds();
    const bool waits = (ranks & ~state.together) != 0;
    if ((call_and_ring(own, gate, tag, waits) & ranks) == 0) return 0;
  }
  const abi::SignalLine* const lines = called_lines(calls, tag, calls.view->group.exchange_arena);
  std::uint32_t missing = not_there(lines, ranks, &abi::SignalLine::tag, tag);
  const std::uint64_t begin = nanoseconds();
  for (std::uint32_t looks = 1; missing != 0 && nanoseconds() - begin < kPromptNs; ++looks) {
    look_again(looks);
    missing = not_there(lines, ranks, &abi::SignalLine::tag, tag);
  }
  return missing;
}

// Tells ranks that wait for all others that this rank has called the operation in Gate::work, which waits for
// none. Its main kernel has the work already.
EPD_DEVICE EPD_NO_INLINE inline void tell_begun(const WorkerArguments& own, const Gate& gate) {
  const TakenCall& call = gate.work.call;
  if (gate.state.others == 0 || awaited_ranks(gate.state, call.flags) != 0) return;
  call_and_ring(own, gate, call.tag, false);
}

// ---- SMs

// A gate asks for SMs before it knows the call (WorkerArguments::asked_sms). This takes the SMs for a main
// kernel that could use `wanted`, and gives back the others. Returns how many it gets, at least one. `credit`
// becomes what of these is counted in SmCredits.
EPD_DEVICE inline std::uint32_t take_sms(const WorkerArguments& own, const Gate& gate, std::uint32_t wanted,
                                         std::uint32_t& credit) {
  const std::uint32_t sure = gate.state.guaranteed_sms;
  const std::uint32_t over = gate.held <= gate.limit ? 0 : gate.held - gate.limit;
  const std::uint32_t granted = over < gate.asked ? gate.asked - over : 0;
  const std::uint32_t more = wanted > sure ? wanted - sure : 0;
  credit = more < granted ? more : granted;
  add(&own.credits->held, credit - gate.asked);
  return wanted < sure ? wanted : sure + credit;
}

// Decides which CTAs carry the taken call out, and which linger for the next one. A main kernel that lingers
// keeps the SMs that its gate has taken.
EPD_DEVICE inline void share_ctas(const WorkerArguments& own, Gate& gate) {
  Work& work = gate.work;
  const std::uint32_t wanted = ctas_of(work.call, own.ctas);
  std::uint32_t most = gate.lingering;
  bool lingers = true;
  if (most == 0) {
    lingers = gate.state.linger_us != 0;
    const std::uint32_t all = ctas_of_group(gate.state, own.ctas);
    most = take_sms(own, gate, lingers ? all : wanted, work.credit);
    work.linger_until_ns = lingers ? nanoseconds() + kLingerNs : 0;
    work.number = own.number;
  }
  work.ctas = static_cast<std::uint16_t>(wanted < most ? wanted : most);
  work.lingering = static_cast<std::uint16_t>(lingers ? most : 0);
}

// ---- taking a call

// The outcome of a look at a ring.
enum class Look {
  kNothing,  // no call is there
  kEnded,    // a call has been ended
  kStands,   // a call has to wait for another rank, or for the engine. That one rings when the call may run
  kTaken,    // a call is in Gate::work
};

// Takes the call, which is to be run.
EPD_DEVICE inline void take_call(const WorkerArguments& own, Gate& gate, CallRing ring,
                                 const abi::PackedCall& packed, const RouteState& route) {
  const CallArguments& calls = own.calls;
  CallState& state = gate.state;
  const abi::Call call = abi::unpack(packed);
  gate.work.call = take(state, calls.limits.depth, ring, call, route);
  gate.work.task = task_of(call.op, calls.per_expert);
  share_ctas(own, gate);
  gate.end.packed = packed;
  ++state.index;
  ++state.journal;
  state.results = gate.work.call.writing;
  state.sequence[ring] = call.number + 1;
}

// Returns whether all of `ranks` have called the operation. The wait counts towards the call's time. `late`:
// set if that is up.
EPD_DEVICE EPD_NO_INLINE inline bool may_begin(const WorkerArguments& own, Gate& gate, std::uint32_t ranks,
                                               const abi::Call& call, Judgement& late) {
  const std::uint32_t missing = await_calls(own, gate, ranks);
  if (missing == 0) return true;
  const std::uint64_t timeout_ms = call.timeout_ms != 0 ? call.timeout_ms : gate.state.timeout_ms;
  if (nanoseconds() - gate.state.called_ns < timeout_ms * 1'000'000) return false;
  late = {Verdict::kRefuse, OpError::kDeadline};
  late.failed_rank = lowest_bit(missing);
  return false;
}

// Judges the places of a call's rows. A graph may replay a place whose memory is not mapped any more.
EPD_DEVICE EPD_NO_INLINE inline Judgement judge_places_of(const CallArguments& own, const abi::Call& call) {
  const abi::RowPlaces& places = own.words->places[call.number % abi::kCallSlots];
  return judge_places(own.memories, {load_relaxed_system(&places.in), load_relaxed_system(&places.out)});
}

// Looks at the next call of a ring, and takes or ends it.
EPD_DEVICE inline Look look_at(const WorkerArguments& own, Gate& gate, CallRing ring) {
  CallState& state = gate.state;
  const abi::PackedCall packed = gate.calls[ring][state.sequence[ring] % abi::kCallSlots];
  Judgement judgement = judge_call(state, own.calls.limits, ring, packed);
  if (judgement.verdict == Verdict::kWait) return Look::kNothing;
  if (judgement.verdict != Verdict::kDiscard && journal_is_full(gate)) return Look::kStands;
  const abi::Call call = abi::unpack(packed);
  RouteState route;
  if (judgement.verdict == Verdict::kRun) {
    route = route_of(own.calls, gate, call.route);
    judgement = judge_routing(state, call, route);
  }
  if (judgement.verdict == Verdict::kRun && (call.flags & abi::kFlagPlaces) != 0)
    judgement = judge_places_of(own.calls, call);
  const std::uint32_t ranks = judgement.verdict == Verdict::kRun ? awaited_ranks(state, call.flags) : 0;
  if (ranks != 0 && !may_begin(own, gate, ranks, call, judgement) && judgement.verdict == Verdict::kRun)
    return Look::kStands;
  state.last = ring;
  if (judgement.verdict != Verdict::kRun) {
    end_unrun(own.calls, gate, ring, packed, judgement);
    return Look::kEnded;
  }
  take_call(own, gate, ring, packed, route);
  if (ranks != 0) {  // what it has waited for the others is taken from its time
    const std::uint64_t waited_ms = (nanoseconds() - state.called_ns) / 1'000'000;
    std::uint32_t& timeout_ms = gate.work.call.timeout_ms;
    timeout_ms = waited_ms < timeout_ms ? timeout_ms - static_cast<std::uint32_t>(waited_ms) : 1;
  }
  return Look::kTaken;
}

// Ends calls until one is taken or none is left. If both rings have one, they alternate. A call that stands
// keeps its turn: like an operation that runs, it lets no call of the other ring pass.
EPD_DEVICE inline Look take_next(const WorkerArguments& own, Gate& gate) {
  EPD_NO_UNROLL
  for (std::uint32_t nothing = 0; nothing < kCallRings;) {
    const CallRing ring = gate.state.last == kByStreams ? kByHost : kByStreams;
    const Look look = look_at(own, gate, ring);
    if (look == Look::kTaken || look == Look::kStands) return look;
    gate.state.last = ring;
    nothing = look == Look::kEnded ? 0 : nothing + 1;
  }
  return Look::kNothing;
}

// A gate stores this much of the state: all but the host's words.
inline constexpr std::uint32_t kKeptState = offsetof(CallState, epoch);
static_assert(kKeptState == 64 && sizeof(CallState) % 16 == 0);

// Decides what the pair does, as Gate::work and Gate::end say. The gate has set the door's first word, has
// cleared the bell, and has read its words beside that. One thread calls.
EPD_DEVICE inline Look decide(const WorkerArguments& own, Gate& gate) {
  gate.work.task = Task::kNone;
  Look look = Look::kStands;
  const bool is_own = gate.generation == own.own_generation;
  if (!is_own || (gate.state.leaves | gate.state.drains) != 0) set_bits_system(&own.calls.words->bell[0], 1);
  if (is_own) {
    if (gate.state.leaves != 0) gate.enabled_epoch = 0;  // calls are discarded, whatever the door said
    if (gate.enabled_epoch != gate.state.enabled_epoch_taken) take_enabled_epoch(own.calls, gate);
    look = take_next(own, gate);
    gate.end.index_base = gate.state.index_base;
    for (std::uint32_t ring = 0; ring < kCallRings; ++ring) gate.end.next[ring] = gate.state.sequence[ring];
  }
  if (look != Look::kTaken && gate.asked != 0) add(&own.credits->held, 0u - gate.asked);
  return look;
}

// Makes the caller's stores before the call visible to every reader of this thread's next stores.
EPD_DEVICE inline void fence_call(const Gate& gate) {
  if (gate.work.task == Task::kNone) return;
  if (gate.work.call.ring == kByHost) {
    fence_system();
  } else {
    fence_device();
  }
}

// The end of a gate that has taken a call. It uses no memory of other ranks any more.
EPD_DEVICE inline void leave_to_main(const WorkerArguments& own) {
  fence_system();
  set_bits_system(&own.lane->door[0], kHandedOver);
}

// The end of a gate that has taken no call, after its stores.
EPD_DEVICE inline void leave_gate(const WorkerArguments& own, const Gate& gate, Look look) {
  if (look == Look::kNothing) ring_for_more(own.calls, gate.end.next);
  leave_door(*own.lane);
}

// ---- a main kernel that lingers

// Returns whether a main kernel may linger for the next call.
EPD_DEVICE inline bool may_linger(const WorkerArguments& own, const Gate& gate) {
  return gate.generation == own.own_generation && gate.enabled_epoch % 2 != 0 &&
         (gate.state.leaves | gate.state.drains) == 0 && gate.state.linger_us != 0;
}

// Returns whether it may linger after the call before. That call may be of an epoch that has ended; then the
// group view that its CTAs have copied is also of that epoch.
EPD_DEVICE inline bool may_linger_behind(const WorkerArguments& own, const Gate& gate, const Work& before) {
  return may_linger(own, gate) && gate.enabled_epoch == before.call.enabled_epoch;
}

// Returns whether a ring has its next call.
EPD_DEVICE inline bool has_call(const Gate& gate) {
  bool has = false;
  for (std::uint32_t ring = 0; ring < kCallRings; ++ring) {
    const std::uint32_t next = gate.state.sequence[ring];
    has = has || is_there(gate.calls[ring][next % abi::kCallSlots], next);
  }
  return has;
}

// Ends a main kernel that lingers and has taken no call. The next gate looks for what this one has left.
EPD_DEVICE inline void end_lingering(const WorkerArguments& own, Gate& gate, const Work& before) {
  gate.work.task = Task::kNone;  // all CTAs leave
  give_back_sms(own, before);
  set_bits_system(&own.calls.words->bell[0], 1);
  leave_door(*own.lane);
}

}  // namespace epd::kernels::cuda
