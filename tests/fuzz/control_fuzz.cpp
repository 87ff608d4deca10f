// Control requests: whatever bytes arrive as the request of whatever method, through the real server, every
// answer parses or is an error with its details; and whatever texts clients chose, the messages that carry
// them do too. The methods come from the service descriptors, so that a new one is tried without a change
// here. Input: method, flags, then texts for the messages, then the request.

#include "control/control_server.h"
#include "fuzz.h"
#include "support/fake_control_facade.h"

#include <google/protobuf/descriptor.h>
#include <google/protobuf/message.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <unistd.h>
#include <chrono>
#include <filesystem>
#include <memory>
#include <vector>
#include "epd/v1/control.pb.h"
#include "grpc/health/v1/health.pb.h"

namespace epd::test {
namespace {

using google::protobuf::DescriptorPool;
using google::protobuf::MessageFactory;
using google::protobuf::MethodDescriptor;
using std::chrono::milliseconds;

constexpr milliseconds kStreamTime{20};  // a stream that says nothing is ended then
constexpr milliseconds kCallTime{30'000};
constexpr int kMaxMessages = 4;  // of a stream

std::vector<const MethodDescriptor*> all_methods() {
  // Referring to a message of each file keeps its descriptors linked.
  const std::string files[] = {v1::GetStatusRequest::descriptor()->file()->name(),
                               ::grpc::health::v1::HealthCheckRequest::descriptor()->file()->name()};
  std::vector<const MethodDescriptor*> methods;
  for (const std::string& file : files) {
    const auto* descriptor = DescriptorPool::generated_pool()->FindFileByName(file);
    for (int s = 0; s < descriptor->service_count(); ++s) {
      for (int m = 0; m < descriptor->service(s)->method_count(); ++m)
        methods.push_back(descriptor->service(s)->method(m));
    }
  }
  return methods;
}

grpc::ByteBuffer buffer_of(const std::string& bytes) {
  const grpc::Slice slice(bytes);
  return {&slice, 1};
}

std::string bytes_of(const grpc::ByteBuffer& buffer) {
  std::vector<grpc::Slice> slices;
  (void)buffer.Dump(&slices);
  std::string bytes;
  for (const grpc::Slice& slice : slices)
    bytes.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
  return bytes;
}

class Target {
 public:
  Target() : methods_(all_methods()) {
    std::string pattern = (std::filesystem::temp_directory_path() / "epd-fuzz-XXXXXX").string();
    directory_ = ::mkdtemp(pattern.data());
    const std::string socket = directory_ + "/control.sock";
    auto server = control::ControlServer::start(facade_, {socket, 0600, {}});
    require(server.ok(), server.status().to_string());
    server_ = std::move(*server);
    server_->set_serving(true);
    stub_ = std::make_unique<grpc::GenericStub>(
        grpc::CreateChannel("unix:" + socket, grpc::InsecureChannelCredentials()));
  }
  ~Target() {
    stub_.reset();
    server_.reset();
    std::error_code ignored;
    std::filesystem::remove_all(directory_, ignored);
  }

  void run(Bytes input) {
    const MethodDescriptor& method = *methods_[input.byte() % methods_.size()];
    const std::uint8_t flags = input.byte();
    facade_.fail((flags & 1u) != 0 ? Status(static_cast<StatusCode>(1 + input.byte() % (kNumStatusCodes - 1)),
                                            input.text(input.byte()))
                                   : Status());
    const std::string texts[] = {input.text(input.byte() % 64), input.text(input.byte() % 64)};
    facade_.change([&](FakeControlFacade::Views& views) {
      views.sessions.mutable_sessions(0)->set_library(texts[0]);
      views.groups.mutable_groups(0)->set_name(texts[0]);
      views.groups.mutable_groups(0)->set_cause(texts[1]);
      views.devices.mutable_devices(0)->set_last_exit(texts[1]);
      views.config.mutable_entries(0)->set_value(texts[1]);
      views.daemon.set_last_reload_error(texts[0]);
      views.daemon.set_state(v1::DAEMON_STATE_SERVING);
    });
    call(method, input.text(input.left()));
  }

 private:
  void call(const MethodDescriptor& method, const std::string& request) {
    grpc::ClientContext context;
    const bool stream = method.server_streaming();
    context.set_deadline(std::chrono::system_clock::now() + (stream ? kStreamTime : kCallTime));
    grpc::CompletionQueue queue;
    const auto step = [&] {
      void* tag = nullptr;
      bool ok = false;
      return queue.Next(&tag, &ok) && ok;
    };
    const std::string path = "/" + method.service()->full_name() + "/" + method.name();
    auto rpc = stub_->PrepareCall(&context, path, &queue);
    rpc->StartCall(nullptr);
    bool going = step();
    if (going) {
      rpc->WriteLast(buffer_of(request), {}, nullptr);
      going = step();
    }
    int messages = 0;
    while (going) {
      grpc::ByteBuffer answer;
      rpc->Read(&answer, nullptr);
      going = step();
      if (!going) break;
      check_answer(method, bytes_of(answer));
      if (++messages == kMaxMessages) context.TryCancel();
    }
    grpc::Status status;
    rpc->Finish(&status, nullptr);
    (void)step();
    check_status(method, status, messages);
    queue.Shutdown();
    while (step()) {
    }
  }

  static void check_answer(const MethodDescriptor& method, const std::string& bytes) {
    const std::unique_ptr<google::protobuf::Message> message(
        MessageFactory::generated_factory()->GetPrototype(method.output_type())->New());
    require(message->ParseFromString(bytes), method.full_name() + " answers with what its schema says");
  }

  static void check_status(const MethodDescriptor& method, const grpc::Status& status, int messages) {
    const std::string what =
        method.full_name() + " gave " + std::to_string(status.error_code()) + ": " + status.error_message();
    require(status.error_code() >= 0 && status.error_code() <= 16, what);
    require(method.server_streaming() || status.error_code() != grpc::StatusCode::DEADLINE_EXCEEDED ||
                !status.error_details().empty(),
            "an answer in time: " + what);
    require(!status.ok() || method.server_streaming() || messages == 1, "one answer: " + what);
    if (status.error_details().empty()) return;
    v1::ErrorStatus details;
    require(details.ParseFromString(status.error_details()) && details.details_size() == 1,
            "details of " + what);
  }

  const std::vector<const MethodDescriptor*> methods_;
  FakeControlFacade facade_;
  std::string directory_;
  std::unique_ptr<control::ControlServer> server_;
  std::unique_ptr<grpc::GenericStub> stub_;
};

}  // namespace
}  // namespace epd::test

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static epd::test::Target target;
  target.run({data, size});
  return 0;
}
