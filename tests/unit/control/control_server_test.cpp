// The control plane as a server: health and its watches, reflection, shutdown, and the socket it listens on.
#include "control_fixture.h"

#include <google/protobuf/descriptor.h>
#include <google/protobuf/dynamic_message.h>
#include <grpcpp/generic/generic_stub.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <future>
#include <thread>
#include <vector>

namespace epd::control {
namespace {

TEST_F(ControlTest, HealthFollowsTheFacade) {
  start();
  EXPECT_EQ(check("").health, HealthCheckResponse::NOT_SERVING);
  EXPECT_EQ(check("control").health, HealthCheckResponse::SERVING);
  server_->set_serving(true);
  for (const char* name :
       {"daemon", "", "control", "epd.v1.Control", "membership", "device/host:0", "device/host:1"}) {
    const Checked checked = check(name);
    EXPECT_TRUE(checked.status.ok()) << name;
    EXPECT_EQ(checked.health, HealthCheckResponse::SERVING) << name;
  }
  facade_.change(
      [](auto& views) { views.devices.mutable_devices(1)->set_state(v1::DEVICE_STATE_RESTARTING); });
  EXPECT_EQ(check("device/host:1").health, HealthCheckResponse::NOT_SERVING);
  EXPECT_EQ(check("device/host:0").health, HealthCheckResponse::SERVING);
  facade_.change([](auto& views) { views.daemon.set_state(v1::DAEMON_STATE_DRAINING); });
  EXPECT_EQ(check("").health, HealthCheckResponse::NOT_SERVING);
  EXPECT_EQ(check("control").health, HealthCheckResponse::SERVING);
  facade_.fail({StatusCode::kDeadlineExceeded, "the loop has not answered"});
  for (const char* name : {"daemon", "", "control", "membership", "device/host:0"}) {
    const Checked checked = check(name);
    EXPECT_TRUE(checked.status.ok()) << name;
    EXPECT_EQ(checked.health, HealthCheckResponse::NOT_SERVING) << name;
  }
}

TEST_F(ControlTest, HealthOfUnknownServicesIsNotFound) {
  start();
  for (const char* name : {"device/host:7", "device/", "device", "host:0", "epd.v1.Contro"}) {
    EXPECT_EQ(check(name).status.error_code(), grpc::StatusCode::NOT_FOUND) << name;
  }
  EXPECT_NE(check("xyz").status.error_message().find("'xyz'; allowed: daemon (or ''), control "),
            std::string::npos)
      << check("xyz").status.error_message();
  EXPECT_EQ(check(std::string(4000, 'x')).status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
}

TEST_F(ControlTest, WatchTellsChangesAndServicesThatAppear) {
  start();
  grpc::ClientContext context;
  limit(context);
  HealthCheckRequest request;
  request.set_service("device/host:2");
  auto reader = grpc::health::v1::Health::NewStub(channel_)->Watch(&context, request);
  HealthCheckResponse response;
  ASSERT_TRUE(reader->Read(&response));
  EXPECT_EQ(response.status(), HealthCheckResponse::SERVICE_UNKNOWN);
  facade_.change([](auto& views) {
    v1::Device& device = *views.devices.add_devices();
    device = views.devices.devices(1);
    device.set_name("host:2");
  });
  ASSERT_TRUE(reader->Read(&response));
  EXPECT_EQ(response.status(), HealthCheckResponse::SERVING);
  facade_.change([](auto& views) { views.devices.mutable_devices(2)->set_state(v1::DEVICE_STATE_FAILED); });
  ASSERT_TRUE(reader->Read(&response));
  EXPECT_EQ(response.status(), HealthCheckResponse::NOT_SERVING);
  context.TryCancel();
  EXPECT_FALSE(reader->Read(&response));
  EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::CANCELLED);
}

struct OpenWatch {
  grpc::ClientContext context;
  std::unique_ptr<grpc::ClientReader<HealthCheckResponse>> reader;
  HealthCheckResponse response;

