// epctl's connection: one for a command, waited for while the daemon's queue is full, made again after a
// restart.
#include "connection.h"
#include "ctl_fixture.h"
#include "socket.h"

#include <grpcpp/grpcpp.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <vector>
#include "epd/v1/control.grpc.pb.h"

namespace epd::ctl {
namespace {

// A listener that speaks no gRPC. `backlog` 0: its queue has space for one connection.
class Listener {
 public:
  explicit Listener(const std::string& path, int backlog = 0)
      : fd_(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    address_.sun_family = AF_UNIX;
    std::strncpy(address_.sun_path, path.c_str(), sizeof(address_.sun_path) - 1);
    good_ = ::bind(fd_.get(), reinterpret_cast<const sockaddr*>(&address_), sizeof(address_)) == 0 &&
            ::listen(fd_.get(), backlog) == 0;
  }
  bool good() const { return good_; }

  // Until the queue is full.
  void flood() {
    for (;;) {
      UniqueFd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
      if (::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address_), sizeof(address_)) != 0) return;
      flood_.push_back(std::move(fd));
    }
  }

  // Takes one connection and ends it; false if none comes.
  bool take_and_end(milliseconds time) { return take(time).get() >= 0; }
  // Takes one connection, as a web server does.
  bool take_and_refuse(milliseconds time) {
    constexpr std::string_view kAnswer = "HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n";
    taken_ = take(time);
    return ::send(taken_.get(), kAnswer.data(), kAnswer.size(), MSG_NOSIGNAL) ==
           static_cast<ssize_t>(kAnswer.size());
  }

 private:
  UniqueFd take(milliseconds time) const {
    pollfd entry{fd_.get(), POLLIN, 0};
    if (::poll(&entry, 1, static_cast<int>(time.count())) <= 0) return UniqueFd();
    return UniqueFd(::accept4(fd_.get(), nullptr, nullptr, SOCK_CLOEXEC));
  }

  sockaddr_un address_{};
  UniqueFd fd_;
  bool good_ = false;
  std::vector<UniqueFd> flood_;
  UniqueFd taken_;
};

TEST_F(CtlTest, ConnectionsThatEndAtOnceAreExplained) {
  Listener listener(control_);
  ASSERT_TRUE(listener.good());
  Process status({EPCTL_PATH, "--socket", control_, "--timeout-ms", "20000", "status"});
  while (!status.has_ended()) (void)listener.take_and_end(milliseconds(20));
  const Finished result = status.finish();
  EXPECT_EQ(result.exit_code, 3);
  EXPECT_TRUE(result.complains("lost the daemon at " + control_)) << result.err;
  EXPECT_TRUE(result.complains("perhaps it has too many connections: see its log")) << result.err;
}

// epctl said that the daemon had refused.
TEST_F(CtlTest, AnotherProgramsSocketIsNoDaemon) {
  Listener listener(control_);
  ASSERT_TRUE(listener.good());
  Process status({EPCTL_PATH, "--socket", control_, "--timeout-ms", "20000", "status"});
  while (!status.has_ended()) (void)listener.take_and_refuse(milliseconds(20));
  const Finished result = status.finish();
  EXPECT_EQ(result.exit_code, 3) << result.err;
  EXPECT_TRUE(result.complains(control_)) << result.err;
}

