// How calls end: what gate and main kernel tell the client and the engine. The code compiles for device and
// host (proto/ordered.h).
#pragma once

#include "cuda/common/ending.h"
#include "kernels/calls.h"

namespace epd::kernels::cuda {

// ---- the journal

// Completes a journal entry; its result is written already. The release at the end waits for the stores to
// host memory, one or two microseconds. The client's stream does not wait for it.
EPD_DEVICE inline void write_journal(const CallArguments& own, std::uint32_t number,
                                     const abi::PackedCall& call, CallRing ring, std::uint64_t index) {
  JournalEntry& entry = own.host->journal[number % kJournalEntries];
  for (std::uint32_t i = 0; i < abi::PackedCall::kWords; ++i) entry.call.words[i] = call.words[i];
  entry.index = index;
  entry.ring = ring;
  store_release_system(&entry.number, number + 1);
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

// Writes the last part of a call's result, after write_ending(). `number` is the operation's number that
// clients know, or the next one's if there is no operation.
EPD_DEVICE inline void conclude_result(const CallArguments& own, const ResultOut& out, std::uint32_t result,
                                       ResultRuns before, std::uint64_t number) {
  const std::uint32_t place = abi::place_of(result);
  EPD_BELOW(place, abi::kResultPlaces);
  const std::uint32_t runs = before.result == result + 1 ? before.runs + 1 : 1;
  if (place >= abi::kOnceResults) own.runs[place - abi::kOnceResults] = {result + 1, runs};
  write_word(out, abi::CallResult::kResult, result);
  write_word(out, abi::CallResult::kIndexLow, static_cast<std::uint32_t>(number));
  write_word(out, abi::CallResult::kIndexHigh, static_cast<std::uint32_t>(number >> 32));
  write_word(out, abi::CallResult::kRuns, runs);
}

// ---- the rings

// Publishes that all calls of the ring up to `number` have ended.
EPD_DEVICE inline void publish_ended(const CallArguments& own, CallRing ring, std::uint32_t number) {
  if (ring == kByHost) {
    store_relaxed_system(&own.results->host_ended, number + 1);
  } else {
    store_release(&own.words->done, number + 1);
  }
}

// Where a ring has call `number`.
EPD_DEVICE inline const abi::PackedCall* place_in(const CallArguments& own, CallRing ring,
                                                  std::uint32_t number) {
  const abi::PackedCall* const calls = ring == kByHost ? own.words->host_calls : own.words->calls;
  return calls + number % abi::kCallSlots;
}

// Loads a call. Each word says by itself whether it is of that call.
EPD_DEVICE inline abi::PackedCall load_call(const abi::PackedCall* at) {
  abi::PackedCall call;
  for (std::uint32_t i = 0; i < abi::PackedCall::kWords; ++i)
    call.words[i] = load_relaxed_system(at->words + i);
  return call;
}

// Rings the lane's own bell if a call is there. The gate has cleared the bell, maybe after a call that it did
// not see or did not take. A call that is not whole yet will be rung for. `next` are the numbers of the
// rings' next calls.
EPD_DEVICE inline void ring_for_more(const CallArguments& own, const std::uint32_t (&next)[kCallRings]) {
  fence_system();  // looks after the clearing
  bool more = false;
  EPD_NO_UNROLL
  for (std::uint32_t ring = 0; ring < kCallRings; ++ring) {
    const abi::PackedCall call = load_call(place_in(own, static_cast<CallRing>(ring), next[ring]));
    more = more || is_there(call, next[ring]);
  }
  if (more) set_bits_system(&own.words->bell[0], 1);
}

// Nobody is inside any more. All earlier stores are visible to a host that reads this.
EPD_DEVICE inline void leave_door(LaneState& lane) {
  store_release_system(&lane.door[0], 0u);
}

// Called before a call's operation is run: whether the call's enabled epoch continues. If it does not, no
// memory of other ranks may be used.
EPD_DEVICE inline bool begin_call(LaneState& lane, const TakenCall& call) {
  const std::uint64_t door = fetch_or_system(reinterpret_cast<std::uint64_t*>(lane.door), kBegun);
  return static_cast<std::uint32_t>(door >> 32) == call.enabled_epoch;
}

// Fails an operation that may not begin. The group has broken, so the client knows of it already.
EPD_DEVICE EPD_NO_INLINE inline void fail_unbegun(Operation& op) {
  op.signal.failed = nullptr;
  fail(op, ended(OpError::kNotBegun, -1));
}

// Returns the state of a record after the dispatch that makes its routing.
EPD_DEVICE inline void store_route(const CallArguments& own, const TakenCall& call) {
  own.routes[call.route] = made_route(call);
}

// Gives back what the main kernel has taken of SmCredits.
EPD_DEVICE inline void give_back_sms(const WorkerArguments& own, const Work& work) {
  if (work.credit != 0) add(&own.credits->held, 0u - work.credit);
}

EPD_DEVICE inline WorkEnd load_end(const LaneState& lane) {
  WorkEnd end;
  for (std::uint32_t i = 0; i < sizeof(end) / sizeof(Words); ++i)
    reinterpret_cast<Words*>(&end)[i] = load_here(reinterpret_cast<const Words*>(&lane.end) + i);
  return end;
}

// Ends a call whose operation has run and that all CTAs have left. The operation itself has told the client's
// stream. One thread of the main kernel calls, when the gate has ended. `before`: runs_of() the call's
// result.
EPD_DEVICE inline void conclude(const WorkerArguments& own, const Work& work, bool failed,
                                ResultRuns before) {
  const CallArguments& calls = own.calls;
  const TakenCall& call = work.call;
  const WorkEnd end = load_end(*own.lane);
  const auto ring = static_cast<CallRing>(call.ring);
  if (failed) calls.state->failed = 1;
  if (!failed && makes_routing(call)) store_route(calls, call);
  const std::uint64_t index = abi::index_of_tag(call.tag);
  conclude_result(calls, {&calls.results->places[abi::place_of(call.result)], call.writing}, call.result,
                  before, index + end.index_base);
  if (ring == kByHost) publish_ended(calls, ring, call.number);
  write_journal(calls, call.journal, end.packed, ring, index);
  if (work.lingering != 0)
    return;  // the main kernel is still inside, keeps its SMs and looks for the next call
  give_back_sms(own, work);
  ring_for_more(calls, end.next);
  leave_door(*own.lane);
}

}  // namespace epd::kernels::cuda
