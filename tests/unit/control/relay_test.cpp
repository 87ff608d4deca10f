// The control plane's relay: what it passes on, and what ends it.
#include "relay.h"

#include "support/send_descriptors.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

namespace epd::control {
namespace {

class RelayTest : public testing::Test {
 protected:
  void start(std::shared_ptr<RelayBudget> budget) {
    int outer[2];
    int inner[2];
    ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, outer), 0);
    ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, inner), 0);
    client_.reset(outer[0]);
    server_.reset(inner[0]);
    peer_end_.reset(outer[1]);
    inner_end_.reset(inner[1]);
    relay_ = std::make_unique<Relay>(Doorstep{outer[1], inner[1], -1}, std::move(budget), clock_);
  }
  std::string read(const UniqueFd& socket) const {
    std::string text(1 << 20, 0);
    const ssize_t n = ::recv(socket.get(), text.data(), text.size(), MSG_DONTWAIT);
    text.resize(n > 0 ? static_cast<std::size_t>(n) : 0);
    return text;
  }

  UniqueFd client_;
  UniqueFd server_;
  UniqueFd peer_end_, inner_end_;
  ManualClock clock_;
  std::unique_ptr<Relay> relay_;
};

TEST_F(RelayTest, BytesGoBothWaysAndEndsAreTold) {
  start(nullptr);
  ASSERT_EQ(::send(client_.get(), "ask", 3, 0), 3);
  ASSERT_EQ(::send(server_.get(), "answer", 6, 0), 6);
  EXPECT_TRUE(relay_->move());
  EXPECT_EQ(read(server_), "ask");
  EXPECT_EQ(read(client_), "answer");
  ::shutdown(client_.get(), SHUT_WR);
  EXPECT_TRUE(relay_->move()) << "an answer may follow";
  char byte;
  EXPECT_EQ(::recv(server_.get(), &byte, 1, MSG_DONTWAIT), 0);
  ASSERT_EQ(::send(server_.get(), "late", 4, 0), 4);
  EXPECT_TRUE(relay_->move());
  EXPECT_EQ(read(client_), "late");
  server_.reset();
  EXPECT_FALSE(relay_->move());
}

TEST_F(RelayTest, BytesWithADescriptorEndIt) {
  start(nullptr);
  ASSERT_EQ(::send(client_.get(), "plain", 5, 0), 5);
  EXPECT_TRUE(relay_->move());
  ASSERT_EQ(test::send_descriptors(client_.get(), "x", 1, {server_.get()}), 1);
  EXPECT_FALSE(relay_->move());
  EXPECT_EQ(read(server_), "plain");
}

TEST_F(RelayTest, AUserWhoSendsTooMuchWaits) {
  start(std::make_shared<RelayBudget>());
  const std::string bytes(64 << 10, '\0');  // a preface, and frames without bytes that begin no stream
  std::size_t passed = 0;
  for (int i = 0; i < 200; ++i) {
    (void)::send(client_.get(), bytes.data(), bytes.size(), MSG_DONTWAIT);
    ASSERT_TRUE(relay_->move());
    passed += read(server_).size();
  }
  EXPECT_EQ(passed, RelayBudget::kBurst);
  EXPECT_TRUE(relay_->must_wait());
  clock_.advance_ms(500);
  EXPECT_FALSE(relay_->must_wait());
  for (int i = 0; i < 20; ++i) {
    ASSERT_TRUE(relay_->move());
    passed += read(server_).size();
  }
  EXPECT_EQ(passed, RelayBudget::kBurst + RelayBudget::kPerSecond / 2);
  ASSERT_EQ(::send(server_.get(), "answer", 6, 0), 6);
  EXPECT_TRUE(relay_->move());
  EXPECT_EQ(read(client_), "answer") << "the other way has no limit";
}

std::string frame(char type, std::size_t bytes) {
  const auto length = static_cast<std::uint32_t>(bytes);
  std::string text = {static_cast<char>(length >> 16), static_cast<char>(length >> 8),
                      static_cast<char>(length), type};
  return text + std::string(5 + bytes, 'x');
}

// gRPC keeps much for each that a client opens and resets.
TEST_F(RelayTest, AUserWhoBeginsTooManyStreamsWaits) {
  start(std::make_shared<RelayBudget>());
  std::string sent(24, 'p');
  for (int i = 0; i < 4; ++i) sent += frame(4, 0);
  sent += frame(1, 1);
  const std::size_t small = sent.size();
  for (std::uint64_t i = 1; i < RelayBudget::kStreamBurst + 40; ++i) sent += frame(1, 20);
  std::string passed;
  std::size_t given = 0;
  const auto move = [&] {
    for (int i = 0; i < 400; ++i) {
      const std::size_t part = std::min<std::size_t>(sent.size() - given, 7);  // heads come in pieces
      given += part != 0 && ::send(client_.get(), sent.data() + given, part, MSG_DONTWAIT) > 0 ? part : 0;
      ASSERT_TRUE(relay_->move());
      passed += read(server_);
    }
  };
  for (int i = 0; i < 10; ++i) move();
  EXPECT_TRUE(relay_->must_wait());
  // All of those that may begin, and of the next head what stands before its type.
  EXPECT_EQ(passed.size(), small + (RelayBudget::kStreamBurst - 1) * 29 + 3);
  clock_.advance_ms(500);
  for (int i = 0; i < 10; ++i) move();
  EXPECT_EQ(passed.size(),
            small + (RelayBudget::kStreamBurst - 1 + RelayBudget::kStreamsPerSecond / 2) * 29 + 3);
  EXPECT_EQ(passed, sent.substr(0, passed.size()));
}

TEST_F(RelayTest, ItRunsUntilOneSideEnds) {
  start(nullptr);
  std::thread porter([this] { relay_->run(); });
  ASSERT_EQ(::send(client_.get(), "ask", 3, 0), 3);
  pollfd asked{server_.get(), POLLIN, 0};
  ASSERT_EQ(::poll(&asked, 1, 5000), 1);
  EXPECT_EQ(read(server_), "ask");
  ASSERT_EQ(::send(server_.get(), "last words", 10, 0), 10);
  server_.reset();
  porter.join();
  EXPECT_EQ(read(client_), "last words");
  char byte;
  EXPECT_EQ(::recv(client_.get(), &byte, 1, MSG_DONTWAIT), 0);
}

TEST_F(RelayTest, AClientThatHasGoneEndsItWithWhatItHasLeft) {
  const auto budget = std::make_shared<RelayBudget>();
  start(budget);
  budget->spend(RelayBudget::kBurst, 0);
  ASSERT_EQ(::send(client_.get(), "ask", 3, 0), 3);
  client_.reset();
  std::thread porter([this] { relay_->run(); });
  porter.join();
  EXPECT_EQ(read(server_), "") << "what it asked for has nobody to answer to";
}

}  // namespace
}  // namespace epd::control
