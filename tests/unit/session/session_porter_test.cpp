// The porter of an attach socket: what it brings, and what never comes in.
#include "porter.h"

#include "common/memory.h"
#include "proto/attach.h"
#include "support/census.h"
#include "support/send_descriptors.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>
#include <optional>
#include <thread>

namespace epd::session {
namespace {

using test::count_own_fds;

// Runs a porter in this process's table, where the test can count.
class PorterTest : public testing::Test {
 protected:
  void SetUp() override {
    auto outer = make_socketpair();
    auto inner = make_socketpair();
    ASSERT_TRUE(outer.ok() && inner.ok());
    peer_ = std::move(outer->first);
    loop_ = std::move(inner->first);
    peer_end_ = std::move(outer->second);
    loop_end_ = std::move(inner->second);
    process_ = make_eventfd().value();
    thread_ = std::thread([this] {
      carry_packets({peer_end_.get(), loop_end_.get(), process_.get()});
      loop_end_.reset();
      peer_end_.reset();
    });
  }
  void TearDown() override {
    loop_.reset();
    if (thread_.joinable()) thread_.join();
  }

  void send(const FdList& fds = {}) const {
    const std::uint64_t body = 5;
    constexpr auto kType = static_cast<std::uint16_t>(abi::AttachType::kMapMemory);
    ASSERT_TRUE(send_packet(peer_.get(), kType, 9, &body, sizeof(body), fds).ok());
  }
  ReceiveResult take(Packet& packet, Carried& carried) const {
    pollfd entry{loop_.get(), POLLIN, 0};
    EXPECT_EQ(::poll(&entry, 1, 5000), 1);
    Status error;
    return receive_prefixed(loop_.get(), packet, error, {&carried, sizeof(carried)});
  }
  ReceiveResult answer(Packet& packet) const {
    pollfd entry{peer_.get(), POLLIN, 0};
    EXPECT_EQ(::poll(&entry, 1, 5000), 1);
    Status error;
    return receive_packet(peer_.get(), packet, error);
  }
  void admit() const { ASSERT_TRUE(order(loop_.get(), PorterOrder::kAdmit).ok()); }

