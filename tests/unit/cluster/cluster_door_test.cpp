// The cluster's port: how many connections it takes in, of all and of one address.
#include "address.h"
#include "base/event.h"
#include "door.h"

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>
#include <atomic>
#include <vector>

namespace epd::cluster {
namespace {

class ClusterDoor : public testing::Test {
 protected:
  void open(std::size_t most, std::size_t most_of_address) {
    Door::Options options;
    options.listen = *numeric_address({"127.0.0.1", free_port()});
    options.max_connections = most;
    options.max_of_address = most_of_address;
    options.hand_over = [](UniqueFd) {};
    where_ = options.listen;
    Result<std::unique_ptr<Door>> door = Door::open(std::move(options), refusals_);
    ASSERT_TRUE(door.ok()) << door.status().to_string();
    door_ = std::move(*door);
    ASSERT_TRUE(door_->begin().ok());
  }
  static std::uint16_t free_port() {
    const UniqueFd probe(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    SocketAddress any = *numeric_address({"127.0.0.1", 1});
    reinterpret_cast<sockaddr_in*>(any.get())->sin_port = 0;
    EXPECT_EQ(::bind(probe.get(), any.get(), any.size), 0);
    EXPECT_EQ(::getsockname(probe.get(), any.get(), &any.size), 0);
    return ntohs(reinterpret_cast<sockaddr_in*>(any.get())->sin_port);
  }
  UniqueFd connect(const std::string& from) {
    UniqueFd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    SocketAddress own = *numeric_address({from, 1});
    reinterpret_cast<sockaddr_in*>(own.get())->sin_port = 0;
    EXPECT_EQ(::bind(fd.get(), own.get(), own.size), 0);
    EXPECT_EQ(::connect(fd.get(), where_.get(), where_.size), 0);
    return fd;
  }
  // Whether the door ends it.
  static bool is_ended(const UniqueFd& fd, int wait_ms) {
    pollfd one{fd.get(), POLLIN, 0};
    char byte;
    return ::poll(&one, 1, wait_ms) == 1 && ::recv(fd.get(), &byte, 1, MSG_DONTWAIT) <= 0;
  }

  Refusals refusals_;
  SocketAddress where_;
  std::unique_ptr<Door> door_;
};

constexpr int kPatienceMs = 20'000;

TEST_F(ClusterDoor, OneAddressLeavesRoomForOthers) {
  open(100, 3);
  std::vector<UniqueFd> strangers;
  for (int i = 0; i < 3; ++i) strangers.push_back(connect("127.0.0.9"));
  const UniqueFd more = connect("127.0.0.9");
  EXPECT_TRUE(is_ended(more, kPatienceMs));
  const UniqueFd node = connect("127.0.0.1");
  const UniqueFd again = connect("127.0.0.9");
  EXPECT_TRUE(is_ended(again, kPatienceMs));
  EXPECT_FALSE(is_ended(node, 0)) << "taken in before that one, and kept";
  for (const UniqueFd& stranger : strangers) EXPECT_FALSE(is_ended(stranger, 0));
  EXPECT_EQ(refusals_.counts(), (std::vector<std::pair<std::string, std::uint64_t>>{{"connections", 2}}));
  // Those that end make room.
  strangers.clear();
  for (int i = 0; i < 100; ++i) {
    const UniqueFd late = connect("127.0.0.9");
    if (!is_ended(late, 50)) return;
  }
  FAIL() << "there is no room";
}

TEST_F(ClusterDoor, AllTogether) {
  open(4, 64);
  std::vector<UniqueFd> some;
  for (int i = 0; i < 4; ++i) some.push_back(connect("127.0.0." + std::to_string(i + 1)));
  EXPECT_TRUE(is_ended(connect("127.0.0.7"), kPatienceMs));
}

TEST(ClusterRefusals, StrangersDontSilenceNodes) {
  EventLog log;
  log.install();
  Refusals refusals;
  for (int i = 0; i < 1'000; ++i) refusals.refuse(Who::kStranger, Refusal::kPlainText, "10.0.0.9:1", "", "x");
  refusals.refuse(Who::kNode, Refusal::kIdentity, "10.0.0.2:9", "node-b", "not allowed");
  const EventBatch batch = log.read(0, 10'000, 0);
  EXPECT_LT(batch.events.size(), 500u);
  ASSERT_FALSE(batch.events.empty());
  const auto& fields = batch.events.back().fields;
  EXPECT_NE(std::find(fields.begin(), fields.end(), std::pair<std::string, std::string>("node", "node-b")),
            fields.end());
}

}  // namespace
}  // namespace epd::cluster
