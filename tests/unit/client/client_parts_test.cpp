// The parts of a session, each alone: no daemon, and of the engine only its memory.
#include "attach_socket.h"
#include "call_medium.h"
#include "connection.h"
#include "group.h"
#include "hooks.h"
#include "ticket_status.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <future>
#include <memory>
#include <thread>

namespace epd::client {
namespace {

using std::chrono::milliseconds;

struct SocketPair {
  SocketPair() {
    int ends[2] = {-1, -1};
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends), 0);
    ours.reset(ends[0]);
    theirs.reset(ends[1]);
  }
  // How many packets have come to the other end.
  int arrived() const {
    char byte[256];
    int count = 0;
    while (::recv(theirs.get(), byte, sizeof(byte), MSG_DONTWAIT) > 0) ++count;
    return count;
  }

  UniqueFd ours;
  UniqueFd theirs;
};

bool soon(const std::function<bool()>& what) {
  for (int i = 0; i < 10'000 && !what(); ++i) std::this_thread::sleep_for(milliseconds(1));
  return what();
}

// ---- the connection -------------------------------------------------------------------------------

TEST(AttachSocket, ADescriptorThatCannotBePassedIsRefused) {
  std::uint32_t ring_parameters[30] = {};
  const UniqueFd ring(static_cast<int>(::syscall(SYS_io_uring_setup, 4, ring_parameters)));
  if (!ring.valid()) GTEST_SKIP() << "no io_uring here: " << std::strerror(errno);
  const SocketPair sockets;
  const Status refused = send(sockets.ours, abi::AttachType::kJoin, 1, nullptr, 0, {ring.get()});
  EXPECT_EQ(refused.code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(refused.message(), "the system passes not all of the descriptors " + std::to_string(ring.get()) +
                                   " to another process; allowed: descriptors of memory");
  EXPECT_EQ(sockets.arrived(), 0);
}

// ---- waits ----------------------------------------------------------------------------------------

class WaitsTest : public ::testing::Test, protected News {
 protected:
  struct Word final : Waiter {
    explicit Word(const std::atomic<int>& at) : word(at) { slice = std::chrono::seconds(5); }
    bool ready() override { return word != 0; }
    const std::atomic<int>& word;
  };
  void SetUp() override { ASSERT_TRUE(waits_.prepare().ok()); }
  bool wait(const std::atomic<int>& word, std::int64_t timeout_ms) {
    Word waiter(word);
    Lock lock = waits_.lock();
    return waits_.wait(lock, waiter, Deadline::in_ms(timeout_ms));
  }
  void ring() { ASSERT_EQ(::send(bell_.theirs.get(), "", 1, 0), 1); }
  bool leader_sleeps() { return a_->client_sleep.sleeping.load() != 0; }

  void note_end_locked() override {}
  void look_at_socket() noexcept override { ++looks_; }
  void probe() override { ++probes_; }

  std::unique_ptr<abi::SegmentA> a_ = std::make_unique<abi::SegmentA>();
  SocketPair bell_;
  SocketPair socket_;
  std::atomic<int> word_{0};
  std::atomic<int> looks_{0};
  std::atomic<int> probes_{0};
  Waits waits_{*a_, bell_.ours, socket_.ours, *this};
};

TEST_F(WaitsTest, WhatIsThereNeedsNoSleep) {
  word_ = 1;
  EXPECT_TRUE(wait(word_, 0));
  EXPECT_EQ(probes_, 0);
}

TEST_F(WaitsTest, ADeadlineThatHasPassedAsksForTheDaemon) {
  EXPECT_FALSE(wait(word_, 0));
  EXPECT_EQ(probes_, 1);
  EXPECT_FALSE(wait(word_, 20));
}

TEST_F(WaitsTest, TheLeaderSleepsUntilTheBellRings) {
  auto waited = std::async(std::launch::async, [this] { return wait(word_, 60'000); });
  ASSERT_TRUE(soon([this] { return leader_sleeps(); }));
  word_ = 1;
  ring();
  EXPECT_EQ(waited.wait_for(std::chrono::seconds(3)), std::future_status::ready)
      << "before its slice is over";
  EXPECT_TRUE(waited.get());
  EXPECT_FALSE(leader_sleeps());
}

TEST_F(WaitsTest, AKickMakesTheLeaderLookUp) {
  std::atomic<int> other{0};
  auto waited = std::async(std::launch::async, [&] { return wait(other, 60'000); });
  ASSERT_TRUE(soon([this] { return leader_sleeps(); }));
  other = 1;
  waits_.kick();
  EXPECT_EQ(waited.wait_for(std::chrono::seconds(3)), std::future_status::ready);
  EXPECT_TRUE(waited.get());
}

// One leads; the other is woken by it, and leads when it has gone.
TEST_F(WaitsTest, AFollowerTakesTheLead) {
  std::atomic<int> other{0};
  auto first = std::async(std::launch::async, [&] { return wait(other, 60'000); });
  ASSERT_TRUE(soon([this] { return leader_sleeps(); }));
  auto second = std::async(std::launch::async, [this] { return wait(word_, 60'000); });
  std::this_thread::sleep_for(milliseconds(20));
  other = 1;
  waits_.kick();
  EXPECT_TRUE(first.get());
  ASSERT_TRUE(soon([this] { return leader_sleeps(); }));
  word_ = 1;
  ring();
  EXPECT_EQ(second.wait_for(std::chrono::seconds(3)), std::future_status::ready);
  EXPECT_TRUE(second.get());
}

TEST_F(WaitsTest, TheLeaderReadsTheSocket) {
  auto waited = std::async(std::launch::async, [this] { return wait(word_, 60'000); });
  ASSERT_TRUE(soon([this] { return leader_sleeps(); }));
  ASSERT_EQ(::send(socket_.theirs.get(), "", 1, 0), 1);
  EXPECT_TRUE(soon([this] { return looks_ > 0; }));
  word_ = 1;
  ring();
  EXPECT_TRUE(waited.get());
}

// ---- the connection ---------------------------------------------------------------------------------

class ConnectionTest : public WaitsTest, protected ConnectionEvents {
 protected:
  void note_end_locked() override { connection_.note_end_locked(); }
  void look_at_socket() noexcept override { connection_.look_at_socket(); }
  void on_end_locked() override { ++ends_; }
  void on_late_join_locked() override {}

  std::unique_ptr<abi::SegmentB> b_ = std::make_unique<abi::SegmentB>();
  std::atomic<int> ends_{0};
  Connection connection_{socket_.ours, *b_, waits_, *this};
};

TEST_F(ConnectionTest, TheEndsReasonIsSegmentBs) {
  abi::set_text(b_->message, "the operator said so", 20);
  b_->end_status = static_cast<std::uint32_t>(StatusCode::kPermissionDenied);
  b_->state = static_cast<std::uint32_t>(abi::SessionState::kEnded);
  const Lock lock = waits_.lock();
  connection_.note_end_locked();
  EXPECT_EQ(connection_.ended().code(), StatusCode::kPermissionDenied);
  EXPECT_EQ(connection_.ended().message(), "the operator said so");
  EXPECT_EQ(ends_, 1);
}

TEST_F(ConnectionTest, WhoIsRefusedHearsOfTheDaemonsEnd) {
  Lock lock = waits_.lock();
  EXPECT_EQ(connection_.blocked(lock, "full").code(), StatusCode::kWouldBlock);
  socket_.theirs.reset();
  std::this_thread::sleep_for(milliseconds(2));  // it is asked once a millisecond
  EXPECT_EQ(connection_.blocked(lock, "full").code(), StatusCode::kDaemonLost);
}

// ---- the engine's bell --------------------------------------------------------------------------------

TEST(HostMediumTest, OnlyASleepingEngineIsWoken) {
  const auto b = std::make_unique<abi::SegmentB>();
  const SocketPair bell;
  HostMedium medium(*b, bell.ours);
  EXPECT_TRUE(medium.ring(0).ok());
  EXPECT_EQ(bell.arrived(), 0);
  b->engine_sleep.sleeping = abi::kAsleep;
  EXPECT_TRUE(medium.ring(0).ok());
  EXPECT_EQ(bell.arrived(), 1);
}

// ---- hooks ------------------------------------------------------------------------------------------

class HooksTest : public WaitsTest, protected HookSource {
 protected:
  void TearDown() override { hooks_.stop(); }
  bool take_hooked_locked() override { return polls_; }
  bool awaits_packets_locked() const override { return false; }
  void look_at_device() override { ++device_looks_; }
  void finish_outputs(const HookCall& /*call*/) override {}
  std::list<HookCall> call(int value) {
    std::list<HookCall> one(1);
    one.front().group = &group_;
    one.front().hook = [](const epd_result_t* result, void* user) {
      static_cast<HooksTest*>(user)->ran_ += static_cast<int>(result->op_index);
    };
    one.front().user = this;
    one.front().result.op_index = static_cast<std::uint64_t>(value);
    return one;
  }

  Group group_{nullptr, abi::GroupShape{1, 1, 1, 128, 1, 1, {}, {}, {}}};
  std::atomic<bool> polls_{false};
  std::atomic<int> ran_{0};
  std::atomic<int> device_looks_{0};
  Hooks hooks_{waits_, *this};
};

TEST_F(HooksTest, AnExpectedOneIsCalledWhenItsOperationHasEnded) {
  {
    const Lock lock = waits_.lock();
    ASSERT_TRUE(hooks_.start_locked().ok());
    polls_ = true;
    hooks_.expect_locked();
  }
  EXPECT_TRUE(soon([this] { return device_looks_ > 1; })) << "while it waits";
  EXPECT_EQ(ran_, 0);
  {
    const Lock lock = waits_.lock();
    auto ready = call(4);
    hooks_.ready_locked(ready);
    hooks_.look_up_locked();
  }
  EXPECT_TRUE(soon([this] { return ran_ == 4; }));
}

// ---- texts -----------------------------------------------------------------------------------------

// Without a coordinator it said that the engine was stopped.
TEST(TicketStatus, WhoDoesNotAnswerDependsOnTheSpan) {
  const Status near = not_yet(7, EPD_FOREVER, "has not completed", abi::Span::kNode);
  EXPECT_NE(near.message().find("its engine does not answer"), std::string::npos) << near.message();
  EXPECT_EQ(near.message().find("coordinator"), std::string::npos) << near.message();
  const Status far = not_yet(7, EPD_FOREVER, "has not completed", abi::Span::kCluster);
  EXPECT_NE(far.message().find("or the cluster's coordinator"), std::string::npos) << far.message();
}

TEST(GroupMapped, CountsWhatBecomesOfRows) {
  using abi::RowsAre;
  GroupMapped mapped;
  const Allocation in{0x10000, 4096, 1, {7}};
  const auto find = [&](std::uintptr_t at, std::uint64_t bytes, const Allocation& where) {
    return mapped.find({reinterpret_cast<const void*>(at), bytes, false}, where, nullptr);  // NOLINT
  };
  const auto times = [&](RowsAre rows) {
    find(0x10000, 64, {});  // so that something has been counted
    return mapped.take_counts()->at(static_cast<std::size_t>(rows));
  };
  EXPECT_FALSE(mapped.wants(in, false));
  EXPECT_EQ(find(0x10000, 64, in), 0u);
  EXPECT_EQ(times(RowsAre::kFirstCalls), 1u);
  EXPECT_EQ(times(RowsAre::kNotMappable), 2u);
  EXPECT_FALSE(mapped.wants(in, false));
  EXPECT_TRUE(mapped.wants(in, false));
  mapped.refuse(in, RowsAre::kLimit);
  EXPECT_EQ(find(0x10000, 64, in), 0u);
  EXPECT_EQ(times(RowsAre::kLimit), 1u);
  for (std::int32_t i = 1; i < GroupMapped::kAgainAfter; ++i) EXPECT_FALSE(mapped.wants(in, false));
  EXPECT_TRUE(mapped.wants(in, false));
  const std::optional<abi::MemoryRange> range = mapped.claim({in, in.begin, in.bytes}, false);
  ASSERT_TRUE(range);
  EXPECT_EQ(range->id, 7u);
  mapped.end_claim(*range, true);
  EXPECT_NE(find(0x10010, 4080, in), 0u);
  EXPECT_EQ(find(0x10010, 4081, in), 0u);
  EXPECT_EQ(find(0x10008, 64, in), 0u);
  EXPECT_EQ(find(0x10000, 64, {in.begin, in.bytes, 1, {8}}), 0u) << "another allocation at the same address";
  EXPECT_EQ(times(RowsAre::kInPlace), 1u);
  EXPECT_EQ(times(RowsAre::kNoRoom), 1u);
  EXPECT_EQ(times(RowsAre::kUnaligned), 1u);
  EXPECT_EQ(times(RowsAre::kFirstCalls), 2u);
  const Allocation other{0x20000, 64, 1, {9}};
  mapped.refuse(other, RowsAre::kNotMappable);
  EXPECT_FALSE(mapped.wants(other, true));
}

// Rows in some pieces of a mapped allocation lie in mapped memory, if those pieces are still the same.
TEST(GroupMapped, PiecesAreComparedOneByOne) {
  constexpr std::uint64_t kPiece = 4096;
  GroupMapped mapped;
  const Allocation all{0x10000, 4 * kPiece, 4, {1, 2, 3, 4}};
  mapped.end_claim(*mapped.claim({all, all.begin, all.bytes}, true), true);
  const auto find = [&](std::uint64_t offset, std::uint64_t bytes, const Allocation& where) {
    return mapped.find({reinterpret_cast<const void*>(all.begin + offset), bytes, true}, where,
                       nullptr);  // NOLINT
  };
  const Allocation middle{all.begin + kPiece, 2 * kPiece, 2, {2, 3}};
  const Allocation renewed{all.begin + kPiece, 2 * kPiece, 2, {2, 9}};
  EXPECT_NE(find(kPiece + 64, 2 * kPiece - 64, middle), 0u);
  EXPECT_NE(find(kPiece, 16, renewed), 0u) << "its piece is the same";
  EXPECT_EQ(find(kPiece, kPiece + 1, renewed), 0u);
  EXPECT_EQ(find(2 * kPiece, 16, renewed), 0u);
  EXPECT_EQ(find(kPiece, 16, {all.begin + kPiece, kPiece / 2, 1, {2}}), 0u) << "pieces of another size";
  EXPECT_FALSE(mapped.wants(middle, true));
  EXPECT_TRUE(mapped.wants(renewed, true));
  EXPECT_TRUE(mapped.replaced_by(middle).empty());
  EXPECT_EQ(mapped.replaced_by(renewed).size(), 1u);
}

}  // namespace
}  // namespace epd::client