  UniqueFd peer_, loop_, peer_end_, loop_end_, process_;
  std::thread thread_;
};

TEST_F(PorterTest, NothingIsReceivedBeforeItIsAdmitted) {
  send();
  pollfd entry{loop_.get(), POLLIN, 0};
  EXPECT_EQ(::poll(&entry, 1, 50), 0);
  admit();
  Packet packet;
  Carried carried;
  ASSERT_EQ(take(packet, carried), ReceiveResult::kPacket);
  EXPECT_EQ(packet.header.request_id, 9u);
  EXPECT_EQ(packet.read<std::uint64_t>().value(), 5u);
  EXPECT_EQ(carried.num_fds, 0u);
  EXPECT_EQ(carried.not_memory, -1);
}

TEST_F(PorterTest, MemoryComesAlongAndWhatIsNoneDoesNot) {
  admit();
  const UniqueFd memory = make_sealed_memfd("memory", 4096).value();
  int ends[2];
  ASSERT_EQ(::pipe2(ends, O_CLOEXEC), 0);
  const UniqueFd reader(ends[0]);
  const UniqueFd writer(ends[1]);
  const UniqueFd file(::open("/proc/self/exe", O_RDONLY | O_CLOEXEC));
  const UniqueFd null(::open("/dev/null", O_RDWR | O_CLOEXEC));
  // The last close of one takes a lock that its maker may hold: what epoll can watch never comes in.
  const UniqueFd event = make_eventfd().value();
  const UniqueFd epoll(::epoll_create1(EPOLL_CLOEXEC));
  const std::size_t before = count_own_fds();
  Packet packet;
  Carried carried;
  send({memory.get(), memory.get()});
  ASSERT_EQ(take(packet, carried), ReceiveResult::kPacket);
  ASSERT_EQ(packet.fds.size(), 2u);
  EXPECT_EQ(sealed_size(packet.fds[1].get()).value(), 4096u);
  EXPECT_NE(::fcntl(packet.fds[0].get(), F_GETFD) & FD_CLOEXEC, 0);
  for (const int bad :
       {reader.get(), writer.get(), peer_.get(), file.get(), null.get(), event.get(), epoll.get()}) {
    send({memory.get(), bad, memory.get()});
    ASSERT_EQ(take(packet, carried), ReceiveResult::kPacket);
    EXPECT_EQ(carried.num_fds, 3u);
    EXPECT_EQ(carried.not_memory, 1);
    EXPECT_TRUE(packet.fds.empty());
  }
  packet.fds.clear();
  // In this test's table, where the porter has none of its own.
  EXPECT_EQ(count_own_fds(), before + 7 * 3);
}

TEST_F(PorterTest, OnlyAJoinBringsMemory) {
  admit();
  const UniqueFd memory = make_sealed_memfd("memory", 4096).value();
  ASSERT_TRUE(send_packet(peer_.get(), 1, 9, "Hello", 5, {memory.get()}).ok());
  Packet packet;
  Carried carried;
  ASSERT_EQ(take(packet, carried), ReceiveResult::kPacket);
  EXPECT_EQ(carried.num_fds, 1u);
  EXPECT_TRUE(packet.fds.empty());
}

TEST_F(PorterTest, AConnectionMayBringFewThatAreNoMemory) {
  admit();
  const UniqueFd event = make_eventfd().value();
  Packet packet;
  Carried carried;
  for (int i = 0; i < 256 / 16; ++i) {
    send(std::vector<int>(16, event.get()));
    ASSERT_EQ(take(packet, carried), ReceiveResult::kPacket);
    EXPECT_EQ(carried.too_many, 0u);
  }
  send({event.get()});
  ASSERT_EQ(take(packet, carried), ReceiveResult::kPacket);
  EXPECT_EQ(carried.too_many, 1u);
}

TEST_F(PorterTest, WhatAClientHasSaidBeforeItWentIsBroughtThoughItReadsNothing) {
  ASSERT_TRUE(send_packet(loop_.get(), 3, 1, "early", 5).ok());
  pollfd entry{peer_.get(), POLLIN, 0};
  ASSERT_EQ(::poll(&entry, 1, 5000), 1);
  for (int i = 0; i < 20; ++i) send();
  peer_.reset();  // the porter's next receive reports ECONNRESET
  admit();
  Packet packet;
  Carried carried;
  for (int i = 0; i < 20; ++i) ASSERT_EQ(take(packet, carried), ReceiveResult::kPacket) << i;
  EXPECT_EQ(take(packet, carried), ReceiveResult::kClosed);
}

TEST_F(PorterTest, WhatAPorterHasBroughtIsReadThoughItHasLeftAnAnswerUnread) {
  admit();
  for (int i = 0; i < 20; ++i) send();
  peer_.reset();
  (void)send_packet(loop_.get(), 3, 1, "late", 4);  // the porter may have gone by now
  Packet packet;
  Carried carried;
  for (int i = 0; i < 20; ++i) ASSERT_EQ(take(packet, carried), ReceiveResult::kPacket) << i;
  EXPECT_EQ(take(packet, carried), ReceiveResult::kClosed);
}

TEST_F(PorterTest, ACountThatIsNotTheHeadersAndAPacketTooLongAreTold) {
  admit();
  const UniqueFd memory = make_sealed_memfd("memory", 4096).value();
  const abi::WireHeader header{abi::kWireMagic, 4, 3, sizeof(header), 9};
  ASSERT_GT(test::send_descriptors(peer_.get(), &header, sizeof(header), {memory.get()}), 0);
  Packet packet;
  Carried carried;
  ASSERT_EQ(take(packet, carried), ReceiveResult::kPacket);
  EXPECT_EQ(packet.header.num_fds, 3u);
  EXPECT_EQ(carried.num_fds, 1u);
  EXPECT_TRUE(packet.fds.empty());
  const std::vector<char> longer(5000, 'x');
  ASSERT_EQ(::send(peer_.get(), longer.data(), longer.size(), 0), 5000);
  EXPECT_EQ(take(packet, carried), ReceiveResult::kMalformed);
  EXPECT_EQ(carried.truncated, 1u);
}

// The doorbells, with the ends that the client and the engine have.
class BellsTest : public PorterTest {
 protected:
  void SetUp() override {
    PorterTest::SetUp();
    auto engine_bell = make_socketpair();
    auto client_bell = make_socketpair();
    ASSERT_TRUE(engine_bell.ok() && client_bell.ok());
    rings_engine_ = std::move(engine_bell->first);
    is_rung_ = std::move(client_bell->first);
    engine_ = make_eventfd().value();
    ring_client_ = make_eventfd().value();
    ASSERT_TRUE(order(loop_.get(), PorterOrder::kRing).ok());  // none yet: nothing happens
    ASSERT_TRUE(
        order(loop_.get(), PorterOrder::kTakeBells,
              {engine_bell->second.get(), client_bell->second.get(), engine_.get(), ring_client_.get()})
            .ok());
  }
  bool engine_is_rung(int timeout_ms = 5000) const {
    pollfd entry{engine_.get(), POLLIN, 0};
    std::uint64_t rings;
    return ::poll(&entry, 1, timeout_ms) == 1 && ::read(engine_.get(), &rings, sizeof(rings)) > 0;
  }
  bool client_is_rung() const {
    pollfd entry{is_rung_.get(), POLLIN, 0};
    char byte;
    return ::poll(&entry, 1, 5000) == 1 && ::recv(is_rung_.get(), &byte, 1, MSG_DONTWAIT) == 1;
  }

