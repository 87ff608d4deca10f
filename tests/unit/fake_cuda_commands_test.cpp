// Commands on the fake driver: operations that streams ask for equal the reference, and all the ways in which
// commands end.
#include "unit/fake_cuda_command_world.h"

#include "proto/arena.h"

#include <algorithm>
#include <bit>
#include <cstdlib>

namespace epd::fake_cuda_test {
namespace {

using gpu_test::Case;
using gpu_test::Random;
namespace ref = kernels::reference;

constexpr std::uint32_t kTokens = 12;

// What the kernel and the client have each their own words for.
static_assert(sizeof(CommandWords) == sizeof(abi::CommandWords));
static_assert(offsetof(CommandWords, rung) == offsetof(abi::CommandWords, rung));
static_assert(offsetof(CommandWords, closed) == offsetof(abi::CommandWords, closed));
static_assert(offsetof(CommandWords, done) == offsetof(abi::CommandWords, done));
static_assert(offsetof(CommandWords, flags) == offsetof(abi::CommandWords, flags));
static_assert(kernels::cuda::tag_of(77, 12345) == abi::op_tag(77, 12345));

TEST(FakeCudaCommandWord, IsTheClients) {
  Random random(1);
  for (int i = 0; i < 1000; ++i) {
    const std::uint64_t word = random();
    const abi::Command theirs = abi::unpack(word);
    const kernels::cuda::Command ours = kernels::cuda::unpack_command(word);
    EXPECT_EQ(ours.number, theirs.number);
    EXPECT_EQ(ours.num_tokens, theirs.num_tokens);
    EXPECT_EQ(ours.program, theirs.program);
    EXPECT_EQ(ours.flagged != 0, theirs.flagged);
    EXPECT_EQ(ours.epoch, theirs.epoch);
    EXPECT_EQ(abi::pack(theirs), word);
  }
}

// Every pointer of a program goes where its operation's block, or half, is; null ones stay.
TEST(FakeCudaCommandWord, APatchedProgramIsTheOperation) {
  using namespace kernels::cuda;
  Random random(2);
  for (int i = 0; i < 100; ++i) {
    CommandWords words{};
    CommandState state{};
    JournalEntry entry{};
    CommandArguments own;
    own.words = &words;
    own.state = &state;
    own.block_bytes = random() % 4096 * 64;
    own.landing_bytes = random() % 4096 * 128;
    own.half_bytes = random() % 4096 * 64;
    own.depth = static_cast<std::uint32_t>(1 + random() % 16);
    state.epoch = random() % 1000 + 1;
    state.index = random() % 100000;
    const ProgramHead head{Task::kDispatch, 0, static_cast<std::uint32_t>(random() % 2), 512};
    const RouteState route{abi::op_tag(random() % state.epoch + 1, random() % 1000),
                           static_cast<std::uint32_t>(random() % 512),
                           static_cast<std::uint32_t>(random() % 2)};
    const Command command{static_cast<std::uint32_t>(random()), static_cast<std::uint32_t>(random() % 513),
                          static_cast<std::uint32_t>(random() % kMaxPrograms),
                          static_cast<std::uint32_t>(random() % 2), 0};
    CommandTurn turn = make_turn(state, own.depth, command, head, route);
    turn.entry = &entry;
    const bool makes = head.makes_routing != 0;
    EXPECT_EQ(turn.tag, abi::op_tag(state.epoch, state.index));
    EXPECT_EQ(turn.block, state.index % own.depth);
    EXPECT_EQ(turn.half, makes ? 1 - route.half : route.half);

    const auto base = [](std::uintptr_t number) { return number << 32; };
    const auto at = [&]<typename T>(T*& pointer, std::uintptr_t number) {
      pointer = reinterpret_cast<T*>(base(number));  // NOLINT
    };
    const auto moved = [&](const void* pointer, std::uintptr_t number, std::uint64_t bytes) {
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(pointer), base(number) + bytes);
    };
    Operation op;
    Peer peer;
    const bool lands = random() % 2 != 0;
    at(peer.ready, 1);
    at(peer.arrived, 2);
    at(peer.announcement, 3);
    at(peer.rank_counts, 4);
    at(peer.expert_counts, 5);
    if (lands) at(peer.landing, 6);
    at(peer.source.y, 7);
    at(op.routing.topk, 8);
    at(op.routing.rows, 9);
    at(op.routing.placement, 10);
    if (makes) at(op.routing.head, 11);
    op.announcement[1] = random();
    op.announcement[3] = random();
    const std::uint64_t flags = op.announcement[3] >> 32;
    Peer absent;
    const std::uint64_t since = random() % 1000;
    patch_peer(peer, turn, own, since);
    patch_peer(absent, turn, own, since);
    patch_operation(op, turn, own);

    const std::uint64_t block = turn.block * own.block_bytes;
    moved(peer.ready, 1, block);
    moved(peer.arrived, 2, block);
    moved(peer.announcement, 3, block);
    moved(peer.rank_counts, 4, block);
    moved(peer.expert_counts, 5, block);
    if (lands) moved(peer.landing, 6, turn.block * own.landing_bytes);
    EXPECT_EQ(peer.landing != nullptr, lands);
    EXPECT_EQ(peer.source.y == nullptr, !makes && since > abi::epoch_of_tag(route.tag));
    EXPECT_EQ(absent.ready, nullptr);
    const std::uint64_t half = turn.half * own.half_bytes;
    moved(op.routing.topk, 8, half);
    moved(op.routing.rows, 9, half);
    moved(op.routing.placement, 10, half);
    if (makes) moved(op.routing.head, 11, half);
    EXPECT_EQ(op.routing.head != nullptr, makes);
    EXPECT_EQ(op.routing.handle, state.index + 1);
    EXPECT_EQ(op.routing.epoch, state.epoch);
    abi::OpAnnouncement announced{};
    std::memcpy(&announced, op.announcement, sizeof(announced));
    EXPECT_EQ(announced.tag, turn.tag);
    EXPECT_EQ(announced.routing, makes ? 0 : route.tag);
    EXPECT_EQ(announced.num_tokens, makes ? command.num_tokens : route.num_tokens);
    EXPECT_EQ(announced.flags, flags);
    EXPECT_EQ(op.num_tokens, announced.num_tokens);
    EXPECT_EQ(op.signal.done, &words.done);
    EXPECT_EQ(op.signal.value, command.number + 1);
    EXPECT_EQ(op.signal.flag, command.flagged != 0 ? &words.flags[command.program] : nullptr);
    EXPECT_EQ(op.result, &entry.result);
    EXPECT_EQ(op.abort, &state.abort);
  }
}

kernels::cuda::Shape shape_of(const Case& c) {
  const ref::GroupParams& g = c.group;
  kernels::cuda::Shape s;
  s.num_ranks = g.num_ranks;
  s.num_experts = g.num_experts;
  s.topk = g.topk;
  s.hidden = g.hidden;
  s.per_expert = g.layout != ref::Layout::kCompact;
  s.expert_blocks = g.layout == ref::Layout::kExpert;
  s.index64 = c.index64;
  s.alignment = g.alignment;
  s.expert_capacity = g.expert_capacity;
  const std::uint64_t experts = g.num_experts / g.num_ranks;
  const std::uint64_t most = std::uint64_t{g.num_ranks} * kTokens;
  s.recv_rows = !s.per_expert     ? most
                : s.expert_blocks ? experts * g.expert_capacity
                                  : most * std::min<std::uint64_t>(g.topk, experts) + experts * g.alignment;
  s.format = {g.payload == ref::Payload::kFp8Cast,
              g.scale_format,
              g.hidden,
              ref::x_bytes(g),
              ref::row_bytes(g),
              ref::scale_bytes(g)};
  return s;
}

Case draw(Random& random) {
  Case c = gpu_test::random_case(random, 256);
  c.group.masked.clear();
  c.group.expert_capacity = c.group.num_ranks * kTokens;
  c.weights = true;
  return c;
}

template <typename T>
void put(void* to, const std::vector<T>& values) {
  if (!values.empty()) std::memcpy(to, values.data(), values.size() * sizeof(T));
}
template <typename T>
std::vector<T> get(const void* from, std::size_t count) {
  const T* const first = static_cast<const T*>(from);
  return {first, first + count};
}

// A group whose ranks ask for operations in a random order, each of which is checked.
class CommandRun {
 public:
  CommandRun(const Case& c, Random& random)
      : case_(c), random_(random), commands_(shape_of(c), kTokens), routings_(CommandWorld::kRoutes) {
    for (std::uint32_t r = 0; r < size(); ++r) {
      commands_.record(r, [&](std::uint32_t program, Operation& op) { options(r, program, op); });
      commands_.own(r).host->start.sets = 1;
      commands_.start_kernel(r);
    }
    resume();
  }
  // A client's kernel may still be about to see that its command has ended, and looks at the words for that.
  ~CommandRun() {
    for (std::uint32_t r = 0; r < size(); ++r) {
      commands_.stop_kernel(r);
      EPD_CU(cuStreamSynchronize(commands_.own(r).client));
    }
  }

