// The HTTP server: what it serves, and what it refuses.
#include "metrics/metrics_server.h"

#include "common/fd.h"
#include "support/fake_control_facade.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <sys/socket.h>
#include <unistd.h>
#include <cerrno>
#include <chrono>
#include <thread>
#include <vector>

namespace epd::test {
namespace {

using testing::HasSubstr;
using testing::Not;

UniqueFd connect_to(int port) {
  UniqueFd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<std::uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  EXPECT_EQ(::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
  return socket;
}

std::string answer_to(int port, const std::string& request) {
  const UniqueFd socket = connect_to(port);
  EXPECT_EQ(::send(socket.get(), request.data(), request.size(), MSG_NOSIGNAL),
            static_cast<ssize_t>(request.size()));
  std::string answer;
  char bytes[4096];
  for (ssize_t n = 0; (n = ::recv(socket.get(), bytes, sizeof(bytes), 0)) > 0;)
    answer.append(bytes, static_cast<std::size_t>(n));
  return answer;
}

std::string get(int port, const std::string& path) {
  return answer_to(port, "GET " + path + " HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
}

struct Started {
  explicit Started(const std::string& listen)
      : server(metrics::MetricsServer::start(facade, calls, {listen, 8, 16})) {}
  FakeControlFacade facade;
  CallTimes calls;
  Result<std::unique_ptr<metrics::MetricsServer>> server;
};

TEST(MetricsServerTest, ServesMetricsAndNothingElse) {
  Started started("127.0.0.1:0");
  ASSERT_TRUE(started.server.ok()) << started.server.status().to_string();
  const int port = (*started.server)->port();
  EXPECT_THAT(get(port, "/metrics"), HasSubstr("epd_supervisor_up 1"));
  EXPECT_THAT(get(port, "/../../../etc/passwd"), Not(HasSubstr("root:")));
  EXPECT_THAT(get(port, "/"), Not(HasSubstr("200 OK")));
}

TEST(MetricsServerTest, SaysThatTheSupervisorIsDown) {
  Started started("127.0.0.1:0");
  ASSERT_TRUE(started.server.ok());
  started.facade.fail({StatusCode::kDeadlineExceeded, "busy"});
  const std::string answer = get((*started.server)->port(), "/metrics");
  EXPECT_THAT(answer, HasSubstr("epd_supervisor_up 0"));
  EXPECT_THAT(answer, Not(HasSubstr("epd_device_up")));
}

TEST(MetricsServerTest, SurvivesNonsense) {
  Started started("127.0.0.1:0");
  ASSERT_TRUE(started.server.ok());
  const int port = (*started.server)->port();
  answer_to(port, std::string(64 << 10, 'x').append("\r\n\r\n"));
  answer_to(port, "POST /metrics HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
  answer_to(port, std::string("\0\xff\r\n\r\n", 6));
  EXPECT_THAT(get(port, "/metrics"), HasSubstr("epd_supervisor_up 1"));
}

TEST(MetricsServerTest, TellsWhoWaitedForWhom) {
  Started started("127.0.0.1:0");
  ASSERT_TRUE(started.server.ok());
  EXPECT_THAT(get((*started.server)->port(), "/metrics"),
              HasSubstr("epd_rank_wait_seconds_total{group=\"layer-experts\",group_id=\"9\",rank=\"1\","
                        "peer=\"0\"} 1.5"));
}

// By itself the library looks every two seconds, and a daemon that is told to end would wait for that. A busy
// machine may hold one end up, not most of them.
TEST(MetricsServerTest, EndsWithoutWaitingForItsNextLook) {
  int slow_ends = 0;
  for (int round = 0; round < 8; ++round) {
    const char* listen = round % 2 == 0 ? "127.0.0.1:0" : "0.0.0.0:0";
    Started started(listen);
    ASSERT_TRUE(started.server.ok()) << listen;
    EXPECT_THAT(get((*started.server)->port(), "/metrics"), HasSubstr("epd_supervisor_up 1"));
    const auto begin = std::chrono::steady_clock::now();
    started.server = Status(StatusCode::kAborted, "");
    slow_ends += std::chrono::steady_clock::now() - begin > std::chrono::milliseconds(500) ? 1 : 0;
  }
  EXPECT_LE(slow_ends, 2);
}

// A port scanner or a probe must not make Prometheus believe that the daemon is down.
TEST(MetricsServerTest, ClientsThatSayNothingLeaveRoomForOthers) {
  Started started("127.0.0.1:0");
  ASSERT_TRUE(started.server.ok());
  const int port = (*started.server)->port();
  std::vector<UniqueFd> silent;
  for (int i = 0; i < 15; ++i) silent.push_back(connect_to(port));
  EXPECT_THAT(get(port, "/metrics"), HasSubstr("epd_supervisor_up 1"));
  // Nobody's time had to run out for that.
  char byte = 0;
  for (const UniqueFd& one : silent) {
    EXPECT_EQ(::recv(one.get(), &byte, 1, MSG_DONTWAIT), -1);
    EXPECT_EQ(errno, EAGAIN);
  }
}

// Likewise each client that says nothing, or that says it slowly. Two threads of the server have one here.
TEST(MetricsServerTest, EndsWithoutWaitingForItsClients) {
  int slow_ends = 0;
  for (int round = 0; round < 4; ++round) {
    Started started("127.0.0.1:0");
    ASSERT_TRUE(started.server.ok());
    const UniqueFd silent = connect_to((*started.server)->port());
    const UniqueFd slow = connect_to((*started.server)->port());
    ASSERT_EQ(::send(slow.get(), "GET /met", 8, MSG_NOSIGNAL), 8);
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    const auto begin = std::chrono::steady_clock::now();
    started.server = Status(StatusCode::kAborted, "");
    slow_ends += std::chrono::steady_clock::now() - begin > std::chrono::milliseconds(1500) ? 1 : 0;
    char byte = 0;
    EXPECT_LE(::recv(silent.get(), &byte, 1, 0), 0);
  }
  EXPECT_LE(slow_ends, 1);
}

// Nor does it end what others have at other ports.
TEST(MetricsServerTest, LeavesOtherServersAlone) {
  Started first("127.0.0.1:0");
  Started second("127.0.0.1:0");
  ASSERT_TRUE(first.server.ok() && second.server.ok());
  const UniqueFd open = connect_to((*second.server)->port());
  first.server = Status(StatusCode::kAborted, "");
  const std::string request = "GET /metrics HTTP/1.0\r\n\r\n";
  ASSERT_EQ(::send(open.get(), request.data(), request.size(), MSG_NOSIGNAL),
            static_cast<ssize_t>(request.size()));
  char bytes[16] = {};
  EXPECT_EQ(::recv(open.get(), bytes, 15, MSG_WAITALL), 15);
  EXPECT_THAT(bytes, HasSubstr("200 OK"));
  EXPECT_THAT(get((*second.server)->port(), "/metrics"), HasSubstr("epd_supervisor_up 1"));
}

TEST(MetricsServerTest, WhereItCanNotListenIsRefusedWithTheReason) {
  Started first("127.0.0.1:0");
  ASSERT_TRUE(first.server.ok());
  const std::string listen = "127.0.0.1:" + std::to_string((*first.server)->port());
  for (const auto& [where, why] :
       {std::pair(listen, "Address already in use; allowed: "),
        {std::string("192.0.2.1:0"), "Cannot assign requested address; allowed: "}}) {
    const Started second(where);
    ASSERT_FALSE(second.server.ok());
    EXPECT_EQ(second.server.status().code(), StatusCode::kResourceExhausted);
    EXPECT_THAT(second.server.status().message(), HasSubstr("metrics.listen is \"" + where + "\": " + why));
  }
}

}  // namespace
}  // namespace epd::test