  UniqueFd rings_engine_, is_rung_, engine_, ring_client_;
};

TEST_F(BellsTest, EachRingIsPassedOn) {
  for (int i = 0; i < 1000; ++i) {
    ring_socket(rings_engine_.get());
    ASSERT_TRUE(engine_is_rung()) << i;
    ring_eventfd(ring_client_.get());
    ASSERT_TRUE(client_is_rung()) << i;
  }
  ASSERT_TRUE(order(loop_.get(), PorterOrder::kRing).ok());
  EXPECT_TRUE(client_is_rung());
}

TEST_F(BellsTest, RingsWithoutEndArePassedOnAsFew) {
  while (::send(rings_engine_.get(), "x", 1, MSG_DONTWAIT) == 1) {
  }
  EXPECT_TRUE(engine_is_rung());
}

TEST_F(BellsTest, OneThatBringsDescriptorsRingsNoMoreAndTheOtherDoes) {
  ASSERT_EQ(test::send_descriptors(rings_engine_.get(), "x", 1, {is_rung_.get()}), 1);
  EXPECT_TRUE(engine_is_rung());
  ring_socket(rings_engine_.get());
  EXPECT_FALSE(engine_is_rung(50));
  ring_eventfd(ring_client_.get());
  EXPECT_TRUE(client_is_rung());
}

TEST_F(BellsTest, OneThatIsClosedIsLeftAlone) {
  rings_engine_.reset();
  EXPECT_TRUE(engine_is_rung());
  EXPECT_FALSE(engine_is_rung(50)) << "it rings without end";
  ring_eventfd(ring_client_.get());
  EXPECT_TRUE(client_is_rung());
}

TEST_F(PorterTest, LastWordsAreReadBeforeTheEnd) {
  send();  // never received: else the peer would get ECONNRESET in place of the words
  send();
  ASSERT_TRUE(send_packet(loop_.get(), 3, 1, "last", 4).ok());
  loop_.reset();
  thread_.join();
  Packet packet;
  EXPECT_EQ(answer(packet), ReceiveResult::kPacket);
  EXPECT_EQ(packet.header.type, 3u);
  EXPECT_EQ(answer(packet), ReceiveResult::kClosed);
}

TEST_F(PorterTest, APeerThatDoesNotReadHoldsUpNoEnd) {
  const std::vector<char> body(1000);
  Status sent;
  for (int i = 0; i < 10'000 && sent.ok(); ++i)
    sent = send_packet(loop_.get(), 3, 1, body.data(), body.size());
  EXPECT_EQ(sent.code(), StatusCode::kWouldBlock);
  loop_.reset();
  thread_.join();
}

TEST_F(PorterTest, WhatADeadProcessHasSaidStillCounts) {
  admit();
  send();
  send();
  ring_eventfd(process_.get());
  Packet packet;
  Carried carried;
  EXPECT_EQ(take(packet, carried), ReceiveResult::kPacket);
  EXPECT_EQ(take(packet, carried), ReceiveResult::kPacket);
  EXPECT_EQ(take(packet, carried), ReceiveResult::kClosed);
}

}  // namespace
}  // namespace epd::session