  void run(int steps) {
    for (int i = 0; i < steps && !::testing::Test::HasFailure(); ++i) step();
  }

 private:
  struct Routing {
    std::vector<ref::RankInput> inputs;
    std::vector<ref::RankReceived> expected;
    std::vector<RouteState> states;  // of each rank
  };
  std::uint32_t size() const { return commands_.size(); }

  void options(std::uint32_t r, std::uint32_t program, Operation& op) {
    const Rank& rank = commands_.rank(r);
    op.mark_unused = case_.mark_unused;
    op.zero_padding = case_.zero_padding;
    op.x_scales = case_.group.payload == ref::Payload::kFp8 ? rank.x_scales : nullptr;
    const bool combines = program % 3 == 2;
    op.topk_weights = !combines || case_.weighted ? rank.topk_weights : nullptr;
    op.out_weights = combines && case_.return_weights ? rank.out_weights : nullptr;
  }

  // Goes on after a halt, which has changed nothing, in a later epoch.
  void resume() {
    ++epoch_;
    for (std::uint32_t r = 0; r < size(); ++r) {
      CommandWorld::Start start;
      start.epoch = epoch_;
      start.index = index_;
      for (std::uint32_t i = 0; i < CommandWorld::kRoutes; ++i) {
        if (!routings_[i].states.empty()) start.routes[i] = routings_[i].states[r];
      }
      commands_.resume(r, start);
    }
  }

