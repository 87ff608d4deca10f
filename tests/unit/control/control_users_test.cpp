// Several users of one control plane. Needs root, to connect as others.
#include "control_fixture.h"

#include <fcntl.h>
#include <grpcpp/create_channel_posix.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <chrono>
#include <cstring>
#include <vector>

namespace epd::control {
namespace {

class ControlUsers : public ControlTest {
 protected:
  void SetUp() override {
    ControlTest::SetUp();
    if (::geteuid() != 0) GTEST_SKIP() << "needs root, to connect as other users";
    ASSERT_EQ(::chmod(directory_.c_str(), 0755), 0);
    options_.mode = 0666;
    start();
  }
  // The calling thread alone is that user for a moment: the system call, not the library's function.
  int connect_as(std::uint32_t uid) {
    const int fd = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::strncpy(address.sun_path, options_.socket_path.c_str(), sizeof(address.sun_path) - 1);
    EXPECT_EQ(::syscall(SYS_setresuid, -1, uid, -1), 0);
    EXPECT_EQ(::connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
    EXPECT_EQ(::syscall(SYS_setresuid, -1, 0, -1), 0);
    return fd;
  }
  std::shared_ptr<grpc::Channel> channel_as(std::uint32_t uid) {
    const int fd = connect_as(uid);
    ::fcntl(fd, F_SETFL, O_NONBLOCK);
    return grpc::CreateInsecureChannelFromFd("control", fd);
  }
  // Whom the facade is told of.
  std::uint32_t user_of_a_call(const std::shared_ptr<grpc::Channel>& channel) {
    const auto stub = v1::Control::NewStub(channel);
    v1::ReloadConfigResponse response;
    const grpc::Status status = call(*stub, &v1::Control::Stub::ReloadConfig, {}, response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return facade_.last_operator().uid;
  }
};

// Half of the connections end at once, so the daemon's descriptors of theirs become those of other users.
TEST_F(ControlUsers, EachCallIsThatOfTheUserWhoConnected) {
  std::vector<std::pair<std::uint32_t, std::shared_ptr<grpc::Channel>>> stay;
  for (std::uint32_t uid = 61100; uid < 61160; ++uid) {
    const auto channel = channel_as(uid);
    EXPECT_EQ(user_of_a_call(channel), uid);
    if (uid % 2 == 0) stay.emplace_back(uid, channel);
  }
  for (const auto& [uid, channel] : stay) EXPECT_EQ(user_of_a_call(channel), uid);
}

TEST_F(ControlUsers, RootIsLetInWhenOthersHaveAllConnections) {
  std::vector<int> held;
  for (int i = 0; i < 70; ++i) held.push_back(connect_as(61001));
  channel_ = connect();
  // gRPC does not wait while the listener's backlog is full, but tries again after a second.
  EXPECT_TRUE(channel_->WaitForConnected(std::chrono::system_clock::now() + std::chrono::seconds(20)));
  const grpc::Status status = check("control").status;
  EXPECT_TRUE(status.ok()) << status.error_message();
  for (const int fd : held) ::close(fd);
}

}  // namespace
}  // namespace epd::control
