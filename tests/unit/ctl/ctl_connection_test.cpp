// epctl's connection: one for a command, waited for while the daemon's queue is full, made anew after a
// restart.
#include "connection.h"
#include "ctl_fixture.h"
#include "dial.h"

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

// A listener that speaks no gRPC, with a queue for one connection.
class Listener {
 public:
  explicit Listener(const std::string& path) : fd_(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    address_.sun_family = AF_UNIX;
    std::strncpy(address_.sun_path, path.c_str(), sizeof(address_.sun_path) - 1);
    good_ = ::bind(fd_.get(), reinterpret_cast<const sockaddr*>(&address_), sizeof(address_)) == 0 &&
            ::listen(fd_.get(), 0) == 0;
  }
  bool good() const { return good_; }

  // Until the queue is full.
  void flood() {
    for (;;) {
      Descriptor fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
      if (::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address_), sizeof(address_)) != 0) return;
      flood_.push_back(std::move(fd));
    }
  }
  std::size_t flooders() const { return flood_.size(); }

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
  Descriptor take(milliseconds time) const {
    pollfd entry{fd_.get(), POLLIN, 0};
    if (::poll(&entry, 1, static_cast<int>(time.count())) <= 0) return Descriptor();
    return Descriptor(::accept4(fd_.get(), nullptr, nullptr, SOCK_CLOEXEC));
  }

  sockaddr_un address_{};
  Descriptor fd_;
  bool good_ = false;
  std::vector<Descriptor> flood_;
  Descriptor taken_;
};

TEST_F(CtlTest, ACommandMakesOneConnectionAndAnEndBeforeAnyAnswerIsExplained) {
  Listener listener(control_);
  ASSERT_TRUE(listener.good());
  Process status({EPCTL_PATH, "--socket", control_, "--timeout-ms", "20000", "status"});
  ASSERT_TRUE(listener.take_and_end(kHang));
  const Finished result = status.finish();
  EXPECT_EQ(result.exit_code, 3);
  EXPECT_TRUE(result.complains("lost the daemon at " + control_)) << result.err;
  EXPECT_TRUE(result.complains("perhaps it has too many connections: see its log")) << result.err;
  EXPECT_FALSE(listener.take_and_end(milliseconds(0))) << "no second connection";
}

// epctl said that the daemon had refused.
TEST_F(CtlTest, AnotherProgramsSocketIsNoDaemon) {
  Listener listener(control_);
  ASSERT_TRUE(listener.good());
  Process status({EPCTL_PATH, "--socket", control_, "--timeout-ms", "20000", "status"});
  ASSERT_TRUE(listener.take_and_refuse(kHang));
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
  for (std::size_t i = 0; i < listener.flooders(); ++i) ASSERT_TRUE(listener.take_and_end(kHang));
  EXPECT_TRUE(listener.take_and_end(kHang)) << "epctl's";
  EXPECT_TRUE(status.finish().complains("lost the daemon"));
}

TEST_F(CtlTest, CallsGoOnAfterARestartAndSayWhenNobodyListens) {
  start_server();
  Connection connection(control_, 20'000);
  v1::GetStatusResponse status;
  for (int i = 0; i < 2; ++i) ASSERT_FALSE(connection.call(v1::GetStatusRequest(), status).has_value());
  ASSERT_EQ(server_->finish().exit_code, 0);
  const auto gone = connection.call(v1::GetStatusRequest(), status);
  ASSERT_TRUE(gone.has_value());
  EXPECT_EQ(gone->exit, Exit::kUnreachable);
  EXPECT_NE(gone->message.find("no daemon listens"), std::string::npos) << gone->message;
  start_server();
  const auto again = connection.call(v1::GetStatusRequest(), status);
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

TEST(CtlDial, TellsWhyAndWhetherTheOtherSideHasEnded) {
  const auto deadline = steady_clock::now() + kHang;
  EXPECT_EQ(dial("/nowhere/control.sock", deadline).error, ENOENT);
  EXPECT_EQ(dial("", deadline).error, ENAMETOOLONG);
  EXPECT_EQ(dial(std::string(200, 'x'), deadline).error, ENAMETOOLONG);
  int pair[2];
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair), 0);
  const Descriptor mine(pair[0]);
  Descriptor other(pair[1]);
  EXPECT_FALSE(has_ended(mine));
  ASSERT_EQ(::write(other.get(), "x", 1), 1);
  EXPECT_FALSE(has_ended(mine)) << "bytes are no end";
  other.reset();
  EXPECT_TRUE(has_ended(mine));
}

}  // namespace
}  // namespace epd::ctl