  void step() {
    const auto route = static_cast<std::uint32_t>(random_() % CommandWorld::kRoutes);
    const bool known = !routings_[route].inputs.empty();
    const auto drawn = random_() % 12;
    if (drawn < 4 || (drawn < 9 && !known)) {
      dispatch(route);
    } else if (drawn < 6) {
      redo(route);
    } else if (drawn < 9) {
      combine(route);
    } else if (drawn == 9) {
      noop();
    } else if (drawn == 10) {
      restart();
    } else {
      for (std::uint32_t r = 0; r < size(); ++r) commands_.halt(r);
      resume();
    }
  }

  void give(std::uint32_t r, const ref::RankInput& input) {
    Rank& rank = commands_.rank(r);
    put(rank.x, input.x);
    put(rank.x_scales, input.x_scales);
    if (case_.index64) {
      put(rank.topk_idx, input.topk_idx);
    } else {
      put(rank.topk_idx, std::vector<std::int32_t>(input.topk_idx.begin(), input.topk_idx.end()));
    }
    put(rank.topk_weights, input.topk_weights);
  }

  // On every rank, and until it has ended there.
  void ask(std::uint32_t program, const Routing* makes) {
    for (std::uint32_t r = 0; r < size(); ++r) {
      CommandWorld::Ring how;
      if (makes != nullptr) how.num_tokens = makes->inputs[r].num_tokens;
      how.flagged = random_() % 2;
      how.waits = random_() % 2;
      flagged_.resize(size());
      flagged_[r] = how.flagged;
      commands_.ring(r, program, how);
    }
    for (std::uint32_t r = 0; r < size(); ++r) {
      SCOPED_TRACE("rank " + std::to_string(r) + ", command " + std::to_string(command_));
      const JournalEntry entry = commands_.journal(r);
      const CommandWords& words = *commands_.own(r).words;
      EXPECT_EQ(entry.result.error, OpError::kNone);
      EXPECT_EQ(entry.command, command_);
      EXPECT_EQ(entry.program, program);
      EXPECT_EQ(entry.index, index_);
      if (makes != nullptr) {
        EXPECT_EQ(entry.num_tokens, makes->inputs[r].num_tokens);
      }
      EXPECT_TRUE(comes([&] { return now(words.done) == command_ + 1; }));
      EXPECT_EQ(now(words.failed), 0u);
      EXPECT_EQ(now(words.flags[program]) != 0, flagged_[r] || false);
      commands_.own(r).words->flags[program] = 0;
      commands_.tell_read(r);
    }
    ++command_;
    if (program != CommandWorld::kNoop) ++index_;
  }

