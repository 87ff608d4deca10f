// The gate: what the loop has of a connection, and what it never has. The closer; the budget of descriptors.
#include "base/gate.h"
#include "base/closer.h"
#include "base/own_table.h"
#include "base/quota.h"
#include "common/memory.h"
#include "support/census.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <functional>
#include <iterator>
#include <thread>

namespace epd {
namespace {

using test::count_own_fds;

bool eventually(const std::function<bool()>& done) {
  for (int i = 0; i < 5000 && !done(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return done();
}

std::size_t count_threads() {
  const std::filesystem::directory_iterator tasks("/proc/self/task");
  return static_cast<std::size_t>(std::distance(begin(tasks), end(tasks)));
}

bool readable(int fd, int timeout_ms = 5000) {
  pollfd entry{fd, POLLIN, 0};
  return ::poll(&entry, 1, timeout_ms) == 1;
}

// Sends what it gets back, to either side, until one of them ends.
void echo(const Doorstep& at) {
  for (;;) {
    pollfd entries[2] = {{at.peer, POLLIN, 0}, {at.inner, POLLIN, 0}};
    own_table::poll(entries, 2, -1);
    for (const pollfd& entry : entries) {
      if (entry.revents == 0) continue;
      char bytes[64];
      iovec part{bytes, sizeof(bytes)};
      msghdr message{};
      message.msg_iov = &part;
      message.msg_iovlen = 1;
      const long n = own_table::receive(entry.fd, message, MSG_DONTWAIT);
      if (n <= 0) return;
      part.iov_len = static_cast<std::size_t>(n);
      own_table::send(entry.fd == at.peer ? at.inner : at.peer, message, MSG_DONTWAIT);
    }
  }
}

class GateTest : public testing::Test {
 protected:
  void open(Gate::MakePorter make, Gate::Limits limits = {}, Gate::LastWords last_words = {}) {
    // In no file system: the kernel chooses the name.
    UniqueFd listener(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    sockaddr_un any{};
    any.sun_family = AF_UNIX;
    ASSERT_EQ(::bind(listener.get(), reinterpret_cast<sockaddr*>(&any), sizeof(sa_family_t)), 0);
    ASSERT_EQ(::listen(listener.get(), 16), 0);
    length_ = sizeof(address_);
    ASSERT_EQ(::getsockname(listener.get(), reinterpret_cast<sockaddr*>(&address_), &length_), 0);
    Result<std::unique_ptr<Gate>> gate =
        Gate::open(std::move(listener), std::move(make), limits, std::move(last_words));
    ASSERT_TRUE(gate.ok()) << gate.status().to_string();
    gate_ = std::move(*gate);
  }
  UniqueFd connect() const {
    UniqueFd socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    if (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address_), length_) != 0) socket.reset();
    return socket;
  }
  Gate::Arrival take() const {
    EXPECT_TRUE(readable(gate_->poll_fd()));
    std::optional<Gate::Arrival> arrival = gate_->take();
    EXPECT_TRUE(arrival.has_value());
    return arrival ? std::move(*arrival) : Gate::Arrival();
  }

  sockaddr_un address_{};
  socklen_t length_ = 0;
  std::unique_ptr<Gate> gate_;
};

TEST_F(GateTest, TheLoopHasOneEndOfAnInnerPairAndNoSocketOfThePeers) {
  open([](std::uint64_t, const PeerIdentity&) -> Porter { return echo; });
  EXPECT_FALSE(gate_->take().has_value());
  const std::size_t before = count_own_fds();
  const UniqueFd peer = connect();
  Gate::Arrival arrival = take();
  EXPECT_EQ(arrival.peer.pid, ::getpid());
  EXPECT_EQ(arrival.peer.uid, ::getuid());
  EXPECT_EQ(count_own_fds(), before + 1 + (arrival.peer.pidfd.valid() ? 2 : 1));
  EXPECT_NE(::fcntl(arrival.socket.get(), F_GETFD) & FD_CLOEXEC, 0);
  ASSERT_EQ(::send(peer.get(), "in", 2, 0), 2);
  char bytes[8];
  ASSERT_TRUE(readable(arrival.socket.get()));
  EXPECT_EQ(::recv(arrival.socket.get(), bytes, sizeof(bytes), 0), 2);
  ASSERT_EQ(::send(arrival.socket.get(), "out", 3, 0), 3);
  ASSERT_TRUE(readable(peer.get()));
  EXPECT_EQ(::recv(peer.get(), bytes, sizeof(bytes), 0), 3);
}

TEST_F(GateTest, AConnectionEndsWithItsInnerSocketAndItsPorterIsForgotten) {
  open([](std::uint64_t, const PeerIdentity&) -> Porter { return echo; });
  const UniqueFd peer = connect();
  const UniqueFd other = connect();
  Gate::Arrival first = take();
  const Gate::Arrival second = take();
  EXPECT_NE(first.number, second.number);
  EXPECT_EQ(gate_->porters({}), 2u);
  EXPECT_EQ(gate_->porters(::getuid()), 2u);
  EXPECT_EQ(gate_->porters(::getuid() + 1), 0u);
  first.socket.reset();
  ASSERT_TRUE(readable(peer.get()));
  char byte;
  EXPECT_EQ(::recv(peer.get(), &byte, 1, 0), 0);
  EXPECT_TRUE(eventually([&] { return gate_->porters({}) == 1; }));
  EXPECT_FALSE(readable(other.get(), 0));
}

TEST_F(GateTest, WhoHasGoneBeforeHeIsTakenInIsStillKnown) {
  open([](std::uint64_t, const PeerIdentity&) -> Porter { return [](const Doorstep&) {}; });
  constexpr std::size_t kMany = 12;
  for (std::size_t i = 0; i < kMany; ++i) (void)connect();
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  const UniqueFd last = connect();
  EXPECT_EQ(gate_->porters({}), 0u) << "none has been taken";
  for (std::size_t i = 0; i <= kMany; ++i) {
    const Gate::Arrival arrival = take();
    EXPECT_EQ(arrival.peer.pid, ::getpid());
    EXPECT_EQ(arrival.peer.gid, ::getgid());
    EXPECT_TRUE(arrival.socket.valid());
  }
  EXPECT_TRUE(eventually([&] { return gate_->porters({}) == 0; }));
}

// A porter that is stopped is counted, and holds up nobody.
TEST_F(GateTest, APorterThatStandsStillIsCountedAndOthersComeIn) {
  const auto may_go = std::make_shared<std::atomic<bool>>(false);
  open([may_go](std::uint64_t number, const PeerIdentity&) -> Porter {
    if (number != 1) return echo;
    return [may_go](const Doorstep&) { may_go->wait(false); };
  });
  UniqueFd stuck = connect();
  Gate::Arrival arrival = take();
  arrival.socket.reset();
  stuck.reset();
  for (int i = 0; i < 20; ++i) {
    const UniqueFd peer = connect();
    const Gate::Arrival next = take();
    ASSERT_EQ(::send(peer.get(), "in", 2, 0), 2);
    ASSERT_TRUE(readable(next.socket.get()));
  }
  EXPECT_TRUE(eventually([&] { return gate_->porters({}) == 1; }));
  may_go->store(true);
  may_go->notify_all();
  EXPECT_TRUE(eventually([&] { return gate_->porters({}) == 0; }));
}

// As many as a peer likes, and none of its porters ends: what is more has no thread.
TEST_F(GateTest, AConnectionTooManyIsToldSoAndEndedWithoutAThreadOfItsOwn) {
  const auto may_go = std::make_shared<std::atomic<bool>>(false);
  const auto words = [](const Status& why) {
    std::vector<std::byte> bytes(why.message().size());
    std::memcpy(bytes.data(), why.message().data(), bytes.size());
    return bytes;
  };
  constexpr std::size_t kAllowed = 5;
  open([may_go](std::uint64_t,
                const PeerIdentity&) -> Porter { return [may_go](const Doorstep&) { may_go->wait(false); }; },
       {kAllowed, kAllowed}, words);
  std::vector<UniqueFd> peers;
  for (std::size_t i = 0; i < kAllowed; ++i) {
    peers.push_back(connect());
    (void)take();
  }
  std::vector<UniqueFd> more;
  for (int i = 0; i < 500; ++i) {
    more.push_back(connect());
    ASSERT_TRUE(more.back().valid());
    EXPECT_LE(count_threads(), kAllowed + 6) << i;
  }
  for (const UniqueFd& peer : more) {
    char text[200] = {};
    ASSERT_TRUE(readable(peer.get()));
    ASSERT_GT(::recv(peer.get(), text, sizeof(text) - 1, 0), 0);
    EXPECT_NE(std::string(text).find("has 5 connections, open or still being closed; allowed: 5"),
              std::string::npos)
        << text;
    EXPECT_EQ(::recv(peer.get(), text, sizeof(text), 0), 0);
  }
  EXPECT_EQ(gate_->dismissed(), 500u);
  EXPECT_FALSE(gate_->take().has_value());
  may_go->store(true);
  may_go->notify_all();
  EXPECT_TRUE(eventually([&] { return gate_->porters({}) == 0; }));
  const UniqueFd next = connect();
  EXPECT_TRUE(take().socket.valid());
}

TEST_F(GateTest, ConnectionsOfOneAfterTheOtherDoNotAddUp) {
  open([](std::uint64_t, const PeerIdentity&) -> Porter { return echo; });
  std::size_t most = 0;
  for (int i = 0; i < 2000; ++i) {
    const UniqueFd peer = connect();
    take().socket.reset();
    char byte;
    ASSERT_EQ(::recv(peer.get(), &byte, 1, 0), 0) << "its porter has ended";
    most = std::max(most, gate_->porters({}));
  }
  EXPECT_LE(most, 32u);
}

TEST_F(GateTest, WhatAPorterThrowsEndsItsConnection) {
  open([](std::uint64_t, const PeerIdentity&) -> Porter {
    return [](const Doorstep&) { throw std::bad_alloc(); };
  });
  const UniqueFd peer = connect();
  const Gate::Arrival arrival = take();
  ASSERT_TRUE(readable(peer.get()));
  ASSERT_TRUE(readable(arrival.socket.get()));
  char byte;
  EXPECT_EQ(::recv(arrival.socket.get(), &byte, 1, 0), 0);
}

TEST_F(GateTest, NobodyIsAcceptedAfterItsEndAndWhoIsThereStays) {
  open([](std::uint64_t, const PeerIdentity&) -> Porter { return echo; });
  const UniqueFd peer = connect();
  const Gate::Arrival arrival = take();
  gate_.reset();
  EXPECT_TRUE(eventually([&] { return !connect().valid(); }));
  ASSERT_EQ(::send(peer.get(), "in", 2, 0), 2);
  EXPECT_TRUE(readable(arrival.socket.get()));
}

TEST(OwnTable, AThreadHasWhatItKeepsAndItsEndClosesNothingOfOthers) {
  int ends[2];
  ASSERT_EQ(::pipe2(ends, O_CLOEXEC), 0);
  const UniqueFd reader(ends[0]);
  UniqueFd writer(ends[1]);
  bool left = false;
  bool has_reader = true;
  std::thread([&] {
    left = own_table::leave(std::array{-1, writer.get()});
    has_reader = ::fcntl(reader.get(), F_GETFD) >= 0;
    own_table::close(writer.get());
  }).join();
  EXPECT_TRUE(left);
  EXPECT_FALSE(has_reader);
  EXPECT_FALSE(readable(reader.get(), 0)) << "the writer is still open here";
  writer.reset();
  EXPECT_TRUE(readable(reader.get()));
}

TEST(CloserTest, TheLastReferenceIsClosedElsewhereAndSoon) {
  Closer closer;
  const std::size_t before = count_own_fds();
  for (int i = 0; i < 200; ++i) {
    int ends[2];
    ASSERT_EQ(::pipe2(ends, O_CLOEXEC), 0);
    const UniqueFd reader(ends[0]);
    closer.close(UniqueFd(ends[1]));
    ASSERT_TRUE(readable(reader.get()));
  }
  EXPECT_TRUE(eventually([&] { return closer.idle(); }));
  EXPECT_EQ(count_own_fds(), before);
  closer.close(UniqueFd());
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
