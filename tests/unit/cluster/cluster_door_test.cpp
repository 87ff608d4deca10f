// The cluster's port: how many connections it takes in, of all and of one address.
#include "base/event.h"
#include "cluster/address.h"
#include "door.h"

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>
#include <atomic>
#include <functional>
#include <vector>

namespace epd::cluster {
namespace {

constexpr int kPatienceMs = 20'000;

class ClusterDoor : public testing::Test {
 protected:
  void open(std::size_t most, std::size_t most_of_address) {
    Door::Options options;
    options.listen = *numeric_address({"127.0.0.1", free_port()});
    options.max_connections = most;
    options.max_of_address = most_of_address;
    options.hand_over = [this](UniqueFd fd) {
      held_ = std::move(fd);
      ++handed_over_;
    };
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

  static std::string own_address(const UniqueFd& fd) {
    SocketAddress own;
    own.size = sizeof(own.bytes);
    EXPECT_EQ(::getsockname(fd.get(), own.get(), &own.size), 0);
    return to_string(own);
  }
  // It begins a handshake, so gRPC has it.
  void hand_over(const UniqueFd& fd) {
    const int before = handed_over_;
    ASSERT_EQ(::send(fd.get(), "\x16", 1, MSG_NOSIGNAL), 1);
    ASSERT_TRUE(eventually([&] { return handed_over_ == before + 1; }));
  }
  void open_stream(const UniqueFd& fd) {
    hand_over(fd);
    door_->opened_stream(own_address(fd));
  }
  static bool eventually(const std::function<bool()>& condition) {
    for (int ms = 0; ms < kPatienceMs; ms += 5) {
      if (condition()) return true;
      ::usleep(5'000);
    }
    return false;
  }

  Refusals refusals_;
  UniqueFd held_;  // as gRPC would
  std::atomic<int> handed_over_ = 0;
  SocketAddress where_;
  std::unique_ptr<Door> door_;
};

TEST_F(ClusterDoor, OneAddressLeavesRoomForOthers) {
  open(100, 3);
  const UniqueFd node = connect("127.0.0.1");
  std::vector<UniqueFd> strangers;
  for (std::size_t i = 0; i < 8; ++i) {
    strangers.push_back(connect("127.0.0.9"));
    if (i < 3) continue;
    EXPECT_TRUE(is_ended(strangers[i - 3], kPatienceMs)) << i;
  }
  for (std::size_t i = 5; i < 8; ++i) EXPECT_FALSE(is_ended(strangers[i], 0)) << i;
  EXPECT_FALSE(is_ended(node, 0)) << "older than all of them, and of another address";
  EXPECT_EQ(refusals_.counts(), (std::vector<std::pair<std::string, std::uint64_t>>{{"connections", 5}}));
}

// A program without privileges on a node's machine held them all, and the node did not get in.
TEST_F(ClusterDoor, OfOneAddressTheOldestWithoutAStreamMakesRoom) {
  open(100, 3);
  const UniqueFd node = connect("127.0.0.9");
  open_stream(node);
  std::vector<UniqueFd> strangers;
  for (std::size_t i = 0; i < 4; ++i) {
    strangers.push_back(connect("127.0.0.9"));
    if (i < 2) continue;
    EXPECT_TRUE(is_ended(strangers[i - 2], kPatienceMs)) << i;
  }
  EXPECT_FALSE(is_ended(node, 0));
  for (std::size_t i = 2; i < 4; ++i) {
    EXPECT_FALSE(is_ended(strangers[i], 0)) << i;
    open_stream(strangers[i]);
  }
  const UniqueFd more = connect("127.0.0.9");
  EXPECT_TRUE(is_ended(more, kPatienceMs)) << "all have streams";
  EXPECT_FALSE(is_ended(node, 0));
}

// However many strangers there are, a node gets in, and one that is there is not ended.
TEST_F(ClusterDoor, OfAllTogetherTheOldestWithoutAStreamMakesRoom) {
  open(4, 64);
  std::vector<UniqueFd> all;
  for (int i = 0; i < 4; ++i) all.push_back(connect("127.0.0." + std::to_string(i + 1)));
  open_stream(all[0]);
  for (int i = 4; i < 12; ++i) {
    all.push_back(connect("127.0.0." + std::to_string(i + 1)));
    EXPECT_TRUE(is_ended(all[static_cast<std::size_t>(i) - 3], kPatienceMs)) << i;
    EXPECT_FALSE(is_ended(all.back(), 0)) << i;
  }
  EXPECT_FALSE(is_ended(all[0], 0));
  EXPECT_EQ(refusals_.counts(), (std::vector<std::pair<std::string, std::uint64_t>>{{"connections", 8}}));
  for (std::size_t i = 9; i < 12; ++i) open_stream(all[i]);
  EXPECT_TRUE(is_ended(connect("127.0.0.7"), kPatienceMs)) << "all have streams";
}

// gRPC holds the connection, which has begun a handshake.
TEST_F(ClusterDoor, WhoHasBegunAHandshakeMakesRoomToo) {
  open(1, 64);
  const UniqueFd slow = connect("127.0.0.1");
  hand_over(slow);
  const UniqueFd node = connect("127.0.0.2");
  EXPECT_TRUE(is_ended(slow, kPatienceMs));
  EXPECT_FALSE(is_ended(node, 0));
}

// One certificate held all places by streams that were refused again and again.
TEST_F(ClusterDoor, WhoseStreamsAreAllClosedMakesRoomToo) {
  open(3, 64);
  std::vector<UniqueFd> all;
  for (int i = 0; i < 3; ++i) {
    all.push_back(connect("127.0.0." + std::to_string(i + 1)));
    open_stream(all.back());
  }
  door_->opened_stream(own_address(all[1]));
  door_->closed_stream(own_address(all[1]));
  EXPECT_TRUE(is_ended(connect("127.0.0.7"), kPatienceMs)) << "one of its two is open";
  door_->closed_stream(own_address(all[1]));
  door_->closed_stream(own_address(all[1]));  // one too many changes nothing
  const UniqueFd node = connect("127.0.0.8");
  EXPECT_TRUE(is_ended(all[1], kPatienceMs));
  for (const std::size_t i : {0, 2}) EXPECT_FALSE(is_ended(all[i], 0)) << i;
  EXPECT_FALSE(is_ended(node, 0));
  open_stream(node);
  EXPECT_TRUE(is_ended(connect("127.0.0.9"), kPatienceMs)) << "all have streams";
  EXPECT_EQ(refusals_.counts(), (std::vector<std::pair<std::string, std::uint64_t>>{{"connections", 3}}));
}

// A stream that was refused still is one: the end of its connection is no failed handshake.
TEST_F(ClusterDoor, TheEndOfAConnectionIsARefusalOnlyWithoutAnyStream) {
  open(8, 64);
  const UniqueFd refused = connect("127.0.0.1");
  open_stream(refused);
  door_->closed_stream(own_address(refused));
  ::shutdown(held_.get(), SHUT_RDWR);  // as gRPC ends it
  const UniqueFd stranger = connect("127.0.0.2");
  hand_over(stranger);
  ::shutdown(held_.get(), SHUT_RDWR);
  ASSERT_TRUE(eventually([this] { return !refusals_.counts().empty(); }));
  EXPECT_EQ(refusals_.counts(), (std::vector<std::pair<std::string, std::uint64_t>>{{"handshake", 1}}));
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
