#include "grpc.h"

#include "base/thread.h"
#include "frames.h"

#include <grpcpp/grpcpp.h>
#include <grpcpp/resource_quota.h>
#include <sys/resource.h>
#include <algorithm>
#include <chrono>
#include <mutex>
#include <set>
#include <utility>
#include "epd/v1/cluster.grpc.pb.h"

namespace epd::cluster {
namespace {

constexpr int kMaxMemory = 256 << 20;
constexpr int kMaxStreams = 1;        // of a connection
constexpr int kMaxHeaders = 4 << 10;  // bytes, of a stream
constexpr int kHandshakeMs = 5'000;
constexpr int kIdleConnectionMs = 10'000;  // without a stream
constexpr std::chrono::milliseconds kShutdownGrace(200);

using Reactor = grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>;

class ServerStream;

// State that the streams and their service share.
struct Streams {
  Server::Callbacks callbacks;
  Door* door = nullptr;  // as long as there are calls
  std::mutex mutex;
  bool stopped = false;                                // guarded by mutex
  std::set<std::shared_ptr<ServerStream>> unfinished;  // guarded by mutex
};

// gRPC holds the reactor until OnDone, which follows the call of Finish. Until then `reactor_` may be used.
class ServerStream final : public Stream, public std::enable_shared_from_this<ServerStream> {
 public:
  // `key` names its connection at the door.
  ServerStream(std::shared_ptr<Streams> streams, std::string key, PeerFacts peer)
      : streams_(std::move(streams)), key_(std::move(key)), peer_(std::move(peer)) {}

  const PeerFacts& peer() const override { return peer_; }
  void read() override;
  void write(const v1::Frame& frame) override;
  void finish(const Status& status) override { finish(to_grpc(status)); }
  void finish(const grpc::Status& status);

 private:
  friend class AttachReactor;
  // Runs on the loop, if the loop is still running and the stream has not ended.
  void report(std::function<void(ServerStream&)> what);

  const std::shared_ptr<Streams> streams_;
  const std::string key_;
  const PeerFacts peer_;
  std::mutex mutex_;
  Reactor* reactor_ = nullptr;  // null once Finish was called; guarded by mutex_
  grpc::ByteBuffer outgoing_;   // of the write under way
  bool welcomed_ = false;       // on the loop: something was written
  bool closed_ = false;         // on the loop: nothing is reported any more
};

class AttachReactor final : public Reactor {
 public:
  explicit AttachReactor(std::shared_ptr<ServerStream> stream) : stream_(std::move(stream)) {
    stream_->reactor_ = this;
  }
  void OnReadDone(bool ok) override {
    if (!ok) {
      const Status why(StatusCode::kAborted,
                       "the other end is gone, has ended it, or has sent too much at once");
      stream_->report([why](ServerStream& stream) {
        stream.closed_ = true;
        stream.streams_->callbacks.events->on_closed(stream, why);
        stream.finish(why);
      });
      return;
    }
    stream_->streams_->door->took_frame(stream_->key_);
    stream_->report([frame = from_bytes(incoming_, kMaxNodeFrameBytes)](ServerStream& stream) {
      stream.streams_->callbacks.events->on_frame(stream, frame);
    });
  }
  void OnWriteDone(bool ok) override {
    if (!ok) return;  // the read fails too
    stream_->report([](ServerStream& stream) { stream.streams_->callbacks.events->on_written(stream); });
  }
  void OnDone() override { delete this; }

  grpc::ByteBuffer incoming_;

 private:
  const std::shared_ptr<ServerStream> stream_;
};

void ServerStream::read() {
  const std::lock_guard lock(mutex_);
  if (reactor_ != nullptr) reactor_->StartRead(&static_cast<AttachReactor*>(reactor_)->incoming_);
}

// The first frame that is written is Welcome.
void ServerStream::write(const v1::Frame& frame) {
  if (!std::exchange(welcomed_, true)) streams_->door->welcomed(key_);
  const std::lock_guard lock(mutex_);
  if (reactor_ == nullptr) return;
  outgoing_ = to_bytes(frame);
  reactor_->StartWrite(&outgoing_);
}

void ServerStream::finish(const grpc::Status& status) {
  const std::shared_ptr<ServerStream> self = shared_from_this();  // the set's may be the last
  Reactor* reactor = nullptr;
  {
    const std::lock_guard lock(mutex_);
    reactor = std::exchange(reactor_, nullptr);
  }
  if (reactor == nullptr) return;
  streams_->door->closed_stream(key_);
  {
    const std::lock_guard lock(streams_->mutex);
    streams_->unfinished.erase(self);
  }
  reactor->Finish(status);
}

void ServerStream::report(std::function<void(ServerStream&)> what) {
  const bool posted = streams_->callbacks.post([self = shared_from_this(), what = std::move(what)] {
    bool ended = false;
    {
      const std::lock_guard lock(self->mutex_);
      ended = self->reactor_ == nullptr;
    }
    if (!ended && !self->closed_) what(*self);
  });
  if (!posted) finish(grpc::Status(grpc::StatusCode::ABORTED, "the daemon is stopping"));
}

std::string certificate_of(const PeerFacts& peer) {
  std::string names;
  for (const std::string& name : peer.names) names += name + " ";
  return names;
}

class ClusterService final : public v1::Cluster::WithRawCallbackMethod_Attach<v1::Cluster::Service> {
 public:
  explicit ClusterService(std::shared_ptr<Streams> streams) : streams_(std::move(streams)) {}

