// What a command says, and how a program becomes the operation that it asks for.
#include "gpu/kernel_cases.h"
#include "kernels/command_turn.h"
#include "proto/commands.h"
#include "proto/exchange.h"

#include <gtest/gtest.h>

namespace epd::fake_cuda_test {
namespace {

using abi::CommandWords;
using gpu_test::Random;
using kernels::cuda::Operation;

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
    const abi::Command command{
        static_cast<std::uint32_t>(random()), static_cast<std::uint32_t>(random() % 513),
        static_cast<std::uint32_t>(random() % abi::kMaxPrograms), random() % 2 != 0, 0};
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
    op.announcement.flags = static_cast<std::uint32_t>(random());
    const abi::OpAnnouncement before = op.announcement;
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
    const abi::OpAnnouncement& announced = op.announcement;
    EXPECT_EQ(announced.tag, turn.tag);
    EXPECT_EQ(announced.routing, makes ? 0 : route.tag);
    EXPECT_EQ(announced.num_tokens, makes ? command.num_tokens : route.num_tokens);
    EXPECT_EQ(announced.flags, before.flags);
    EXPECT_EQ(op.num_tokens, announced.num_tokens);
    EXPECT_EQ(op.signal.done, &words.done);
    EXPECT_EQ(op.signal.value, command.number + 1);
    EXPECT_EQ(op.signal.flag, command.flagged ? &words.flags[command.program] : nullptr);
    EXPECT_EQ(op.result, &entry.result);
    EXPECT_EQ(op.abort, &state.abort);
  }
}

}  // namespace
}  // namespace epd::fake_cuda_test