  explicit OpenWatch(const std::shared_ptr<grpc::Channel>& channel) {
    limit(context);
    reader = grpc::health::v1::Health::NewStub(channel)->Watch(&context, HealthCheckRequest());
  }
  bool read() { return reader->Read(&response); }
};

TEST_F(ControlTest, ShutdownEndsOpenWatchesAndRemovesTheSocket) {
  start();
  server_->set_serving(true);
  OpenWatch watch(channel_);
  ASSERT_TRUE(watch.read());
  EXPECT_EQ(watch.response.status(), HealthCheckResponse::SERVING);
  auto ended = std::async(std::launch::async, [this] { server_->shutdown(); });
  ASSERT_EQ(ended.wait_for(kHang), std::future_status::ready);
  ASSERT_TRUE(watch.read());
  EXPECT_EQ(watch.response.status(), HealthCheckResponse::NOT_SERVING);
  EXPECT_FALSE(watch.read());
  EXPECT_EQ(watch.reader->Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_NE(::access(options_.socket_path.c_str(), F_OK), 0);
  server_->shutdown();  // again: nothing
}

// Any message of a type that this process knows only by its descriptor.
class Dynamic {
 public:
  explicit Dynamic(const std::string& type) {
    const auto* descriptor = google::protobuf::DescriptorPool::generated_pool()->FindMessageTypeByName(type);
    if (descriptor != nullptr) message_.reset(factory_.GetPrototype(descriptor)->New());
  }
  google::protobuf::Message& operator*() { return *message_; }
  bool valid() const { return message_ != nullptr; }
  void set(const std::string& field, const std::string& value) {
    message_->GetReflection()->SetString(message_.get(), message_->GetDescriptor()->FindFieldByName(field),
                                         value);
  }

 private:
  google::protobuf::DynamicMessageFactory factory_;
  std::unique_ptr<google::protobuf::Message> message_;
};

// One request and its answer over the reflection stream, as text.
std::string reflect(const std::shared_ptr<grpc::Channel>& channel, const std::string& field,
                    const std::string& value) {
  Dynamic request("grpc.reflection.v1alpha.ServerReflectionRequest");
  Dynamic response("grpc.reflection.v1alpha.ServerReflectionResponse");
  if (!request.valid() || !response.valid()) return "the reflection messages are not linked";
  request.set(field, value);
  grpc::Slice slice((*request).SerializeAsString());
  grpc::ByteBuffer out(&slice, 1);
  grpc::ByteBuffer in;
  grpc::Status status;
  grpc::ClientContext context;
  limit(context);
  grpc::CompletionQueue queue;
  grpc::GenericStub stub(channel);
  auto stream =
      stub.PrepareCall(&context, "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", &queue);
  void* tag = nullptr;
  bool ok = false;
  bool good = true;
  const auto step = [&] { good = queue.Next(&tag, &ok) && ok && good; };
  stream->StartCall(nullptr);
  step();
  stream->Write(out, nullptr);
  step();
  stream->Read(&in, nullptr);
  step();
  stream->WritesDone(nullptr);
  step();
  stream->Finish(&status, nullptr);
  step();
  queue.Shutdown();
  std::vector<grpc::Slice> slices;
  if (!good || !status.ok() || !in.Dump(&slices).ok()) return "failed: " + status.error_message();
  std::string bytes;
  for (const auto& part : slices) bytes.append(reinterpret_cast<const char*>(part.begin()), part.size());
  if (!(*response).ParseFromString(bytes)) return "unreadable";
  return (*response).DebugString();
}

TEST_F(ControlTest, ReflectionListsTheServicesAndServesTheirFiles) {
  start();
  const std::string services = reflect(channel_, "list_services", "*");
  EXPECT_NE(services.find("name: \"epd.v1.Control\""), std::string::npos) << services;
  EXPECT_NE(services.find("name: \"grpc.health.v1.Health\""), std::string::npos) << services;
  const std::string file = reflect(channel_, "file_containing_symbol", "epd.v1.Control");
  EXPECT_NE(file.find("epd/v1/control.proto"), std::string::npos) << file;
  const std::string health = reflect(channel_, "file_containing_symbol", "grpc.health.v1.Health");
  EXPECT_NE(health.find("HealthCheckRequest"), std::string::npos) << health;
}

TEST_F(ControlTest, ReflectionIsForThoseWhoMayRead) {
  start();
  facade_.allow(supervisor::Right::kNone);
  const std::string refused = reflect(channel_, "list_services", "*");
  EXPECT_NE(refused.find("may not ask for the API"), std::string::npos) << refused;
}

TEST_F(ControlTest, ReflectionOfAnUnknownFileSaysSo) {
  start();
  EXPECT_NE(reflect(channel_, "file_containing_symbol", "epd.v1.Nothing").find("error_code: 5"),
            std::string::npos);
}

TEST_F(ControlTest, SocketHasTheModeAskedFor) {
  const mode_t before = ::umask(022);
  for (const mode_t mode : {mode_t{0660}, mode_t{0600}, mode_t{0666}}) {
    options_.mode = mode;
    start();
    struct stat info {};
    ASSERT_EQ(::stat(options_.socket_path.c_str(), &info), 0);
    EXPECT_TRUE(S_ISSOCK(info.st_mode));
    EXPECT_EQ(info.st_mode & 07777, mode);
    server_.reset();
  }
  EXPECT_EQ(::umask(before), mode_t{022}) << "the process's umask is left alone";
}

TEST_F(ControlTest, SocketBelongsToTheGroupAskedFor) {
  std::vector<gid_t> groups(128);
  const int count = ::getgroups(static_cast<int>(groups.size()), groups.data());
  gid_t wanted = ::getgid();
  for (int i = 0; i < count; ++i)
    if (groups[static_cast<std::size_t>(i)] != ::getgid()) wanted = groups[static_cast<std::size_t>(i)];
  if (::geteuid() == 0) wanted = 4321;
  options_.group = wanted;
  start();
  struct stat info {};
  ASSERT_EQ(::stat(options_.socket_path.c_str(), &info), 0);
  EXPECT_EQ(info.st_gid, wanted);
}

// Open connections cost descriptors, which all others need too.
TEST_F(ControlTest, ConnectionsAreLimitedAndCountedAnewWhenTheyEnd) {
  start();
  const auto open = [&] {
    const int fd = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::strncpy(address.sun_path, options_.socket_path.c_str(), sizeof(address.sun_path) - 1);
    EXPECT_EQ(::connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
    return fd;
  };
  std::vector<int> fds;
  for (int i = 0; i < 129; ++i) fds.push_back(open());  // more than the daemon's own user may have
  EXPECT_FALSE(check("control").status.ok());
  for (const int fd : fds) ::close(fd);
  bool answers = false;
  for (int i = 0; i < 200 && !answers; ++i) {
    channel_ = connect();
    answers = check("control").status.ok();
    if (!answers) std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  EXPECT_TRUE(answers);
}

TEST_F(ControlTest, StaleSocketIsReplaced) {
  const int fd = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::strncpy(address.sun_path, options_.socket_path.c_str(), sizeof(address.sun_path) - 1);
  ASSERT_EQ(::bind(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
  ::close(fd);
  start();
  EXPECT_TRUE(check("control").status.ok());
}

TEST_F(ControlTest, SocketOfALivingServerIsNotTaken) {
  start();
  test::FakeControlFacade other;
  auto second = ControlServer::start(other, options_);
  ASSERT_FALSE(second.ok());
  EXPECT_EQ(second.status().code(), StatusCode::kAborted);
  EXPECT_TRUE(check("control").status.ok()) << "the first one must go on";
}

// Its file was removed, as by a cleaned directory, and another daemon has begun there.
TEST_F(ControlTest, TheSocketOfASuccessorStays) {
  start();
  ASSERT_EQ(::unlink(options_.socket_path.c_str()), 0);
  test::FakeControlFacade other;
  auto second = ControlServer::start(other, options_);
  ASSERT_TRUE(second.ok()) << second.status().to_string();
  server_->shutdown();
  EXPECT_EQ(::access(options_.socket_path.c_str(), F_OK), 0);
  (*second)->shutdown();
  EXPECT_NE(::access(options_.socket_path.c_str(), F_OK), 0);
}

TEST_F(ControlTest, OtherFilesAreNotRemoved) {
  std::ofstream(options_.socket_path) << "precious";
  auto server = ControlServer::start(facade_, options_);
  ASSERT_FALSE(server.ok());
  EXPECT_EQ(server.status().code(), StatusCode::kInvalidArgument);
  std::string text;
  std::ifstream(options_.socket_path) >> text;
  EXPECT_EQ(text, "precious");
}

// It was asked for, while that of the attach socket was made.
TEST_F(ControlTest, TheDirectoryOfTheSocketIsMade) {
  options_.socket_path = directory_ + "/new/below/control.sock";
  start();
  EXPECT_TRUE(check("control").status.ok());
  server_.reset();
  std::filesystem::remove_all(directory_ + "/new");
}

TEST_F(ControlTest, PathsThatCannotWorkAreRefused) {
  const auto refuse = [&](const std::string& path, StatusCode code) {
    ControlOptions options;
    options.socket_path = path;
    auto server = ControlServer::start(facade_, options);
    ASSERT_FALSE(server.ok()) << path;
    EXPECT_EQ(server.status().code(), code) << server.status().to_string();
  };
  refuse("", StatusCode::kInvalidArgument);
  refuse(directory_ + "/" + std::string(120, 'x'), StatusCode::kInvalidArgument);
  refuse(directory_ + "/a?b", StatusCode::kInvalidArgument);
  std::ofstream(directory_ + "/file") << "precious";
  refuse(directory_ + "/file/control.sock", StatusCode::kInvalidArgument);
  std::filesystem::remove(directory_ + "/file");
  options_.mode = 01777;
  auto server = ControlServer::start(facade_, options_);
  ASSERT_FALSE(server.ok());
  EXPECT_EQ(server.status().code(), StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace epd::control
