// The pace at which a node's bytes reach gRPC, in stepped time.
#include "base/clock.h"
#include "frames.h"
#include "gate.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <algorithm>
#include <array>
#include <optional>
#include <string>

namespace epd::cluster {
namespace {

constexpr std::uint64_t kNodeTimeoutMs = 2'000;  // the default

class ClusterGate : public testing::Test {
 protected:
  void SetUp() override {
    int pair[2];
    ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair), 0);
    node_.reset(pair[0]);
    connection_.reset(pair[1]);
    ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair), 0);
    grpc_.reset(pair[0]);
    gate_.emplace(clock_, connection_.get(), UniqueFd(pair[1]));
  }
  // The node sends as much as the socket takes.
  void send(std::size_t& left) {
    static const std::string bytes(64 << 10, 'x');
    while (left > 0) {
      const ssize_t n = ::send(node_.get(), bytes.data(), std::min(left, bytes.size()), MSG_NOSIGNAL);
      if (n < 0) return;
      left -= static_cast<std::size_t>(n);
    }
  }
  Gate::State carry() { return gate_->carry(0, Gate::kForFrame); }
  // gRPC reads the bytes that are there.
  std::size_t read() {
    std::array<char, 64 << 10> bytes;
    std::size_t size = 0;
    for (ssize_t n; (n = ::recv(grpc_.get(), bytes.data(), bytes.size(), 0)) > 0;)
      size += static_cast<std::size_t>(n);
    return size;
  }
  // The milliseconds in which so many bytes of the node come through, if gRPC reads once in `read_ms`.
  std::uint64_t carry_ms(std::size_t size, std::uint64_t read_ms) {
    std::size_t unsent = size;
    std::size_t came = 0;
    for (std::uint64_t ms = 0; ms < 60'000; ++ms, clock_.advance_ms(1)) {
      send(unsent);
      EXPECT_NE(carry(), Gate::State::kFlood);
      if (ms % read_ms == 0) came += read();
      if (came == size) return ms;
    }
    ADD_FAILURE() << came << " of " << size << " bytes have come";
    return 0;
  }

  ManualClock clock_;
  UniqueFd node_;
  UniqueFd connection_;
  UniqueFd grpc_;
  std::optional<Gate> gate_;
};

// It took half of node_timeout_ms at best, and its node was silent meanwhile.
TEST_F(ClusterGate, TheLargestFrameComesWithinAQuarterOfNodeTimeout) {
  const std::uint64_t ms = carry_ms(kMaxNodeFrameBytes, 1);
  EXPECT_LT(ms, kNodeTimeoutMs / 4);
  EXPECT_GE(ms, kMaxNodeFrameBytes / Gate::kMost) << "what bounds gRPC's memory";
}

// A coordinator that reads once in 25 ms took the pace down to a quarter, as if the node had been silent.
TEST_F(ClusterGate, ASlowCoordinatorIsNoSilence) {
  constexpr std::size_t kSize = 256 << 10;
  const std::uint64_t pieces = carry_ms(kSize, 25) / 25;
  EXPECT_LT(pieces, 2 * kSize / Gate::kMost);
}

TEST_F(ClusterGate, AfterSilenceThePaceIsThatOfTheBeginning) {
  constexpr std::size_t kSize = 16 << 10;
  carry_ms(512 << 10, 1);
  EXPECT_LE(carry_ms(kSize, 1), kSize / Gate::kMost + 1) << "it has not been silent";
  clock_.advance_ms(Gate::kSilenceNs / 1'000'000);
  EXPECT_GT(carry_ms(kSize, 1), kSize / Gate::kMost + 2);
}

}  // namespace
}  // namespace epd::cluster