TEST_F(CtlTest, AMessageThatIsTooLongIsExplained) {
  start_server();
  const Finished result = epctl({"waits", std::string(100'000, 'x')});
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_TRUE(result.complains("is an argument very long?")) << result.err;
  EXPECT_TRUE(result.complains("65536")) << result.err;
}

// Says what gRPC says by itself when it has no thread for a call.
class WithoutThreads final : public v1::Control::Service {
 public:
  explicit WithoutThreads(const std::string& path) {
    grpc::ServerBuilder builder;
    builder.AddListeningPort("unix:" + path, grpc::InsecureServerCredentials());
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
  }
  ~WithoutThreads() override {
    if (good()) server_->Shutdown(std::chrono::system_clock::now());
  }
  bool good() const { return server_ != nullptr; }

  grpc::Status GetStatus(grpc::ServerContext* /*context*/, const v1::GetStatusRequest* /*request*/,
                         v1::GetStatusResponse* /*response*/) override {
    return {grpc::StatusCode::RESOURCE_EXHAUSTED, "Server Threadpool Exhausted"};
  }

 private:
  std::unique_ptr<grpc::Server> server_;
};

// epctl asked whether an argument was very long.
TEST_F(CtlTest, ADaemonWithoutThreadsIsNotReached) {
  const WithoutThreads server(control_);
  ASSERT_TRUE(server.good());
  const Finished result = epctl({"status"});
  EXPECT_EQ(result.exit_code, 3);
  EXPECT_TRUE(result.complains("lacks threads or memory for the call: Server Threadpool Exhausted"))
      << result.err;
  EXPECT_FALSE(result.complains("argument")) << result.err;
}

TEST_F(CtlTest, ADaemonThatDoesNotAnswerIsUnreachable) {
  const Listener listener(control_, 8);
  ASSERT_TRUE(listener.good());
  const Finished result = epctl({"--timeout-ms", "200", "status"});
  EXPECT_EQ(result.exit_code, 3);
  EXPECT_TRUE(result.complains("has not answered within 200 ms")) << result.err;
}

TEST_F(CtlTest, AFullQueueIsWaitedForUntilTheTimeIsOver) {
  Listener listener(control_);
  ASSERT_TRUE(listener.good());
  listener.flood();
  const Finished late = epctl({"--timeout-ms", "200", "status"});
  EXPECT_EQ(late.exit_code, 3);
  EXPECT_TRUE(late.complains("has taken no connection within 200 ms")) << late.err;
  const Json json = epctl({"--timeout-ms", "200", "--json", "status"}).json();
  EXPECT_EQ(json["error"]["status"], "DEADLINE_EXCEEDED");
}

TEST_F(CtlTest, APlaceInTheQueueIsTakenWhenThereIsOne) {
  Listener listener(control_);
  ASSERT_TRUE(listener.good());
  listener.flood();
  Process status({EPCTL_PATH, "--socket", control_, "--timeout-ms", "20000", "status"});
  std::this_thread::sleep_for(milliseconds(100));  // it waits by now, or comes later
  EXPECT_FALSE(status.has_ended());
  while (!status.has_ended()) (void)listener.take_and_end(milliseconds(20));
  EXPECT_TRUE(status.finish().complains("lost the daemon"));
}

TEST_F(CtlTest, CallsGoOnAfterARestartAndSayWhenNobodyListens) {
  start_server();
  Connection connection(control_, 20'000);
  v1::GetStatusResponse status;
  for (int i = 0; i < 2; ++i) ASSERT_FALSE(connection.try_call(v1::GetStatusRequest(), status).has_value());
  ASSERT_EQ(server_->finish().exit_code, 0);
  const auto gone = connection.try_call(v1::GetStatusRequest(), status);
  ASSERT_TRUE(gone.has_value());
  EXPECT_EQ(gone->exit, Exit::kUnreachable);
  EXPECT_NE(gone->message.find("no daemon listens"), std::string::npos) << gone->message;
  start_server();
  const auto again = connection.try_call(v1::GetStatusRequest(), status);
  EXPECT_FALSE(again.has_value()) << again->message;
}

TEST_F(CtlTest, AFollowerEndsWithTheDaemon) {
  start_server();
  Process follower({EPCTL_PATH, "--socket", control_, "events", "--follow"});
  ASSERT_TRUE(follower.read_until("rank 1 died"));
  ASSERT_EQ(server_->finish().exit_code, 0);
  server_.reset();
  const Finished result = follower.finish();
  EXPECT_NE(result.exit_code, -1) << "it has ended by itself";
  EXPECT_FALSE(result.complains("too many connections")) << result.err;
}

TEST(CtlSocket, TellsWhyNobodyTakesAConnection) {
  EXPECT_EQ(knock("/nowhere/control.sock").error, ENOENT);
  EXPECT_EQ(knock(std::string(200, 'x')).error, ENAMETOOLONG);
}

}  // namespace
}  // namespace epd::ctl
