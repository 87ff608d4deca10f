#include "grpc.h"

#include "cluster/address.h"
#include "frames.h"

#include <grpc/grpc_security_constants.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/security/tls_certificate_provider.h>
#include <grpcpp/security/tls_credentials_options.h>
#include <grpcpp/support/slice.h>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

namespace epd::cluster {

// ---- frames

grpc::ByteBuffer to_bytes(const v1::Frame& frame) {
  const grpc::Slice slice(frame.SerializeAsString());
  return {&slice, 1};
}

Result<v1::Frame> from_bytes(const grpc::ByteBuffer& bytes, std::size_t most) {
  grpc::Slice slice;
  if (!bytes.DumpToSingleSlice(&slice).ok()) return invalid_argument("bytes that are compressed, or none");
  return parse_frame(std::string(reinterpret_cast<const char*>(slice.begin()), slice.size()), most);
}

// FAILED_PRECONDITION: the two ends have no version, or no cluster, in common.
grpc::Status to_grpc(const Status& status) {
  switch (status.code()) {
    case StatusCode::kOk: return grpc::Status::OK;
    case StatusCode::kInvalidArgument: return {grpc::StatusCode::INVALID_ARGUMENT, status.message()};
    case StatusCode::kPermissionDenied: return {grpc::StatusCode::PERMISSION_DENIED, status.message()};
    case StatusCode::kVersionMismatch: return {grpc::StatusCode::FAILED_PRECONDITION, status.message()};
    case StatusCode::kResourceExhausted: return {grpc::StatusCode::RESOURCE_EXHAUSTED, status.message()};
    default: return {grpc::StatusCode::ABORTED, status.message()};
  }
}

Status from_grpc(const grpc::Status& status) {
  const std::string& text = status.error_message();
  switch (status.error_code()) {
    case grpc::StatusCode::OK: return {StatusCode::kAborted, "the other end has ended the stream"};
    case grpc::StatusCode::INVALID_ARGUMENT: return invalid_argument(text);
    case grpc::StatusCode::PERMISSION_DENIED: return {StatusCode::kPermissionDenied, text};
    case grpc::StatusCode::FAILED_PRECONDITION: return {StatusCode::kVersionMismatch, text};
    case grpc::StatusCode::RESOURCE_EXHAUSTED: return resource_exhausted(text);
    case grpc::StatusCode::UNAVAILABLE: return {StatusCode::kDaemonLost, text};
    default: return {StatusCode::kAborted, text};
  }
}

PeerFacts peer_of(const grpc::AuthContext* context) {
  PeerFacts peer;
  if (context == nullptr) return peer;
  for (const grpc::string_ref& name : context->FindPropertyValues(GRPC_PEER_DNS_PROPERTY_NAME))
    peer.names.emplace_back(name.data(), name.size());
  for (const grpc::string_ref& address : context->FindPropertyValues(GRPC_PEER_IP_PROPERTY_NAME))
    peer.addresses.emplace_back(address.data(), address.size());
  peer.secure = context->IsPeerAuthenticated();
  return peer;
}

// ---- credentials

namespace {

constexpr unsigned kLookEachSeconds = 1;

}  // namespace

Credentials make_credentials(const GoodFiles* good) {
  if (good == nullptr) return {grpc::InsecureServerCredentials(), grpc::InsecureChannelCredentials()};
  namespace tls = grpc::experimental;
  const auto files = std::make_shared<tls::FileWatcherCertificateProvider>(
      good->identity(), good->identity(), good->authorities(), kLookEachSeconds);
  tls::TlsServerCredentialsOptions server(files);
  server.watch_root_certs();
  server.watch_identity_key_cert_pairs();
  server.set_cert_request_type(GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
  // The host of cluster.coordinator must be a name of the certificate there: gRPC's own rule.
  tls::TlsChannelCredentialsOptions client;
  client.set_certificate_provider(files);
  client.watch_root_certs();
  client.watch_identity_key_cert_pairs();
  client.set_verify_server_certs(true);
  return {tls::TlsServerCredentials(server), tls::TlsCredentials(client)};
}

// ---- dialer

namespace {

constexpr int kConnectMs = 2'000;

class ClientStream;
using GrpcChannel = std::shared_ptr<grpc::Channel>;

}  // namespace

struct Dialer::Shared {
  Shared(Post where, StreamEvents& who) : post(std::move(where)), events(who) {}
  // Ends the channels of calls that gRPC has let go of. Called on the loop, or after it has ended.
  void end_channels() {
    std::unique_lock lock(mutex);
    const std::vector<GrpcChannel> ending = std::exchange(left, {});
    lock.unlock();
  }
  const Post post;
  StreamEvents& events;
  std::mutex mutex;
  std::condition_variable gone;
  std::set<std::shared_ptr<Stream>> under_way;  // those whose call gRPC still has; guarded by mutex
  // Channels of ended calls; guarded by mutex. When a process releases its last channel, gRPC stops the
  // threads that run reactions and frees their queue. So such a thread must not release one.
  std::vector<GrpcChannel> left;
};

namespace {

// gRPC holds the call until OnDone. It comes when the stream has ended and release() was called, which is
// done once: by the reaction that learns of the end.
class AttachCall final : public grpc::ClientBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  AttachCall(GrpcChannel channel, std::shared_ptr<ClientStream> stream)
      : stub(channel), channel_(std::move(channel)), stream_(std::move(stream)) {}

  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override;
  void OnDone(const grpc::Status& status) override;

  grpc::ClientContext context;
  grpc::GenericStub stub;
  grpc::ByteBuffer incoming;
  grpc::ByteBuffer outgoing;

 private:
  GrpcChannel channel_;
  std::shared_ptr<ClientStream> stream_;
};

class ClientStream final : public Stream, public std::enable_shared_from_this<ClientStream> {
 public:
  // `gone`: gRPC has let go of the call. It takes the call's channel.
  using Gone = std::function<void(const std::shared_ptr<Stream>&, GrpcChannel)>;
  ClientStream(Post post, StreamEvents& events, Gone gone)
      : post_(std::move(post)), events_(events), gone_(std::move(gone)) {}

  void start(AttachCall& call) {
    call_ = &call;
    call.stub.PrepareBidiStreamingCall(&call.context, kAttach, {}, &call);
    call.AddHold();
    call.StartCall();
  }

  const PeerFacts& peer() const override { return peer_; }
  void read() override {
    const std::lock_guard lock(mutex_);
    if (call_ != nullptr) call_->StartRead(&call_->incoming);
  }
  void write(const v1::Frame& frame) override {
    const std::lock_guard lock(mutex_);
    if (call_ == nullptr) return;
    call_->outgoing = to_bytes(frame);
    call_->StartWrite(&call_->outgoing);
  }
  void finish(const Status& /*status*/) override {
    closed_ = true;
    release(true);
  }

  // Called by gRPC's threads.
  void came(Result<v1::Frame> frame, PeerFacts peer) {
    report([frame = std::move(frame), peer = std::move(peer)](ClientStream& stream) {
      stream.peer_ = peer;
      stream.events_.on_frame(stream, frame);
    });
  }
  void written() {
    report([](ClientStream& stream) { stream.events_.on_written(stream); });
  }
  // Ends gRPC's call, once. `cancel`: it has not ended by itself.
  void release(bool cancel) {
    AttachCall* call = nullptr;
    {
      const std::lock_guard lock(mutex_);
      call = std::exchange(call_, nullptr);
    }
    if (call == nullptr) return;
    if (cancel) call->context.TryCancel();
    call->RemoveHold();
  }
  void ended(const Status& why) {
    report([why](ClientStream& stream) {
      stream.closed_ = true;
      stream.events_.on_closed(stream, why);
    });
  }
  void gone(GrpcChannel channel) { gone_(shared_from_this(), std::move(channel)); }

 private:
  void report(std::function<void(ClientStream&)> what) {
    post_([self = shared_from_this(), what = std::move(what)] {
      if (!self->closed_) what(*self);
    });
  }

  const Post post_;
  StreamEvents& events_;
  const Gone gone_;
  std::mutex mutex_;
  AttachCall* call_ = nullptr;  // null once it has ended; guarded by mutex_
  PeerFacts peer_;              // on the loop
  bool closed_ = false;         // on the loop: nothing is reported any more
};

void AttachCall::OnReadDone(bool ok) {
  if (!ok) {
    stream_->release(false);
    return;
  }
  PeerFacts peer = peer_of(context.auth_context().get());
  peer.address = peer_text(context.peer());
  stream_->came(from_bytes(incoming, kMaxFrameBytes), std::move(peer));
}

void AttachCall::OnWriteDone(bool ok) {
  if (ok) stream_->written();
}

void AttachCall::OnDone(const grpc::Status& status) {
  const std::shared_ptr<ClientStream> stream = stream_;
  GrpcChannel channel = std::move(channel_);
  stream->ended(from_grpc(status));
  delete this;
  stream->gone(std::move(channel));
}

}  // namespace

Dialer::Dialer(std::string address, const Credentials& credentials, Post post, StreamEvents& events)
    : address_(std::move(address)),
      credentials_(credentials.client),
      shared_(std::make_shared<Shared>(std::move(post), events)) {}

Dialer::~Dialer() {
  std::unique_lock lock(shared_->mutex);
  const std::set<std::shared_ptr<Stream>> streams = shared_->under_way;
  lock.unlock();
  for (const auto& stream : streams) stream->finish({});
  lock.lock();
  shared_->gone.wait(lock, [this] { return shared_->under_way.empty(); });
  lock.unlock();
  shared_->end_channels();
}

std::shared_ptr<Stream> Dialer::dial() {
  grpc::ChannelArguments arguments;
  // A connection that is dead on one side only must not carry the next stream too.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, kConnectMs);  // how long connecting may take
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  arguments.SetInt(GRPC_ARG_ENABLE_PER_MESSAGE_DECOMPRESSION, 0);
  arguments.SetMaxReceiveMessageSize(kMaxGrpcFrames * static_cast<int>(kMaxFrameBytes));
  auto stream = std::make_shared<ClientStream>(
      shared_->post, shared_->events,
      [shared = shared_](const std::shared_ptr<Stream>& gone, GrpcChannel channel) {
        {
          const std::lock_guard lock(shared->mutex);
          shared->left.push_back(std::move(channel));
        }
        shared->post([shared] { shared->end_channels(); });
        const std::lock_guard lock(shared->mutex);
        shared->under_way.erase(gone);
        shared->gone.notify_all();
      });
  auto* call = new AttachCall(grpc::CreateCustomChannel(address_, credentials_, arguments), stream);
  {
    const std::lock_guard lock(shared_->mutex);
    shared_->under_way.insert(stream);
  }
  stream->start(*call);
  return stream;
}

}  // namespace epd::cluster
