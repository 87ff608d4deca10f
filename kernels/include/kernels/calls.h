// The validation of calls, and their conversion into operations. These functions are the same in the kernels
// and in tests that play their part.
#pragma once

#include "kernels/group_view.h"

#include <cstdint>

namespace epd::kernels {

// The decision about a call.
enum class Verdict {
  kWait,     // it is not there yet
  kDiscard,  // it ends, with no other effect
  kRefuse,   // it ends with an error, and later calls are discarded
  kNoop,
  kRun,
};
// The verdict on a call, and the reason of a refusal.
struct Judgement {
  Verdict verdict;
  OpError error = OpError::kNone;  // of kRefuse; OpError explains rows and room
  std::uint64_t rows = 0;
  std::uint64_t room = 0;
  std::int32_t failed_rank = -1;  // of OpError::kDeadline
};

// Returns whether calls are run in the enabled epoch that a gate has taken last.
EPD_HOST_DEVICE constexpr bool takes_calls(const CallState& state) {
  return state.enabled_epoch_taken % 2 != 0 && state.failed == 0;
}

// Returns whether all words belong to the same call.
EPD_HOST_DEVICE constexpr bool is_whole(const abi::PackedCall& call) {
  for (std::uint32_t i = 1; i < abi::PackedCall::kWords; ++i) {
    if (call.words[i] >> 32 != call.words[0] >> 32) return false;
  }
  return true;
}

// Returns whether the words at the place of call `next` are of that call and whole, or of one after it.
EPD_HOST_DEVICE constexpr bool is_there(const abi::PackedCall& packed, std::uint32_t next) {
  const auto ahead = static_cast<std::int32_t>(static_cast<std::uint32_t>(packed.words[0] >> 32) - 1 - next);
  return ahead > 0 || (ahead == 0 && is_whole(packed));
}

// Judges the words at the place of the ring's next call. After kRun, judge_routing() decides. Words of the
// ring's lap before have a lower number, and count as not there.
EPD_HOST_DEVICE constexpr Judgement judge_call(const CallState& state, const abi::OpLimits& limits,
                                               CallRing ring, const abi::PackedCall& packed) {
  if (!is_there(packed, state.sequence[ring])) return {Verdict::kWait};
  if (!takes_calls(state)) return {Verdict::kDiscard};
  const abi::Call call = abi::unpack(packed);
  if (call.number != state.sequence[ring])
    return {Verdict::kRefuse, OpError::kLostCall, call.number, state.sequence[ring]};
  if (call.epoch != (state.epoch & 0xff)) return {Verdict::kDiscard};
  const abi::OpRequest request = call.request();
  const bool may_place = ring == kByStreams;
  if (abi::bad_field(request, limits) != abi::BadField::kNone ||
      (!may_place && (call.flags & abi::kFlagPlaces) != 0) ||
      abi::place_of(call.result) >= abi::kResultPlaces)
    return {Verdict::kRefuse, OpError::kBadCall};
  return {call.op == abi::Op::kNoop ? Verdict::kNoop : Verdict::kRun};
}

// Judges a call by its routing record `route`.
EPD_HOST_DEVICE constexpr Judgement judge_routing(const CallState& state, const abi::Call& call,
                                                  const RouteState& route) {
  if (abi::makes_routing(call.op, call.flags)) return {Verdict::kRun};
  if (route.tag == 0) return {Verdict::kRefuse, OpError::kNoRouting};
  if (call.op == abi::Op::kDispatch && abi::epoch_of_tag(route.tag) < state.changed_epoch)
    return {Verdict::kRefuse, OpError::kOldRouting, abi::epoch_of_tag(route.tag)};
  return {Verdict::kRun};
}

// Judges a call that names the places of its rows. `of_rank`: [kMaxMapped] memories of the rank.
EPD_HOST_DEVICE inline Judgement judge_places(const abi::MappedMemory* of_rank,
                                              const abi::RowPlaces& places) {
  const bool in_is_bad = places.in != 0 && !is_mapped(of_rank, places.in);
  const bool out_is_bad = places.out != 0 && !is_mapped(of_rank, places.out);
  if (!in_is_bad && !out_is_bad) return {Verdict::kRun};
  const abi::RowPlace bad = in_is_bad ? places.in : places.out;
  return {Verdict::kRefuse, OpError::kOldMemory, abi::memory_of_place(bad), abi::generation_of_place(bad)};
}

// Returns the SMs of an operation that asks for `own`, in a group that may have `most`. 0 means all.
EPD_HOST_DEVICE constexpr std::uint32_t share_sms(std::uint32_t own, std::uint32_t most) {
  return own == 0 || (most != 0 && most < own) ? most : own;
}

// Returns the number of the next writing of a result. It is never 0.
EPD_HOST_DEVICE constexpr std::uint32_t next_writing(const CallState& state) {
  return state.results + 1 != 0 ? state.results + 1 : 1;
}

// Returns the block of operation `index`. A GPU takes a hundred instructions for a remainder of 64 bits.
EPD_HOST_DEVICE constexpr std::uint32_t block_of(std::uint64_t index, std::uint32_t depth) {
  const auto low = static_cast<std::uint32_t>(index);
  return low == index ? low % depth : static_cast<std::uint32_t>(index % depth);
}

// Turns a call into an operation.
EPD_HOST_DEVICE constexpr TakenCall take(const CallState& state, std::uint32_t depth, CallRing ring,
                                         const abi::Call& call, const RouteState& route) {
  const bool makes = abi::makes_routing(call.op, call.flags);
  TakenCall taken{};
  taken.tag = abi::op_tag(state.epoch, state.index);
  taken.routing_tag = makes ? 0 : route.tag;
  taken.number = call.number;
  taken.enabled_epoch = state.enabled_epoch_taken;
  taken.journal = state.journal;
  taken.result = call.result;
  taken.writing = next_writing(state);
  taken.op_code = static_cast<std::uint8_t>(call.op);
  taken.ring = static_cast<std::uint8_t>(ring);
  taken.slot = static_cast<std::uint8_t>(call.slot);
  taken.block = static_cast<std::uint8_t>(block_of(state.index, depth));
  taken.half = static_cast<std::uint8_t>(makes ? 1 - route.half : route.half);
  taken.flagged = call.flagged && ring == kByStreams ? 1 : 0;
  taken.flags = static_cast<std::uint16_t>(call.flags);
  taken.sms = static_cast<std::uint16_t>(share_sms(call.sms, state.sms));
  taken.num_tokens = makes ? call.num_tokens : route.num_tokens;
  taken.route = static_cast<std::uint16_t>(call.route);
  taken.timeout_ms = call.timeout_ms != 0 ? call.timeout_ms : state.timeout_ms;
  return taken;
}

// Returns the state of a record after the dispatch that makes its routing.
EPD_HOST_DEVICE constexpr RouteState made_route(const TakenCall& call) {
  return {call.tag, call.num_tokens, call.half};
}

// Returns the task of a dispatch or a combine.
EPD_HOST_DEVICE constexpr Task task_of(abi::Op op, bool per_expert) {
  if (op == abi::Op::kDispatch) return Task::kDispatch;
  return per_expert ? Task::kCombinePerExpert : Task::kCombine;
}

// Sets how the operation ends, and where it publishes what.
EPD_HOST_DEVICE inline void compose_ends(Operation& op, const CallArguments& own, const TakenCall& call) {
  auto* const counts = reinterpret_cast<std::uint8_t*>(own.results) + sizeof(abi::Results);
  op.counts.host_words =
      is_dispatch(call)
          ? reinterpret_cast<std::uint64_t*>(counts + std::size_t{own.counts_stride} * call.slot)
          : nullptr;
  // Not of a combine: other ranks pull its y until its end.
  op.counts.host_sent =
      is_dispatch(call) && has_flag(call, abi::kFlagDefer) ? &own.results->sent[call.slot] : nullptr;
  op.counts.mark = call.result + 1;
  op.out_result = {&own.results->places[abi::place_of(call.result)], call.writing};
  op.signal.done = call.ring == kByStreams ? &own.words->done : nullptr;
  op.signal.value = call.number + 1;
  op.signal.flag = call.flagged != 0 ? &own.words->flags[abi::flag_of(call.op(), call.slot)] : nullptr;
  op.signal.failed = &own.words->failed;
  op.abort = &own.state->abort;
  op.timeout_ns = std::uint64_t{call.timeout_ms} * 1'000'000;
  op.result = &own.host->journal[call.journal % kJournalEntries].result;
}

// Returns the number of CTAs that a call asks for, in a kernel of `most` CTAs.
EPD_HOST_DEVICE constexpr std::uint32_t ctas_of(const TakenCall& call, std::uint32_t most) {
  return call.sms == 0 || call.sms > most ? most : call.sms;
}
// Returns the number of CTAs that a group may have, in a kernel of `most` CTAs.
EPD_HOST_DEVICE constexpr std::uint32_t ctas_of_group(const CallState& state, std::uint32_t most) {
  return state.sms == 0 || state.sms > most ? most : state.sms;
}
// Returns the index in CallArguments::division of a call that `ctas` CTAs carry out.
EPD_HOST_DEVICE constexpr std::uint32_t division_index(const TakenCall& call, std::uint32_t most_ctas,
                                                       std::uint32_t ctas) {
  return division_kind(call.op(), call.flags) * most_ctas + ctas - 1;
}

}  // namespace epd::kernels
