// The thread that touches a session's doorbells, by itself.
#include "bells.h"
#include "engine_harness.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

namespace epd::test {
namespace {

class BellsTest : public ::testing::Test {
 protected:
  BellsTest()
      : engine_bell_(make_eventfd().value()),
        loop_bell_(std::make_shared<const UniqueFd>(make_eventfd().value())) {
    auto [client, engine] = make_socketpair().value();
    client_bell_ = std::move(client);
    engine_end_ = std::move(engine);
  }
  Result<std::unique_ptr<Bells>> start() {
    return Bells::start(duplicate(engine_bell_.get()).value(), std::move(engine_end_), loop_bell_);
  }
  // Takes the ring.
  bool loop_is_rung() const {
    pollfd entry{loop_bell_->get(), POLLIN, 0};
    std::uint64_t rings;
    return ::poll(&entry, 1, 10'000) == 1 && ::read(loop_bell_->get(), &rings, sizeof(rings)) > 0;
  }
  // What the client receives: 1, a byte; 0, the end.
  ssize_t received() const {
    pollfd entry{client_bell_.get(), POLLIN, 0};
    char byte;
    return ::poll(&entry, 1, 10'000) == 1 ? ::recv(client_bell_.get(), &byte, 1, MSG_DONTWAIT) : -1;
  }

  UniqueFd engine_bell_;
  std::shared_ptr<const UniqueFd> loop_bell_;
  UniqueFd client_bell_;
  UniqueFd engine_end_;
};

TEST_F(BellsTest, PassOnEachRing) {
  auto bells = start();
  ASSERT_TRUE(bells.ok());
  for (int i = 0; i < 1000; ++i) {
    ring_eventfd(engine_bell_.get());
    ASSERT_TRUE(loop_is_rung()) << i;
    (*bells)->ring_client();
    ASSERT_EQ(received(), 1) << i;
  }
}

TEST_F(BellsTest, CloseWhenTheyAreTold) {
  auto bells = start();
  ASSERT_TRUE(bells.ok());
  EXPECT_FALSE((*bells)->closed());
  (*bells)->close();
  EXPECT_TRUE(loop_is_rung());
  EXPECT_TRUE((*bells)->closed());
  pollfd entry{client_bell_.get(), POLLIN, 0};
  EXPECT_EQ(::poll(&entry, 1, 10'000), 1);
  EXPECT_NE(entry.revents & POLLHUP, 0);
}

TEST_F(BellsTest, CloseWithTheirOwner) {
  auto bells = start();
  ASSERT_TRUE(bells.ok());
  bells->reset();
  EXPECT_TRUE(loop_is_rung());
}

#ifndef __SANITIZE_THREAD__  // which forbids threads in the child of a process that has some
TEST_F(BellsTest, SayThatNoThreadIsLeft) {
  if (::geteuid() != 0) GTEST_SKIP() << "needs root, to become a user without processes";
  const pid_t child = ::fork();
  if (child == 0) {
    const rlimit none{1, 1};
    if (::setrlimit(RLIMIT_NPROC, &none) != 0 || ::setresuid(61003, 61003, 61003) != 0) ::_exit(3);
    auto bells = start();
    const bool refused = bells.status().code() == StatusCode::kResourceExhausted &&
                         bells.status().message().find("no thread") != std::string::npos;
    ::_exit(refused ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
}
#endif

}  // namespace
}  // namespace epd::test
