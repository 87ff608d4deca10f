// The HTTP server: what it serves, and what it refuses.
#include "metrics/metrics_server.h"

#include "common/fd.h"
#include "support/fake_control_facade.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>
#include <algorithm>
#include <cstdint>
#include <fstream>
#include <string>
#include <vector>

namespace epd::test {
namespace {

using testing::AllOf;
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

bool raise_descriptor_limit(rlim_t count) {
  rlimit limit{};
  ::getrlimit(RLIMIT_NOFILE, &limit);
  limit.rlim_cur = std::max(limit.rlim_cur, std::min(count, limit.rlim_max));
  ::setrlimit(RLIMIT_NOFILE, &limit);
  return limit.rlim_cur >= count;
}

std::uint64_t resident_bytes() {
  std::ifstream file("/proc/self/statm");
  std::uint64_t all = 0, resident = 0;  // in pages
  file >> all >> resident;
  return resident * static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
}

struct Started {
  explicit Started(const std::string& listen)
      : server(metrics::MetricsServer::start(
            facade, calls, {listen, 8, 16, [this](const char* service) { return healthy == service; }})) {}
  FakeControlFacade facade;
  CallTimes calls;
  std::string healthy = "control";  // the service that serves
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

TEST(MetricsServerTest, TellsProbesWhatEpctlHealthTells) {
  Started started("127.0.0.1:0");
  ASSERT_TRUE(started.server.ok());
  const int port = (*started.server)->port();
  EXPECT_THAT(get(port, "/healthz"), HasSubstr("HTTP/1.1 200 OK"));
  EXPECT_THAT(get(port, "/readyz?verbose"), AllOf(HasSubstr("HTTP/1.1 503 "), HasSubstr("does not serve")));
}

TEST(MetricsServerTest, ReadinessTellsOfASocketThatIsGone) {
  Started started("127.0.0.1:0");
  ASSERT_TRUE(started.server.ok());
  started.facade.change([](auto& views) { views.daemon.set_socket_problem("/a has been removed"); });
  EXPECT_THAT(get((*started.server)->port(), "/readyz"),
              AllOf(HasSubstr("HTTP/1.1 503 "), HasSubstr("/a has been removed\n")));
}

TEST(MetricsServerTest, OtherRequestsAreRefusedWithWhatIsAllowed) {
  Started started("127.0.0.1:0");
  ASSERT_TRUE(started.server.ok());
  const int port = (*started.server)->port();
  EXPECT_THAT(get(port, "/health"),
              AllOf(HasSubstr("HTTP/1.1 404 "), HasSubstr("/metrics /healthz /readyz")));
  EXPECT_THAT(answer_to(port, "POST /metrics HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc"),
              AllOf(HasSubstr("HTTP/1.1 405 "), HasSubstr("allowed: GET")));
  EXPECT_THAT(answer_to(port, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"), HasSubstr("HTTP/1.1 400 "));
  EXPECT_THAT(answer_to(port, "GET /metrics HTTP/1.1\r\n" + std::string(12 << 10, 'x')),
              AllOf(HasSubstr("HTTP/1.1 431 "), HasSubstr("8192 bytes")));
}

// A port scanner must not make Prometheus believe that the daemon is down, nor a kubelet restart it.
TEST(MetricsServerTest, ThreeThousandSilentConnectionsLeaveRoomForOthers) {
  Started started("127.0.0.1:0");
  ASSERT_TRUE(started.server.ok());
  const int port = (*started.server)->port();
  std::vector<UniqueFd> silent;
  for (int i = 0; i < 3000 && raise_descriptor_limit(4096); ++i) {
    silent.push_back(connect_to(port));
    if (i % 100 == 99) {
      EXPECT_THAT(get(port, "/healthz"), HasSubstr("200 OK")) << i;
    }
  }
  EXPECT_EQ(silent.size(), 3000u);
  EXPECT_THAT(get(port, "/metrics"), HasSubstr("epd_supervisor_up 1"));
  EXPECT_THAT(get(port, "/healthz"), HasSubstr("200 OK"));
}

// Nobody makes space for others here, so the time for the request does.
TEST(MetricsServerTest, AClientThatDoesNotAskIsEnded) {
  Started started("127.0.0.1:0");
  ASSERT_TRUE(started.server.ok());
  const UniqueFd silent = connect_to((*started.server)->port());
  const UniqueFd slow = connect_to((*started.server)->port());
  ASSERT_EQ(::send(slow.get(), "GET /met", 8, MSG_NOSIGNAL), 8);
  char byte = 0;
  EXPECT_LE(::recv(silent.get(), &byte, 1, 0), 0);
  EXPECT_LE(::recv(slow.get(), &byte, 1, 0), 0);
}

// The gRPC port that was here kept 20 kB for each stream that was begun.
TEST(MetricsServerTest, FloodsTakeNoMemory) {
  Started started("127.0.0.1:0");
  ASSERT_TRUE(started.server.ok());
  const int port = (*started.server)->port();
  const std::uint64_t before = resident_bytes();
  const std::string headers = "GET /metrics HTTP/1.1\r\n" + std::string(64 << 10, 'h');
  const std::string requests = "GET /metrics HTTP/1.1\r\n\r\n";
  const std::string endless = std::string(64 << 10, 'e');
  std::vector<UniqueFd> readers;  // who read nothing
  for (int round = 0; round < 400; ++round) {
    for (const std::string* bytes : {&headers, &requests, &endless}) {
      UniqueFd fd = connect_to(port);
      ::send(fd.get(), bytes->data(), bytes->size(), MSG_NOSIGNAL | MSG_DONTWAIT);
      readers.push_back(std::move(fd));
    }
    if (readers.size() > 300) readers.erase(readers.begin(), readers.begin() + 150);
  }
  EXPECT_THAT(get(port, "/healthz"), HasSubstr("200 OK"));
  const std::uint64_t after = resident_bytes();
  EXPECT_LE(after, before + (64u << 20));
}

TEST(MetricsServerTest, EndsBesideItsClients) {
  Started started("127.0.0.1:0");
  ASSERT_TRUE(started.server.ok());
  const UniqueFd silent = connect_to((*started.server)->port());
  started.server = Status(StatusCode::kAborted, "");
  char byte = 0;
  EXPECT_LE(::recv(silent.get(), &byte, 1, 0), 0);
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