  void dispatch(std::uint32_t route) {
    Routing& routing = routings_[route];
    routing.inputs.clear();
    for (std::uint32_t r = 0; r < size(); ++r) {
      const auto tokens = static_cast<std::uint32_t>(random_() % (kTokens + 1));
      routing.inputs.push_back(gpu_test::random_input(random_, case_, tokens));
      give(r, routing.inputs[r]);
    }
    routing.expected = ref::dispatch(case_.group, routing.inputs);
    routing.states.resize(size());
    for (std::uint32_t r = 0; r < size(); ++r) {
      RouteState& state = routing.states[r];
      state = {abi::op_tag(epoch_, index_), routing.inputs[r].num_tokens, 1 - state.half};
    }
    ask(CommandWorld::dispatch(route), &routing);
    check(routing, "dispatch");
    for (std::uint32_t r = 0; r < size(); ++r) {
      const RouteState& now_there = commands_.own(r).routes[route];
      EXPECT_EQ(now_there.tag, routing.states[r].tag);
      EXPECT_EQ(now_there.half, routing.states[r].half);
    }
  }

  // With rows of its own by the routing that is known.
  void redo(std::uint32_t route) {
    Routing& routing = routings_[route];
    for (std::uint32_t r = 0; r < size(); ++r) {
      const ref::RankInput fresh = gpu_test::random_input(random_, case_, routing.inputs[r].num_tokens);
      routing.inputs[r].x = fresh.x;
      routing.inputs[r].x_scales = fresh.x_scales;
      routing.inputs[r].topk_weights = fresh.topk_weights;
      give(r, routing.inputs[r]);
    }
    routing.expected = ref::dispatch(case_.group, routing.inputs);
    ask(CommandWorld::cached(route), nullptr);
    check(routing, "cached dispatch");
  }

  void check(const Routing& routing, const char* what) {
    const auto& s = commands_.world().shape();
    for (std::uint32_t r = 0; r < size(); ++r) {
      SCOPED_TRACE(std::string(what) + ", rank " + std::to_string(r));
      const ref::RankReceived& want = routing.expected[r];
      const kernels::DispatchTarget& target = commands_.rank(r).peer.target;
      for (std::size_t i = 0; i < want.num_rows; ++i) {
        if (want.recv_src[i * 2] < 0) continue;
        const auto row = [&](const void* from, std::size_t bytes) {
          return get<std::uint8_t>(static_cast<const std::uint8_t*>(from) + i * bytes, bytes);
        };
        ASSERT_TRUE(row(target.recv_x, s.format.row_bytes) == row(want.recv_x.data(), s.format.row_bytes));
        ASSERT_TRUE(row(target.recv_scales, s.format.scale_bytes) ==
                    row(want.recv_scales.data(), s.format.scale_bytes));
        ASSERT_TRUE(row(target.recv_src, 8) == row(want.recv_src.data(), 8));
        const std::size_t choices = commands_.world().choices();
        ASSERT_TRUE(row(target.recv_topk_weights, choices * 4) ==
                    row(want.recv_topk_weights.data(), choices * 4));
      }
    }
  }

