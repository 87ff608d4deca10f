#include "fake_cuda/command_taker.h"

#include "fake_cuda/operation_exchange.h"

#include <atomic>

namespace epd::fake_cuda {
namespace {

using namespace kernels::cuda;

// Null: of a command that names none.
const RouteState kNoRoute{};

}  // namespace

std::string CommandTaker::begin() {
  if (!device_.reaches(own_.words, sizeof(abi::CommandWords)))
    return "the words of commands are out of reach";
  if (!device_.reaches(own_.state, sizeof(CommandState))) return "the state of commands is out of reach";
  if (!device_.reaches(own_.programs, abi::kMaxPrograms * sizeof(Program)))
    return "programs are out of reach";
  if (!device_.reaches(own_.host, sizeof(CommandHost))) return "the journal is out of reach";
  if (own_.depth == 0) return "an arena without blocks";
  set_sequence();
  return {};
}

// Once in a lane's life: from then on nobody else knows better.
void CommandTaker::set_sequence() {
  CommandState& state = *own_.state;
  if (state.sequence_set != 0 || own_.host->start.sets == 0) return;
  state.sequence_set = 1;
  state.sequence = own_.host->start.sequence;
}

bool CommandTaker::take_turn(std::string& wrong) {
  CommandState& state = *own_.state;
  const std::uint32_t turn = load_acquire(&state.turn);
  if (turn == state.turn_taken) return false;
  if (turn % 2 != 0) {
    const CommandStart start = own_.host->start;
    const std::size_t bytes = start.num_routes * sizeof(RouteState);
    if (!device_.reaches(own_.routes, bytes) || !device_.reaches(start.routes, bytes))
      wrong = "the routes of commands are out of reach";
    if (!wrong.empty()) return true;
    set_sequence();
    state.epoch = start.epoch;
    state.index = start.index;
    state.changed_epoch = start.changed_epoch;
    state.failed = 0;
    for (std::uint32_t i = 0; i < start.num_routes; ++i) own_.routes[i] = start.routes[i];
  }
  state.turn_taken = turn;
  store_release(&own_.host->turn, turn);
  return true;
}

bool CommandTaker::look(std::string& wrong) {
  if (take_turn(wrong)) return true;
  CommandState& state = *own_.state;
  const std::uint64_t word = load_acquire(&own_.words->commands[state.sequence % abi::kCommandSlots]);
  const abi::Command command = abi::unpack(word);
  Judgement judgement = judge_word(state, word);
  if (judgement.verdict == Verdict::kWait) return false;
  // What the host has to hear of has to wait until it can; a turn may come meanwhile.
  if (judgement.verdict != Verdict::kDiscard && journal_is_full()) return false;
  ProgramHead head{};
  if (judgement.verdict == Verdict::kRun) {  // the host may be writing programs while others are discarded
    const Program& program = own_.programs[command.program];
    // With what was copied there before the client rang.
    if (!device_.reaches(&program, sizeof(program))) wrong = "a program is out of reach";
    if (!wrong.empty()) return true;
    head = {program.task, program.route, program.makes_routing, program.max_tokens};
    judgement = judge_program(state, word, head, has_route(head) ? own_.routes[head.route] : kNoRoute);
  }
  switch (judgement.verdict) {
    case Verdict::kWait: break;
    case Verdict::kDiscard: end(command, false); break;
    case Verdict::kRefuse: refuse(command, judgement); break;
    case Verdict::kNoop: run_noop(command); break;
    case Verdict::kRun: wrong = run(command, head); break;
  }
  return true;
}

bool CommandTaker::journal_is_full() const {
  return own_.state->journal - load_acquire(&own_.state->journal_read) >= kJournalEntries;
}

JournalEntry& CommandTaker::next_entry() {
  return own_.host->journal[own_.state->journal % kJournalEntries];
}

// Those between, if it is not the one that was awaited, are lost with it.
void CommandTaker::end(const abi::Command& command, bool well) {
  CommandState& state = *own_.state;
  const std::uint32_t ended = command.number + 1 - state.sequence;
  state.sequence = command.number + 1;
  if (!well) std::atomic_ref(own_.words->failed).fetch_add(ended);
  if (command.flagged) store_release(&own_.words->flags[command.program], 1u);
  store_release(&own_.words->done, command.number + 1);
}

void CommandTaker::refuse(const abi::Command& command, const Judgement& judgement) {
  JournalEntry& entry = next_entry();
  entry.result = {};
  entry.result.error = judgement.error;
  entry.result.culprit = -1;
  entry.result.expert = -1;
  entry.result.rows = judgement.rows;
  entry.result.room = judgement.room;
  own_.state->failed = 1;
  end(command, false);
  write_journal(command, own_.state->index, command.num_tokens);
}

void CommandTaker::run_noop(const abi::Command& command) {
  JournalEntry& entry = next_entry();
  end(command, true);
  entry.result = {};
  entry.result.tag = ++own_.state->noops;
  entry.result.culprit = -1;
  entry.result.expert = -1;
  write_journal(command, own_.state->index, 0);
}

std::string CommandTaker::run(const abi::Command& command, const ProgramHead& head) {
  CommandState& state = *own_.state;
  const Program& program = own_.programs[command.program];
  CommandTurn turn = make_turn(state, own_.depth, command, head, own_.routes[head.route]);
  turn.entry = &next_entry();
  Operation op = program.op;
  for (std::uint32_t r = 0; r < op.shape.num_ranks; ++r)
    patch_peer(op.peers[r], turn, own_, program.since[r]);
  patch_operation(op, turn, own_);
  const std::uint64_t index = state.index++;
  state.sequence = command.number + 1;
  if (std::string wrong = run_(head.task, op); !wrong.empty()) return wrong;
  if (device_.over()) return {};
  const bool well = turn.entry->result.error == OpError::kNone;
  if (!well) state.failed = 1;
  if (well && head.makes_routing != 0) own_.routes[head.route] = made_route(turn);
  write_journal(command, index, turn.num_tokens);
  return {};
}

void CommandTaker::write_journal(const abi::Command& command, std::uint64_t index, std::uint32_t num_tokens) {
  JournalEntry& entry = next_entry();
  entry.index = index;
  entry.program = command.program;
  entry.num_tokens = num_tokens;
  entry.command = command.number;
  store_release(&entry.number, ++own_.state->journal);
}

}  // namespace epd::fake_cuda
