// The airlock: descriptors of peers that are received and closed outside of this process's table; and the
// budget of descriptors.
#include "base/airlock.h"
#include "base/descriptors.h"
#include "base/memory.h"
#include "support/census.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>
#include <chrono>
#include <functional>
#include <thread>

namespace epd {
namespace {

using test::count_own_fds;

constexpr std::uint32_t kUid = 7;

class AirlockTest : public testing::Test {
 protected:
  void SetUp() override {
    Result<std::unique_ptr<Airlock>> made = Airlock::create();
    ASSERT_TRUE(made.ok()) << made.status().to_string();
    airlock_ = std::move(*made);
    auto pair = make_socketpair();
    ASSERT_TRUE(pair.ok());
    here_ = std::move(pair->first);
    there_ = std::move(pair->second);
  }

  void send(const FdList& fds) const {
    const std::uint64_t body = 5;
    ASSERT_TRUE(send_packet(there_.get(), 4, 9, &body, sizeof(body), fds).ok());
  }

  PeerResult look(Packet& packet) const {
    Status error;
    return receive_from_peer(here_.get(), packet, error);
  }

  bool flushed(const std::function<bool()>& done) const {
    for (int i = 0; i < 5000 && !done(); ++i) {
      airlock_->flush();
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return done();
  }

  std::unique_ptr<Airlock> airlock_;
  UniqueFd here_, there_;
};

TEST_F(AirlockTest, APacketWithDescriptorsStaysInTheSocketUntilItIsAskedFor) {
  UniqueFd memory = make_sealed_memfd("memory", 4096).value();
  send({memory.get(), memory.get()});
  const std::size_t before = count_own_fds();
  Packet packet;
  for (int i = 0; i < 3; ++i) {
    ASSERT_EQ(look(packet), PeerResult::kDescriptors);
    EXPECT_EQ(packet.header.num_fds, 2u);
    EXPECT_EQ(packet.read<std::uint64_t>().value(), 5u);
    EXPECT_EQ(count_own_fds(), before);
  }
  const Airlock::Received received = airlock_->receive(here_.get(), kUid, packet);
  ASSERT_TRUE(received.status.ok()) << received.status.to_string();
  ASSERT_EQ(packet.fds.size(), 2u);
  EXPECT_EQ(sealed_size(packet.fds[1].get()).value(), 4096u);
  EXPECT_NE(::fcntl(packet.fds[0].get(), F_GETFD) & FD_CLOEXEC, 0);
  EXPECT_EQ(look(packet), PeerResult::kNothing);
  packet.fds.clear();
  EXPECT_EQ(count_own_fds(), before);
}

TEST_F(AirlockTest, WhatIsNoMemoryNeverComesIn) {
  UniqueFd memory = make_sealed_memfd("memory", 4096).value();
  int ends[2];
  ASSERT_EQ(::pipe2(ends, O_CLOEXEC), 0);
  const UniqueFd reader(ends[0]);
  const UniqueFd writer(ends[1]);
  const UniqueFd file(::open("/proc/self/exe", O_RDONLY | O_CLOEXEC));
  const UniqueFd null(::open("/dev/null", O_RDWR | O_CLOEXEC));
  const std::size_t before = count_own_fds();
  for (const int bad : {reader.get(), writer.get(), there_.get(), file.get(), null.get()}) {
    send({memory.get(), bad, memory.get()});
    Packet packet;
    ASSERT_EQ(look(packet), PeerResult::kDescriptors);
    const Airlock::Received received = airlock_->receive(here_.get(), kUid, packet);
    EXPECT_EQ(received.status.code(), StatusCode::kInvalidArgument);
    ASSERT_TRUE(received.not_memory.has_value());
    EXPECT_EQ(*received.not_memory, 1u);
    EXPECT_TRUE(packet.fds.empty());
    EXPECT_EQ(count_own_fds(), before);
    EXPECT_EQ(look(packet), PeerResult::kNothing) << "it is off the queue";
  }
}

TEST_F(AirlockTest, ACountThatIsNotTheHeadersIsRefused) {
  UniqueFd memory = make_sealed_memfd("memory", 4096).value();
  send({memory.get(), memory.get()});
  Packet packet;
  ASSERT_EQ(look(packet), PeerResult::kDescriptors);
  packet.header.num_fds = 3;
  const std::size_t before = count_own_fds();
  const Airlock::Received received = airlock_->receive(here_.get(), kUid, packet);
  EXPECT_NE(received.status.message().find("says 3"), std::string::npos) << received.status.message();
  EXPECT_FALSE(received.not_memory.has_value());
  EXPECT_EQ(count_own_fds(), before);
}

TEST_F(AirlockTest, ClosesManyMoreThanOneThreadTakes) {
  const std::size_t before = count_own_fds();
  std::vector<UniqueFd> peers;
  for (std::size_t i = 0; i < 3 * Airlock::kSlots + 5; ++i) {
    auto pair = make_socketpair();
    ASSERT_TRUE(pair.ok());
    peers.push_back(std::move(pair->second));
    ASSERT_TRUE(send_packet(pair->first.get(), 1, 1, "last", 4).ok());
    airlock_->close_socket(std::move(pair->first));
  }
  // Shut down at once: last words, then the end.
  Packet packet;
  Status error;
  EXPECT_EQ(receive_packet(peers[0].get(), packet, error), ReceiveResult::kPacket);
  EXPECT_EQ(receive_packet(peers[0].get(), packet, error), ReceiveResult::kClosed);
  EXPECT_TRUE(flushed([&] { return airlock_->next_look_ms() == -1; }));
  EXPECT_EQ(airlock_->waiting(), 0u);
  peers.clear();
  EXPECT_EQ(count_own_fds(), before);
}

TEST_F(AirlockTest, TheLastReferenceIsTheClosers) {
  // The other end hears of the close only when nobody has a copy any more.
  int ends[2];
  ASSERT_EQ(::pipe2(ends, O_CLOEXEC), 0);
  const UniqueFd reader(ends[0]);
  airlock_->close(UniqueFd(ends[1]));
  pollfd entry{reader.get(), POLLIN, 0};
  EXPECT_EQ(::poll(&entry, 1, 0), 0);
  EXPECT_TRUE(flushed([&] { return ::poll(&entry, 1, 0) == 1; }));
  EXPECT_NE(entry.revents & POLLHUP, 0);
}

TEST_F(AirlockTest, PacketsWithoutDescriptorsAreReadOutAndOthersLeft) {
  UniqueFd memory = make_sealed_memfd("memory", 4096).value();
  send({});
  send({});
  send({memory.get()});
  send({});
  Airlock::read_out(here_.get());
  Packet packet;
  EXPECT_EQ(look(packet), PeerResult::kDescriptors);
}

TEST(DescriptorBudgetTest, OneUserHasHalfAndAllHaveWhatIsNotReserved) {
  DescriptorBudget budget(20'000);
  EXPECT_EQ(budget.allowed(), 20'000u - 1024);
  const std::uint64_t half = budget.allowed_per_user();
  Result<DescriptorShare> one = budget.take(1, half);
  ASSERT_TRUE(one.ok());
  const Status more = one->grow(1);
  EXPECT_EQ(more.code(), StatusCode::kResourceExhausted);
  for (const char* word : {"user 1", "RLIMIT_NOFILE", "20000", "1024"})
    EXPECT_NE(more.message().find(word), std::string::npos) << more.message();
  Result<DescriptorShare> two = budget.take(2, half - 10);
  ASSERT_TRUE(two.ok());
  const Status all = budget.take(3, 11).status();
  EXPECT_NE(all.message().find("clients hold"), std::string::npos) << all.message();
  EXPECT_TRUE(budget.take(3, 10).ok()) << "given back at once";
  EXPECT_TRUE(two->grow(10).ok());
  DescriptorShare moved = std::move(*one);
  EXPECT_EQ(budget.used(), 2 * half);
  moved = DescriptorShare();
  EXPECT_EQ(budget.used(), half);
  EXPECT_EQ(DescriptorBudget(100).allowed(), 0u);
}

}  // namespace
}  // namespace epd