  void combine(std::uint32_t route) {
    const Routing& routing = routings_[route];
    const auto& s = commands_.world().shape();
    std::vector<ref::CombineInput> answers(size());
    for (std::uint32_t r = 0; r < size(); ++r) {
      const Rank& rank = commands_.rank(r);
      const std::uint32_t rows = routing.expected[r].num_rows;
      answers[r].y = gpu_test::random_bf16s(random_, std::size_t{rows} * s.hidden);
      answers[r].y_weights = gpu_test::random_floats(random_, rows * commands_.world().choices());
      put(rank.y, answers[r].y);
      put(rank.y_weights, answers[r].y_weights);
      give(r, routing.inputs[r]);
    }
    ask(CommandWorld::combine(route), nullptr);
    for (std::uint32_t r = 0; r < size(); ++r) {
      SCOPED_TRACE("combine, rank " + std::to_string(r));
      const ref::RankCombined want =
          ref::combine_to(case_.group, routing.inputs, answers, {case_.weighted, case_.return_weights}, r);
      EXPECT_TRUE(get<std::uint16_t>(commands_.rank(r).out, want.out.size()) == want.out) << "out";
      const auto weights = get<std::uint32_t>(commands_.rank(r).out_weights, want.out_weights.size());
      for (std::size_t i = 0; i < weights.size(); ++i)
        ASSERT_EQ(weights[i], std::bit_cast<std::uint32_t>(want.out_weights[i]));
    }
  }

  void noop() {
    ask(CommandWorld::kNoop, nullptr);
    for (std::uint32_t r = 0; r < size(); ++r) commands_.queue_noop(r);
  }

  void restart() {
    for (std::uint32_t r = 0; r < size(); ++r) {
      commands_.stop_kernel(r);
      commands_.start_kernel(r);
    }
  }

  const Case case_;
  Random& random_;
  CommandWorld commands_;
  std::vector<Routing> routings_;
  std::vector<bool> flagged_;
  std::uint64_t epoch_ = 0;
  std::uint64_t index_ = 0;
  std::uint32_t command_ = 0;
};

TEST(FakeCudaCommands, EqualTheReference) {
  const char* const given = std::getenv("EPD_TEST_SEED");
  const std::uint64_t first = given == nullptr ? 1 : std::strtoull(given, nullptr, 10);
  for (std::uint64_t seed = first; seed < first + 10; ++seed) {
    Random random(seed);
    const Case c = draw(random);
    SCOPED_TRACE("seed " + std::to_string(seed) + ": " + c.text());
    CommandRun(c, random).run(24);
    if (HasFailure()) return;
  }
}

// One rank, unless a test says else.
class FakeCudaCommandEnds : public ::testing::Test {
 protected:
  void make(std::uint32_t ranks) {
    Case c;
    c.group.num_ranks = ranks;
    c.group.num_experts = ranks * 4;
    c.group.hidden = 256;
    c.group.topk = 4;
    commands_ = std::make_unique<CommandWorld>(shape_of(c), kTokens);
    for (std::uint32_t r = 0; r < ranks; ++r) {
      for (std::size_t i = 0; i < std::size_t{kTokens} * 4; ++i)
        choices(r)[i] = static_cast<std::int64_t>(i % (ranks * 4));
    }
  }
  void TearDown() override {
    for (std::uint32_t r = 0; commands_ != nullptr && r < commands_->size(); ++r) commands_->stop_kernel(r);
  }
  void start(std::uint32_t ranks = 1) {
    make(ranks);
    for (std::uint32_t r = 0; r < ranks; ++r) commands_->start_kernel(r);
    for (std::uint32_t r = 0; r < ranks; ++r) commands_->resume(r, {});
  }
  std::int64_t* choices(std::uint32_t r) { return static_cast<std::int64_t*>(commands_->rank(r).topk_idx); }
  CommandWords& words(std::uint32_t r = 0) { return *commands_->own(r).words; }
  void ring(std::uint32_t program, std::uint32_t num_tokens = 0, bool flagged = false) {
    CommandWorld::Ring how;
    how.num_tokens = num_tokens;
    how.flagged = flagged;
    commands_->ring(0, program, how);
    commands_->synchronise(0);
  }
  // The next end is this error, nothing is carried out after it, and all is well in the next turn.
  JournalEntry refused(OpError error) {
    const JournalEntry entry = commands_->journal(0);
    EXPECT_EQ(entry.result.error, error);
    EXPECT_EQ(entry.result.tag, 0u);
    const std::uint32_t failed = now(words().failed);
    const std::uint32_t done = now(words().done);
    ring(CommandWorld::kNoop, 0, true);
    EXPECT_EQ(now(words().failed), failed + 1);
    EXPECT_EQ(now(words().done), done + 1);
    EXPECT_EQ(now(words().flags[CommandWorld::kNoop]), 1u);
    return entry;
  }

