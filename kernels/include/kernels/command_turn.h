// How commands are judged, and how operations come from programs. Plain functions, the same for the kernel
// that stays and for whoever plays its part in tests.
#pragma once

#include "kernels/cuda.h"
#include "kernels/host_device.h"

#include <cstddef>
#include <cstdint>

namespace epd::kernels::cuda {

// The part of a program by which its commands are judged: 16 bytes from Program::task on.
struct alignas(16) ProgramHead {
  Task task;
  std::uint32_t route;
  std::uint32_t makes_routing;
  std::uint32_t max_tokens;
};
static_assert(sizeof(ProgramHead) == 16 && offsetof(Program, task) % 16 == 0 &&
              offsetof(Program, max_tokens) - offsetof(Program, task) == offsetof(ProgramHead, max_tokens));

enum class Verdict {
  kWait,     // it is not there yet
  kDiscard,  // it ends, and nothing else happens
  kRefuse,   // it ends badly, and others after it are discarded
  kNoop,
  kRun,
};
struct Judgement {
  Verdict verdict;
  OpError error = OpError::kNone;  // of kRefuse; rows and room as OpError says
  std::uint64_t rows = 0;
  std::uint64_t room = 0;
};

// Whether the host's turn, as the kernel has taken it, lets commands be carried out.
EPD_HOST_DEVICE constexpr bool takes_commands(const CommandState& state) {
  return state.turn_taken % 2 != 0 && state.failed == 0;
}

// Of the word that lies where the next command has to be, before its program is looked at: kRun, go on with
// judge_program(). Words of the ring's last round are older, and so not there.
EPD_HOST_DEVICE constexpr Judgement judge_word(const CommandState& state, std::uint64_t word) {
  const abi::Command command = abi::unpack(word);
  const auto ahead = static_cast<std::int32_t>(command.number - state.sequence);
  if (ahead < 0) return {Verdict::kWait};
  if (!takes_commands(state)) return {Verdict::kDiscard};
  if (ahead > 0) return {Verdict::kRefuse, OpError::kLostCommand, word, state.sequence};
  return {command.epoch == (state.epoch & 0xff) ? Verdict::kRun : Verdict::kDiscard};
}

EPD_HOST_DEVICE constexpr bool has_route(const ProgramHead& head) {
  return head.task != Task::kStop && head.task != Task::kNoop;
}

// `route`: of a program that has one, its record's.
EPD_HOST_DEVICE constexpr Judgement judge_program(const CommandState& state, std::uint64_t word,
                                                  const ProgramHead& head, const RouteState& route) {
  if (head.task == Task::kStop) return {Verdict::kRefuse, OpError::kBadProgram, word};
  if (abi::unpack(word).num_tokens > head.max_tokens)
    return {Verdict::kRefuse, OpError::kBadTokens, word, head.max_tokens};
  if (head.task == Task::kNoop) return {Verdict::kNoop};
  if (head.makes_routing != 0) return {Verdict::kRun};
  if (route.tag == 0) return {Verdict::kRefuse, OpError::kNoRouting};
  const bool cached = head.task == Task::kDispatch;
  if (cached && abi::epoch_of_tag(route.tag) < state.changed_epoch)
    return {Verdict::kRefuse, OpError::kOldRouting, abi::epoch_of_tag(route.tag)};
  return {Verdict::kRun};
}

// The operation that a command has become.
EPD_HOST_DEVICE constexpr CommandTurn make_turn(const CommandState& state, std::uint32_t depth,
                                                const abi::Command& command, const ProgramHead& head,
                                                const RouteState& route) {
  const bool makes = head.makes_routing != 0;
  CommandTurn turn{};
  turn.tag = abi::op_tag(state.epoch, state.index);
  turn.routing_tag = makes ? 0 : route.tag;
  turn.command = command.number;
  turn.program = command.program;
  turn.num_tokens = makes ? command.num_tokens : route.num_tokens;
  turn.block = static_cast<std::uint32_t>(state.index % depth);
  turn.half = makes ? 1 - route.half : route.half;
  turn.flagged = command.flagged;
  return turn;
}

// What a record holds when the turn of a dispatch that makes a routing has ended well.
EPD_HOST_DEVICE constexpr RouteState made_route(const CommandTurn& turn) {
  return {turn.tag, turn.num_tokens, turn.half};
}

template <typename T>
EPD_HOST_DEVICE inline void move_by(T*& pointer, std::uint64_t bytes) {
  if (pointer != nullptr)
    pointer = reinterpret_cast<T*>(reinterpret_cast<std::uintptr_t>(pointer) + bytes);  // NOLINT
}

// A peer of the program to that of the operation. `since`: Program::since of the rank.
EPD_HOST_DEVICE inline void patch_peer(Peer& peer, const CommandTurn& turn, const CommandArguments& own,
                                       std::uint64_t since) {
  const std::uint64_t block = turn.block * own.block_bytes;
  move_by(peer.ready, block);
  move_by(peer.arrived, block);
  move_by(peer.announcement, block);
  move_by(peer.rank_counts, block);
  move_by(peer.expert_counts, block);
  move_by(peer.landing, turn.block * own.landing_bytes);
  // It came after the routing was made. (A new routing has no sources, and no rank came later than now.)
  if (turn.routing_tag != 0 && since > abi::epoch_of_tag(turn.routing_tag)) peer.source = {};
}

// All else.
EPD_HOST_DEVICE inline void patch_operation(Operation& op, const CommandTurn& turn,
                                            const CommandArguments& own) {
  const std::uint64_t half = turn.half * own.half_bytes;
  op.tag = turn.tag;
  op.num_tokens = turn.num_tokens;
  op.announcement.tag = turn.tag;
  op.announcement.routing = turn.routing_tag;
  op.announcement.num_tokens = turn.num_tokens;
  move_by(op.routing.topk, half);
  move_by(op.routing.rows, half);
  move_by(op.routing.placement, half);
  move_by(op.routing.head, half);
  op.routing.handle = abi::index_of_tag(turn.tag) + 1;
  op.routing.epoch = abi::epoch_of_tag(turn.tag);
  op.signal.ready = nullptr;
  op.signal.done = &own.words->done;
  op.signal.value = turn.command + 1;
  op.signal.flag = turn.flagged != 0 ? &own.words->flags[turn.program] : nullptr;
  op.signal.failed = &own.words->failed;
  op.abort = &own.state->abort;
  op.result = &turn.entry->result;
}

}  // namespace epd::kernels::cuda