  Reactor* Attach(grpc::CallbackServerContext* context) override {
    PeerFacts peer = peer_of(context->auth_context().get());
    const std::string key = context->peer();
    const Status opened = streams_->door->opened_stream(key, certificate_of(peer), &peer.address);
    auto stream = std::make_shared<ServerStream>(streams_, key, std::move(peer));
    auto* reactor = new AttachReactor(stream);
    if (!opened.ok()) {
      stream->finish(opened);
      return reactor;
    }
    bool stopped = false;
    {
      const std::lock_guard lock(streams_->mutex);
      stopped = streams_->stopped;
      if (!stopped) streams_->unfinished.insert(stream);
    }
    const bool posted = !stopped && streams_->callbacks.post(
                                        [streams = streams_, stream] { streams->callbacks.opened(stream); });
    if (!posted) stream->finish(grpc::Status(grpc::StatusCode::ABORTED, "the daemon is stopping"));
    return reactor;
  }

 private:
  const std::shared_ptr<Streams> streams_;
};

// Answers methods that no daemon has. Their streams count, too.
class OtherMethods final : public grpc::CallbackGenericService {
 public:
  explicit OtherMethods(std::shared_ptr<Streams> streams) : streams_(std::move(streams)) {}

  grpc::ServerGenericBidiReactor* CreateReactor(grpc::GenericCallbackServerContext* context) override {
    struct Refuser final : grpc::ServerGenericBidiReactor {
      void OnDone() override { delete this; }
    };
    const PeerFacts peer = peer_of(context->auth_context().get());
    (void)streams_->door->opened_stream(context->peer(), certificate_of(peer));
    streams_->door->closed_stream(context->peer());
    auto* reactor = new Refuser;
    reactor->Finish({grpc::StatusCode::UNIMPLEMENTED, std::string("allowed: ") + kAttach});
    return reactor;
  }

 private:
  const std::shared_ptr<Streams> streams_;
};

// A connection takes three descriptors, and most descriptors are for clients.
std::size_t most_connections() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return Door::kMaxConnections;
  return std::min<std::size_t>(Door::kMaxConnections, std::max<rlim_t>(limit.rlim_cur / 8, 16));
}

}  // namespace

struct Server::Impl {
  std::shared_ptr<Streams> streams = std::make_shared<Streams>();
  std::unique_ptr<ClusterService> service;
  std::unique_ptr<OtherMethods> others;
  std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> acceptor;
  std::unique_ptr<grpc::Server> server;
  std::unique_ptr<Door> door;  // hands over to the acceptor, so it goes first
};

Server::Server(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

Door& Server::door() {
  return *impl_->door;
}

Server::~Server() {
  std::set<std::shared_ptr<ServerStream>> unfinished;
  {
    const std::lock_guard lock(impl_->streams->mutex);
    impl_->streams->stopped = true;
    unfinished.swap(impl_->streams->unfinished);
  }
  for (const auto& stream : unfinished)
    stream->finish(grpc::Status(grpc::StatusCode::ABORTED, "the daemon is stopping"));
  impl_->server->Shutdown(std::chrono::system_clock::now() + kShutdownGrace);
  impl_->door->stop();  // it carries what the streams have been told
}

Result<std::unique_ptr<Server>> Server::start(const Settings& settings, const Credentials& credentials,
                                              Callbacks callbacks, Refusals& refusals) {
  auto impl = std::make_unique<Impl>();
  impl->streams->callbacks = std::move(callbacks);
  Impl* parts = impl.get();
  impl->service = std::make_unique<ClusterService>(impl->streams);
  impl->others = std::make_unique<OtherMethods>(impl->streams);
  grpc::ServerBuilder builder;
  builder.RegisterService(impl->service.get());
  builder.RegisterCallbackGenericService(impl->others.get());
  builder.SetMaxReceiveMessageSize(kMaxGrpcFrames * static_cast<int>(kMaxNodeFrameBytes));
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, kMaxStreams);
  builder.AddChannelArgument(GRPC_ARG_MAX_METADATA_SIZE, kMaxHeaders);
  builder.AddChannelArgument(GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS, kHandshakeMs);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONNECTION_IDLE_MS, kIdleConnectionMs);
  builder.AddChannelArgument(GRPC_ARG_ENABLE_PER_MESSAGE_DECOMPRESSION, 0);
  grpc::ResourceQuota quota("cluster");
  quota.Resize(kMaxMemory);
  builder.SetResourceQuota(quota);
  impl->acceptor = builder.experimental().AddExternalConnectionAcceptor(
      grpc::ServerBuilder::experimental_type::ExternalConnectionType::FROM_FD, credentials.server);
  if (Status status = room_for_grpc_server(); !status.ok()) return status;
  impl->server = builder.BuildAndStart();
  if (impl->server == nullptr)
    return internal_error("gRPC could not start its server; see its line in the log");
  Door::Options options;
  options.listen = *numeric_address(*parse_host_port(settings.listen));
  options.secure = !settings.insecure;
  options.max_connections = most_connections();
  // All nodes are on this machine if cluster.insecure is set.
  if (settings.insecure) options.max_of_address = options.max_connections;
  options.hand_over = [parts](UniqueFd inner) {
    const std::lock_guard lock(parts->streams->mutex);
    if (parts->streams->stopped) return;
    grpc::experimental::ExternalConnectionAcceptor::NewConnectionParameters parameters;
    parameters.fd = inner.release();
    parts->acceptor->HandleNewConnection(&parameters);
  };
  Result<std::unique_ptr<Door>> door = Door::open(std::move(options), refusals);
  if (!door.ok()) {
    impl->server->Shutdown(std::chrono::system_clock::now());
    return door.status();
  }
  impl->door = std::move(*door);
  impl->streams->door = impl->door.get();
  if (Status status = impl->door->begin(); !status.ok()) {
    impl->server->Shutdown(std::chrono::system_clock::now());
    return status;
  }
  return std::unique_ptr<Server>(new Server(std::move(impl)));
}

}  // namespace epd::cluster