  std::unique_ptr<CommandWorld> commands_;
};

TEST_F(FakeCudaCommandEnds, HaltedAtFirstItDiscards) {
  make(1);
  commands_->start_kernel(0);
  ring(CommandWorld::dispatch(0), 3, true);
  ring(63);
  EXPECT_EQ(now(words().done), 2u);
  EXPECT_EQ(now(words().failed), 2u);
  EXPECT_EQ(now(words().flags[CommandWorld::dispatch(0)]), 1u);
  commands_->resume(0, {});
  ring(CommandWorld::dispatch(0), 3);
  const JournalEntry entry = commands_->journal(0);
  EXPECT_EQ(entry.result.error, OpError::kNone);
  EXPECT_EQ(entry.result.tag, abi::op_tag(1, 0));
  EXPECT_EQ(entry.result.num_recv_rows, 3u);
  EXPECT_EQ(entry.command, 2u);
  EXPECT_EQ(now(words().failed), 2u);
  commands_->halt(0);
  ring(CommandWorld::dispatch(0), 3);
  EXPECT_EQ(now(words().failed), 3u);
}

TEST_F(FakeCudaCommandEnds, TokensMayBeKnownOnlyToTheDevice) {
  start();
  std::uint32_t* const at = commands_->own(0).arena->take<std::uint32_t>(1);
  for (const std::uint32_t tokens : {5u, 0u, kTokens}) {
    *at = tokens;
    CommandWorld::Ring how;
    how.num_tokens_at = at;
    commands_->ring(0, CommandWorld::dispatch(1), how);
    EXPECT_EQ(commands_->journal(0).num_tokens, tokens);
  }
  *at = 1u << 20;  // more than a command has room for
  CommandWorld::Ring how;
  how.num_tokens_at = at;
  commands_->ring(0, CommandWorld::dispatch(1), how);
  EXPECT_EQ(refused(OpError::kBadTokens).result.room, kTokens);
}

TEST_F(FakeCudaCommandEnds, WhatIsIllegalIsRefusedAndOthersDiscarded) {
  start();
  ring(CommandWorld::dispatch(0), kTokens + 1, true);
  EXPECT_EQ(refused(OpError::kBadTokens).program, CommandWorld::dispatch(0));
  EXPECT_EQ(now(words().flags[CommandWorld::dispatch(0)]), 1u);
  commands_->resume(0, {});
  ring(CommandWorld::combine(0), 1);  // its tokens are the routing's
  refused(OpError::kBadTokens);
  commands_->resume(0, {});
  ring(40);
  EXPECT_EQ(kernels::cuda::unpack_command(refused(OpError::kBadProgram).result.rows).program, 40u);
  commands_->resume(0, {});
  ring(CommandWorld::combine(1));
  refused(OpError::kNoRouting);
  commands_->resume(0, {});
  ring(CommandWorld::dispatch(0), 2);
  EXPECT_EQ(commands_->journal(0).result.error, OpError::kNone);
}

TEST_F(FakeCudaCommandEnds, ARoutingOfAChangedGroupServesNoDispatch) {
  start();
  ring(CommandWorld::dispatch(0), 2);
  commands_->journal(0);
  CommandWorld::Start later;
  later.epoch = 3;
  later.index = 1;
  later.changed_epoch = 2;
  later.routes[0] = commands_->own(0).routes[0];
  commands_->halt(0);
  commands_->resume(0, later);
  ring(CommandWorld::combine(0));
  EXPECT_EQ(commands_->journal(0).result.error, OpError::kNone);
  ring(CommandWorld::cached(0));
  EXPECT_EQ(refused(OpError::kOldRouting).result.rows, 1u);
}

TEST_F(FakeCudaCommandEnds, CommandsOfAnotherEpochAreDiscarded) {
  start();
  words().epoch = 2;
  ring(CommandWorld::dispatch(0), 2);
  EXPECT_EQ(now(words().failed), 1u);
  words().epoch = 1 + 256;  // its low bits count
  ring(CommandWorld::dispatch(0), 2);
  EXPECT_EQ(commands_->journal(0).command, 1u);
  EXPECT_EQ(now(words().failed), 1u);
}

TEST_F(FakeCudaCommandEnds, ALappedRingIsNoticed) {
  start();
  ring(CommandWorld::kNoop);
  EXPECT_EQ(commands_->journal(0).command, 0u);
  const std::uint32_t later = 1 + kernels::cuda::kCommandSlots;
  const std::uint64_t word = abi::pack({later, 0, CommandWorld::kNoop, true, 1});
  words().tail = later + 1;
  commands_->store(0, later, word);
  ASSERT_TRUE(comes([&] { return now(words().done) == later + 1; }));
  EXPECT_EQ(now(words().failed), kernels::cuda::kCommandSlots + 1);
  const JournalEntry lost = refused(OpError::kLostCommand);
  EXPECT_EQ(lost.result.rows, word);
  EXPECT_EQ(lost.result.room, 1u) << "the command that was awaited";
}

TEST_F(FakeCudaCommandEnds, AnEngineThatIsNewGoesOnWhereTheOldOneWas) {
  make(1);
  const std::uint32_t sequence = 0xfffffffe;  // numbers are cyclic
  words().tail = sequence;
  words().done = sequence;
  for (std::uint32_t i = 1; i <= kernels::cuda::kCommandSlots; ++i)
    commands_->store(0, sequence - i, abi::pack({sequence - i, 0, CommandWorld::kNoop, false, 1}));
  commands_->own(0).host->start.sets = 1;
  commands_->own(0).host->start.sequence = sequence;
  commands_->start_kernel(0);
  commands_->resume(0, {});
  for (std::uint32_t i = 0; i < 4; ++i) {
    ring(CommandWorld::kNoop);
    EXPECT_EQ(commands_->journal(0).command, sequence + i);
  }
  EXPECT_EQ(now(words().done), 2u);
  commands_->stop_kernel(0);
  commands_->start_kernel(0);  // `sets` stands, and counts no more
  ring(CommandWorld::kNoop);
  EXPECT_EQ(commands_->journal(0).command, 2u);
  EXPECT_EQ(now(words().failed), 0u);
}

TEST_F(FakeCudaCommandEnds, AFullJournalHoldsUpCommandsAndTurnsAreTakenMeanwhile) {
  start();
  const std::uint32_t entries = kernels::cuda::kJournalEntries;
  for (std::uint32_t i = 0; i < entries; ++i) ring(CommandWorld::kNoop);
  CommandWorld::Ring how;
  how.waits = false;
  commands_->ring(0, CommandWorld::kNoop, how);
  commands_->synchronise(0);
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  EXPECT_EQ(now(words().done), entries);
  for (std::uint32_t i = 0; i < entries; ++i) ASSERT_EQ(commands_->journal(0).command, i);
  commands_->tell_read(0);
  EXPECT_EQ(commands_->journal(0).command, entries);
  for (std::uint32_t i = 1; i < entries; ++i) ring(CommandWorld::kNoop);
  commands_->ring(0, CommandWorld::kNoop, how);
  commands_->halt(0);  // discards it
  EXPECT_TRUE(comes([&] { return now(words().done) == 2 * entries + 1; }));
  EXPECT_EQ(now(words().failed), 1u);
}

TEST_F(FakeCudaCommandEnds, AnOperationThatFailsIsToldAndHaltsOthers) {
  start(2);
  choices(0)[2 * 4 + 1] = 8;
  ring(CommandWorld::dispatch(0), 5, true);
  const JournalEntry entry = commands_->journal(0);
  EXPECT_EQ(entry.result.error, OpError::kBadChoice);
  EXPECT_EQ(entry.result.tag, abi::op_tag(1, 0));
  EXPECT_EQ(entry.result.left, entry.result.tag);
  EXPECT_EQ(entry.result.token, 2u);
  EXPECT_EQ(entry.index, 0u);
  EXPECT_EQ(now(words().failed), 1u);
  EXPECT_EQ(now(words().flags[CommandWorld::dispatch(0)]), 1u);
  EXPECT_EQ(commands_->own(0).routes[0].tag, 0u);
  ring(CommandWorld::dispatch(1), 5);
  EXPECT_EQ(now(words().failed), 2u);
  // The other rank waits for this one until the host halts it.
  CommandWorld::Ring how;
  how.num_tokens = 5;
  commands_->ring(1, CommandWorld::dispatch(0), how);
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  EXPECT_EQ(now(words(1).done), 0u);
  commands_->halt(1);
  const JournalEntry other = commands_->journal(1);
  EXPECT_EQ(other.result.error, OpError::kAborted);
  EXPECT_EQ(other.result.culprit, 0);
  commands_->synchronise(1);
  EXPECT_EQ(now(words(1).failed), 1u);
  // And then both go on.
  choices(0)[2 * 4 + 1] = 7;
  for (std::uint32_t r = 0; r < 2; ++r) {
    CommandWorld::Start again;
    again.epoch = 2;
    commands_->resume(r, again);
  }
  for (std::uint32_t r = 0; r < 2; ++r) commands_->ring(r, CommandWorld::dispatch(0), how);
  for (std::uint32_t r = 0; r < 2; ++r) {
    const JournalEntry end = commands_->journal(r);
    EXPECT_EQ(end.result.error, OpError::kNone);
    EXPECT_EQ(end.result.tag, abi::op_tag(2, 0));
  }
}

TEST_F(FakeCudaCommandEnds, ARankThatCameLaterHasNoRowsOfOlderRoutings) {
  start(2);
  CommandWorld::Ring how;
  how.num_tokens = kTokens;
  for (std::uint32_t r = 0; r < 2; ++r) commands_->ring(r, CommandWorld::dispatch(0), how);
  for (std::uint32_t r = 0; r < 2; ++r) EXPECT_EQ(commands_->journal(r).result.error, OpError::kNone);
  for (std::uint32_t r = 0; r < 2; ++r) {
    commands_->own(r).programs[CommandWorld::combine(0)].since[1] = 2;
    const std::size_t words = std::size_t{kTokens} * commands_->world().shape().hidden;
    std::fill_n(commands_->rank(r).y, commands_->world().shape().recv_rows * words / kTokens,
                r == 0 ? 0x3f80 : 0x4000);
    std::fill_n(commands_->rank(r).out, words, 0xffff);
  }
  how.num_tokens = 0;
  for (std::uint32_t r = 0; r < 2; ++r) commands_->ring(r, CommandWorld::combine(0), how);
  for (std::uint32_t r = 0; r < 2; ++r) EXPECT_EQ(commands_->journal(r).result.error, OpError::kNone);
  // Tokens go to rank 0 and rank 1 in turn: 1.0 came, and nothing did.
  EXPECT_EQ(commands_->rank(0).out[0], 0x3f80);
  EXPECT_EQ(commands_->rank(0).out[commands_->world().shape().hidden], 0);
}

TEST_F(FakeCudaCommandEnds, WhoRingsWhenItIsClosedWaitsForNothing) {
  make(1);
  words().closed = 1;
  ring(CommandWorld::kNoop, 0, true);
  EXPECT_EQ(now(words().flags[CommandWorld::kNoop]), 1u);
  EXPECT_EQ(now(words().tail), 1u);
  EXPECT_EQ(words().commands[0], 0u);
  commands_->start_kernel(0);
}

}  // namespace
}  // namespace epd::fake_cuda_test
