// Several users of one control plane: whatever one of them holds, the others are answered. Needs root, to
// connect as others.
#include "control_fixture.h"

#include <fcntl.h>
#include <grpcpp/create_channel_posix.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <cstring>
#include <string_view>
#include <thread>
#include <vector>

namespace epd::control {
namespace {

constexpr std::uint32_t kMallory = 61001;
constexpr std::uint32_t kBob = 61002;
constexpr int kConnections = 40;  // more than a user may have
constexpr int kStreams = 24;      // more than a connection may have

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
  grpc::Status status_as(std::uint32_t uid) {
    const auto stub = v1::Control::NewStub(channel_as(uid));
    v1::GetStatusResponse response;
    return call(*stub, &v1::Control::Stub::GetStatus, {}, response);
  }
};

void put_frame(std::string& out, std::uint8_t type, std::uint8_t flags, std::uint32_t stream,
               std::string_view payload) {
  const auto size = static_cast<std::uint32_t>(payload.size());
  for (const std::uint32_t byte : {size >> 16, size >> 8, size, std::uint32_t{type}, std::uint32_t{flags},
                                   stream >> 24, stream >> 16, stream >> 8, stream})
    out.push_back(static_cast<char>(byte));
  out.append(payload);
}

// Calls of one method, each on a stream of its own, by a client that acknowledges no limit, reads nothing,
// and leaves no room for an answer. `message`: its whole request; "": the stream stays open.
std::string greedy_calls(std::string_view method, std::string_view message) {
  constexpr std::uint8_t kData = 0, kHeaders = 1, kSettings = 4, kEndStream = 1, kEndHeaders = 4;
  std::string out = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
  put_frame(out, kSettings, 0, 0, std::string_view("\0\4\0\0\0\0", 6));  // a window of 0 bytes
  std::string headers;
  for (const auto& [name, value] : {std::pair<std::string_view, std::string_view>(":method", "POST"),
                                    {":scheme", "http"},
                                    {":path", method},
                                    {":authority", "localhost"},
                                    {"te", "trailers"},
                                    {"content-type", "application/grpc"}}) {
    headers.push_back('\0');  // neither name nor value is indexed
    for (const std::string_view text : {name, value}) {
      headers.push_back(static_cast<char>(text.size()));
      headers.append(text);
    }
  }
  for (std::uint32_t i = 0; i < kStreams; ++i) {
    const std::uint32_t stream = 2 * i + 1;
    put_frame(out, kHeaders, kEndHeaders, stream, headers);
    if (!message.empty()) put_frame(out, kData, kEndStream, stream, message);
  }
  return out;
}

class ControlUsersHold : public ControlUsers, public testing::WithParamInterface<int> {};

TEST_P(ControlUsersHold, WhatOneUserHoldsKeepsNoOtherOut) {
  struct Greed {
    std::string_view method;
    std::string_view message;
  };
  const Greed greeds[] = {{"/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", ""},
                          {"/epd.v1.Control/WatchEvents", std::string_view("\0\0\0\0\0", 5)},
                          {"/epd.v1.Control/WatchEvents", std::string_view("\0\0\0\0\2\x10\1", 7)},  // follow
                          {"/epd.v1.Control/GetStatus", std::string_view("\0\0\0\0\0", 5)},
                          {"/grpc.health.v1.Health/Watch", std::string_view("\0\0\0\0\0", 5)},
                          {"", ""}};  // connections alone
  const Greed& greed = greeds[GetParam()];
  const std::string bytes = greed.method.empty() ? "" : greedy_calls(greed.method, greed.message);
  std::vector<int> held;
  for (int i = 0; i < kConnections; ++i) {
    held.push_back(connect_as(kMallory));
    (void)!::send(held.back(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  for (int i = 0; i < 5; ++i) {
    const grpc::Status status = status_as(kBob);
    EXPECT_TRUE(status.ok()) << status.error_code() << ": " << status.error_message();
  }
  for (const int fd : held) ::close(fd);
}

INSTANTIATE_TEST_SUITE_P(Greed, ControlUsersHold, testing::Range(0, 6));

TEST_F(ControlUsers, FollowersAndWatchesAreCountedForEachUser) {
  std::vector<std::unique_ptr<grpc::ClientContext>> contexts;
  std::vector<std::unique_ptr<grpc::ClientReader<v1::WatchEventsResponse>>> followers;
  const auto follow = [&](const std::shared_ptr<grpc::Channel>& channel) {
    contexts.push_back(std::make_unique<grpc::ClientContext>());
    limit(*contexts.back());
    v1::WatchEventsRequest request;
    request.set_follow(true);
    followers.push_back(v1::Control::NewStub(channel)->WatchEvents(contexts.back().get(), request));
    v1::WatchEventsResponse response;
    return followers.back()->Read(&response);
  };
  const auto mallory = channel_as(kMallory);
  for (int i = 0; i < 4; ++i) EXPECT_TRUE(follow(mallory));
  EXPECT_FALSE(follow(mallory));
  const grpc::Status refused = followers.back()->Finish();
  EXPECT_EQ(refused.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(refused.error_message(), "user 61001 has 4 watches of events; allowed: 4");
  const auto bob = channel_as(kBob);
  EXPECT_TRUE(follow(bob));
  for (const auto& context : contexts) context->TryCancel();
}

// There are fewer servers than users may come: they are shared, or used again.
TEST_F(ControlUsers, ManyUsersAreAllAnswered) {
  std::vector<std::shared_ptr<grpc::Channel>> stay;
  for (std::uint32_t uid = 61100; uid < 61130; ++uid) {
    const auto channel = channel_as(uid);
    const auto stub = v1::Control::NewStub(channel);
    v1::GetStatusResponse response;
    const grpc::Status status = call(*stub, &v1::Control::Stub::GetStatus, {}, response);
    EXPECT_TRUE(status.ok()) << uid << ": " << status.error_message();
    if (uid % 2 == 0) stay.push_back(channel);
  }
}

}  // namespace
}  // namespace epd::control
