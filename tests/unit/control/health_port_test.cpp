// The TCP port of health: what it tells, what it does not do, and how much of it a stranger can take.
#include "health_port.h"
#include "common/fd.h"
#include "control_fixture.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <vector>

namespace epd::control {
namespace {

using grpc::health::v1::Health;

class HealthPortTest : public ControlTest {
 protected:
  void start(const std::string& listen = "127.0.0.1:0") {
    options_.health_listen = listen;
    ControlTest::start();
    server_->set_serving(true);
    const std::string host = listen.starts_with("[") ? "[::1]:" : "127.0.0.1:";
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    port_channel_ = grpc::CreateCustomChannel(host + std::to_string(server_->health_port()),
                                              grpc::InsecureChannelCredentials(), arguments);
  }
  Checked check_port(const std::string& service) {
    grpc::ClientContext context;
    limit(context);
    HealthCheckRequest request;
    request.set_service(service);
    HealthCheckResponse response;
    const auto status = Health::NewStub(port_channel_)->Check(&context, request, &response);
    return {status, response.status()};
  }
  // Until it is so: what the port tells is a tenth of a second old at most.
  bool tells(const std::string& service, HealthCheckResponse::ServingStatus wanted) {
    for (const auto end = std::chrono::steady_clock::now() + kHang; std::chrono::steady_clock::now() < end;) {
      const Checked checked = check_port(service);
      if (checked.status.ok() && checked.health == wanted) return true;
      ::usleep(20'000);
    }
    return false;
  }
  UniqueFd dial() const {
    UniqueFd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(server_->health_port());
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    EXPECT_EQ(::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
    return fd;
  }
  // Whether the other end has ended it.
  static bool ends(const UniqueFd& fd, int milliseconds) {
    pollfd entry{fd.get(), POLLRDHUP, 0};
    return ::poll(&entry, 1, milliseconds) == 1;
  }

  std::shared_ptr<grpc::Channel> port_channel_;
};

TEST_F(HealthPortTest, TellsWhatTheControlSocketTells) {
  start();
  for (const char* name :
       {"daemon", "", "control", "epd.v1.Control", "membership", "device/host:0", "device/host:1"})
    EXPECT_TRUE(tells(name, HealthCheckResponse::SERVING)) << name;
  facade_.change([](auto& views) { views.devices.mutable_devices(1)->set_state(v1::DEVICE_STATE_STOPPED); });
  EXPECT_TRUE(tells("device/host:1", HealthCheckResponse::NOT_SERVING));
  EXPECT_TRUE(tells("", HealthCheckResponse::SERVING)) << "one device is not the daemon";
  facade_.change([](auto& views) { views.daemon.set_state(v1::DAEMON_STATE_DRAINING); });
  EXPECT_TRUE(tells("", HealthCheckResponse::NOT_SERVING));
  EXPECT_TRUE(tells("control", HealthCheckResponse::SERVING));
  facade_.fail({StatusCode::kDeadlineExceeded, "the loop has not answered"});
  for (const char* name : {"", "control", "membership", "device/host:0"})
    EXPECT_TRUE(tells(name, HealthCheckResponse::NOT_SERVING)) << name;
}

TEST_F(HealthPortTest, TheClusterIsAskedForOnlyInACluster) {
  start();
  facade_.change([](auto& views) { views.daemon.clear_cluster(); });
  ::usleep(150'000);
  EXPECT_EQ(check_port("cluster").status.error_code(), grpc::StatusCode::NOT_FOUND);
  EXPECT_EQ(check("cluster").status.error_code(), grpc::StatusCode::NOT_FOUND);
  facade_.change([](auto& views) { views.daemon.mutable_cluster()->set_name("prod"); });
  EXPECT_TRUE(tells("cluster", HealthCheckResponse::SERVING));
  EXPECT_EQ(check("cluster").health, HealthCheckResponse::SERVING);
  facade_.change([](auto& views) { views.daemon.mutable_cluster()->set_problem("nobody listens"); });
  EXPECT_TRUE(tells("cluster", HealthCheckResponse::NOT_SERVING));
  EXPECT_EQ(check("cluster").health, HealthCheckResponse::NOT_SERVING);
}

TEST_F(HealthPortTest, UnknownNamesAreRefusedByName) {
  start();
  const Checked unknown = check_port("device/host:7");
  EXPECT_EQ(unknown.status.error_code(), grpc::StatusCode::NOT_FOUND);
  EXPECT_NE(unknown.status.error_message().find("device/host:7"), std::string::npos)
      << unknown.status.error_message();
  EXPECT_EQ(check_port(std::string(200, 'x')).status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
}

// Nobody knows who calls there.
TEST_F(HealthPortTest, NothingElseIsServedThere) {
  start();
  const auto stub = v1::Control::NewStub(port_channel_);
  v1::GetStatusResponse status;
  EXPECT_EQ(call(*stub, &v1::Control::Stub::GetStatus, {}, status).error_code(),
            grpc::StatusCode::UNIMPLEMENTED);
  v1::DrainResponse drain;
  EXPECT_EQ(call(*stub, &v1::Control::Stub::Drain, {}, drain).error_code(), grpc::StatusCode::UNIMPLEMENTED);
  v1::SetOptionsResponse set;
  EXPECT_EQ(call(*stub, &v1::Control::Stub::SetOptions, {}, set).error_code(),
            grpc::StatusCode::UNIMPLEMENTED);
  EXPECT_FALSE(facade_.drained().has_value());
  grpc::ClientContext context;
  limit(context);
  const auto reader = Health::NewStub(port_channel_)->Watch(&context, HealthCheckRequest());
  HealthCheckResponse response;
  EXPECT_FALSE(reader->Read(&response));
  EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::UNIMPLEMENTED);
}

TEST_F(HealthPortTest, OneAddressCanNotTakeAllConnections) {
  start();
  ASSERT_TRUE(tells("control", HealthCheckResponse::SERVING));  // holds one
  std::vector<UniqueFd> held;
  for (std::size_t i = 0; i + 1 < HealthPort::kMaxOfAddress; ++i) held.push_back(dial());
  for (const UniqueFd& fd : held) EXPECT_FALSE(ends(fd, 20));
  const UniqueFd one_too_many = dial();
  EXPECT_TRUE(ends(one_too_many, 10'000));
  EXPECT_TRUE(tells("control", HealthCheckResponse::SERVING)) << "who was there before is served";
  held.clear();
  bool room = false;
  for (int tries = 0; tries < 500 && !room; ++tries) room = !ends(dial(), 20);
  EXPECT_TRUE(room) << "those that ended count no more";
}

TEST_F(HealthPortTest, GarbageEndsTheConnectionAndNothingElse) {
  start();
  const UniqueFd fd = dial();
  const std::string garbage = "GET /healthz HTTP/1.1\r\n\r\n" + std::string(4096, 'x');
  EXPECT_GT(::send(fd.get(), garbage.data(), garbage.size(), MSG_NOSIGNAL), 0);
  EXPECT_TRUE(ends(fd, 10'000));
  EXPECT_TRUE(tells("control", HealthCheckResponse::SERVING));
}

TEST_F(HealthPortTest, IPv6Too) {
  const UniqueFd probe(::socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in6 loopback{};
  loopback.sin6_family = AF_INET6;
  loopback.sin6_addr = in6addr_loopback;
  if (::bind(probe.get(), reinterpret_cast<const sockaddr*>(&loopback), sizeof(loopback)) != 0)
    GTEST_SKIP() << "this machine has no IPv6";
  start("[::1]:0");
  EXPECT_TRUE(tells("control", HealthCheckResponse::SERVING));
}

TEST_F(HealthPortTest, APortThatIsTakenIsNamed) {
  start();
  ControlOptions other = options_;
  other.socket_path = directory_ + "/other.sock";
  other.health_listen = "127.0.0.1:" + std::to_string(server_->health_port());
  const auto second = ControlServer::start(facade_, other);
  EXPECT_EQ(second.status().code(), StatusCode::kResourceExhausted);
  EXPECT_NE(second.status().message().find(other.health_listen), std::string::npos)
      << second.status().message();
}

TEST_F(HealthPortTest, ItIsOffUnlessItIsAskedFor) {
  ControlTest::start();
  EXPECT_EQ(server_->health_port(), 0);
}

}  // namespace
}  // namespace epd::control
