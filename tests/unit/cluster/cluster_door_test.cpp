// The cluster's port: how many connections it takes in, of all and of one address.
#include "base/event.h"
#include "cluster/address.h"
#include "door.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <functional>
#include <map>
#include <random>
#include <thread>
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
      held_.push_back(std::move(fd));
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

  // It begins a handshake, so gRPC has it.
  void hand_over(const UniqueFd& fd) {
    const int before = handed_over_;
    ASSERT_EQ(::send(fd.get(), "\x16", 1, MSG_NOSIGNAL), 1);
    ASSERT_TRUE(eventually([&] { return handed_over_ == before + 1; }));
    sockaddr_un name{};
    socklen_t size = sizeof(name);
    ASSERT_EQ(::getpeername(held_.back().get(), reinterpret_cast<sockaddr*>(&name), &size), 0);
    keys_[fd.get()] =
        "unix-abstract:" + std::string(name.sun_path + 1, size - offsetof(sockaddr_un, sun_path) - 1);
  }
  const std::string& key(const UniqueFd& fd) { return keys_.at(fd.get()); }
  Status open_stream(const UniqueFd& fd, const std::string& certificate = "") {
    hand_over(fd);
    return door_->opened_stream(key(fd), certificate);
  }
  void welcome(const UniqueFd& fd, const std::string& certificate) {
    EXPECT_TRUE(open_stream(fd, certificate).ok());
    door_->took_frame(key(fd));
    door_->welcomed(key(fd));
  }
  static bool eventually(const std::function<bool()>& condition) {
    for (int ms = 0; ms < kPatienceMs; ms += 5) {
      if (condition()) return true;
      ::usleep(5'000);
    }
    return false;
  }

  Refusals refusals_;
  std::vector<UniqueFd> held_;  // as gRPC would, in order
  std::map<int, std::string> keys_;
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
  EXPECT_TRUE(open_stream(node).ok());
  std::vector<UniqueFd> strangers;
  for (std::size_t i = 0; i < 4; ++i) {
    strangers.push_back(connect("127.0.0.9"));
    if (i < 2) continue;
    EXPECT_TRUE(is_ended(strangers[i - 2], kPatienceMs)) << i;
  }
  EXPECT_FALSE(is_ended(node, 0));
  for (std::size_t i = 2; i < 4; ++i) {
    EXPECT_FALSE(is_ended(strangers[i], 0)) << i;
    EXPECT_TRUE(open_stream(strangers[i]).ok());
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
  EXPECT_TRUE(open_stream(all[0]).ok());
  for (int i = 4; i < 12; ++i) {
    all.push_back(connect("127.0.0." + std::to_string(i + 1)));
    EXPECT_TRUE(is_ended(all[static_cast<std::size_t>(i) - 3], kPatienceMs)) << i;
    EXPECT_FALSE(is_ended(all.back(), 0)) << i;
  }
  EXPECT_FALSE(is_ended(all[0], 0));
  EXPECT_EQ(refusals_.counts(), (std::vector<std::pair<std::string, std::uint64_t>>{{"connections", 8}}));
  for (std::size_t i = 9; i < 12; ++i) EXPECT_TRUE(open_stream(all[i]).ok());
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
TEST_F(ClusterDoor, WhoseStreamIsClosedMakesRoomToo) {
  open(3, 64);
  std::vector<UniqueFd> all;
  for (int i = 0; i < 3; ++i) {
    all.push_back(connect("127.0.0." + std::to_string(i + 1)));
    EXPECT_TRUE(open_stream(all.back()).ok());
  }
  EXPECT_TRUE(is_ended(connect("127.0.0.7"), kPatienceMs)) << "all have streams";
  door_->closed_stream(key(all[1]));
  door_->closed_stream(key(all[1]));  // one too many changes nothing
  const UniqueFd node = connect("127.0.0.8");
  EXPECT_TRUE(is_ended(all[1], kPatienceMs));
  for (const std::size_t i : {0, 2}) EXPECT_FALSE(is_ended(all[i], 0)) << i;
  EXPECT_FALSE(is_ended(node, 0));
  EXPECT_TRUE(open_stream(node).ok());
  EXPECT_TRUE(is_ended(connect("127.0.0.9"), kPatienceMs)) << "all have streams";
  EXPECT_EQ(refusals_.counts(), (std::vector<std::pair<std::string, std::uint64_t>>{{"connections", 3}}));
}

// A stream that was refused still is one: the end of its connection is no failed handshake.
TEST_F(ClusterDoor, TheEndOfAConnectionIsARefusalOnlyWithoutAnyStream) {
  open(8, 64);
  const UniqueFd refused = connect("127.0.0.1");
  EXPECT_TRUE(open_stream(refused).ok());
  door_->closed_stream(key(refused));
  held_.back().reset();  // as gRPC ends it
  const UniqueFd stranger = connect("127.0.0.2");
  hand_over(stranger);
  held_.back().reset();
  ASSERT_TRUE(eventually([this] { return !refusals_.counts().empty(); }));
  EXPECT_EQ(refusals_.counts(), (std::vector<std::pair<std::string, std::uint64_t>>{{"handshake", 1}}));
}

// gRPC took gigabytes of what no Hello had come before.
TEST_F(ClusterDoor, WhoSendsMuchBeforeItsHelloIsEnded) {
  open(8, 64);
  const UniqueFd stranger = connect("127.0.0.1");
  hand_over(stranger);
  ::fcntl(held_.back().get(), F_SETFL, 0);  // it blocks
  const std::string much(Gate::kBeforeHello, 'x');
  (void)::send(stranger.get(), much.data(), much.size(), MSG_NOSIGNAL);
  std::size_t came = 0;
  char bytes[4096];
  for (ssize_t n; (n = ::recv(held_.back().get(), bytes, sizeof(bytes), 0)) > 0;)
    came += static_cast<std::size_t>(n);
  EXPECT_LE(came, Gate::kBeforeHello);
  EXPECT_TRUE(is_ended(stranger, kPatienceMs));
  EXPECT_EQ(refusals_.counts(), (std::vector<std::pair<std::string, std::uint64_t>>{{"flood", 1}}));
}

// Streams that were begun and reset cost the daemon's memory and the time of all its threads.
TEST_F(ClusterDoor, ASecondStreamEndsTheConnectionAndItsCertificateWaits) {
  open(8, 64);
  const UniqueFd node = connect("127.0.0.1");
  welcome(node, "node-x");
  EXPECT_EQ(door_->opened_stream(key(node), "node-x").code(), StatusCode::kResourceExhausted);
  EXPECT_TRUE(is_ended(node, kPatienceMs));
  const UniqueFd again = connect("127.0.0.1");
  const Status status = open_stream(again, "node-x");
  EXPECT_EQ(status.message(),
            "a connection of this certificate was ended for a flood; allowed: another one 5 s later");
  EXPECT_TRUE(open_stream(connect("127.0.0.1"), "node-y").ok());
}

// Frames of a node come through as they are, however long they are.
TEST_F(ClusterDoor, FramesAreCarriedWhole) {
  open(8, 64);
  const UniqueFd node = connect("127.0.0.1");
  welcome(node, "node-x");
  std::mt19937 random(1);
  std::string sent(1 << 20, '\0');
  for (char& c : sent) c = static_cast<char>(random());
  const auto write = [&](int to) {
    for (std::size_t done = 0; done < sent.size();) {
      const ssize_t n = ::send(to, sent.data() + done, sent.size() - done, MSG_NOSIGNAL);
      pollfd one{to, POLLOUT, 0};
      if (n < 0) ::poll(&one, 1, kPatienceMs);
      done += n < 0 ? 0 : static_cast<std::size_t>(n);
    }
  };
  const auto read = [&](int from) {
    std::string came(sent.size(), '\0');
    for (std::size_t done = 0; done < came.size();) {
      pollfd one{from, POLLIN, 0};
      EXPECT_EQ(::poll(&one, 1, kPatienceMs), 1) << done;
      const ssize_t n = ::recv(from, came.data() + done, came.size() - done, MSG_DONTWAIT);
      if (n <= 0) break;
      done += static_cast<std::size_t>(n);
    }
    return came;
  };
  char first;
  ASSERT_EQ(::recv(held_.back().get(), &first, 1, 0), 1);
  for (const bool in : {true, false, true, true}) {
    const int from = in ? node.get() : held_.back().get();
    std::thread writer([&] { write(from); });
    EXPECT_TRUE(read(in ? held_.back().get() : node.get()) == sent) << in;
    writer.join();
    door_->took_frame(key(node));
  }
  EXPECT_TRUE(refusals_.counts().empty());
}

// A stranger who waited at the port held up all nodes for half a second at a time.
TEST_F(ClusterDoor, WithoutDescriptorsForStrangersNodesAreCarried) {
  open(8, 64);
  const UniqueFd node = connect("127.0.0.1");
  welcome(node, "node-x");
  char byte = 0;
  ASSERT_EQ(::recv(held_.back().get(), &byte, 1, 0), 1);
  const UniqueFd gate(::dup(held_.back().get()));
  const UniqueFd stranger(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  rlimit none = before;
  none.rlim_cur = static_cast<rlim_t>(UniqueFd(::dup(0)).get());  // the lowest that is free
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &none), 0);
  EXPECT_EQ(::connect(stranger.get(), where_.get(), where_.size), 0);
  const auto begun = std::chrono::steady_clock::now();
  int rounds = 0;
  for (; rounds < 200 && std::chrono::steady_clock::now() - begun < std::chrono::seconds(20); ++rounds) {
    EXPECT_EQ(::send(node.get(), "x", 1, MSG_NOSIGNAL), 1);
    pollfd one{gate.get(), POLLIN, 0};
    if (::poll(&one, 1, kPatienceMs) != 1 || ::recv(gate.get(), &byte, 1, MSG_DONTWAIT) != 1) break;
  }
  EXPECT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_EQ(rounds, 200);
  hand_over(stranger);
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
