// The two ends of gRPC streams between daemons, and what they share.
#pragma once

#include "channel.h"
#include "cluster/cluster.h"
#include "common/status.h"
#include "door.h"
#include "epd/v1/cluster.pb.h"
#include "good_files.h"
#include "refusals.h"

#include <grpcpp/security/auth_context.h>
#include <grpcpp/security/credentials.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/status.h>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace epd::cluster {

// gRPC ends a stream when this many times the limit of a frame arrives at once. Overlong frames below that
// are named in the log.
constexpr int kMaxGrpcFrames = 2;
constexpr const char* kAttach = "/epd.v1.Cluster/Attach";

grpc::ByteBuffer to_bytes(const v1::Frame& frame);
Result<v1::Frame> from_bytes(const grpc::ByteBuffer& bytes, std::size_t most);

grpc::Status to_grpc(const Status& status);
Status from_grpc(const grpc::Status& status);

// Names and addresses of the other end's certificate; `address` stays empty.
PeerFacts peer_of(const grpc::AuthContext* context);

// gRPC's credentials for both directions, from cluster.tls_* or cluster.insecure.
struct Credentials {
  std::shared_ptr<grpc::ServerCredentials> server;
  std::shared_ptr<grpc::ChannelCredentials> client;
};
// gRPC looks at `good` each second and uses it for new connections. Null with cluster.insecure.
Credentials make_credentials(const GoodFiles* good);

// Streams that this daemon opens, to the coordinator.
class Dialer {
 public:
  // Streams report to `events`, on the loop.
  Dialer(std::string address, const Credentials& credentials, Post post, StreamEvents& events);
  ~Dialer();  // ends the streams, and waits until gRPC has let go of them

  // Begins to connect. Each stream has its own connection.
  std::shared_ptr<Stream> dial();

 private:
  struct Shared;
  const std::string address_;
  const std::shared_ptr<grpc::ChannelCredentials> credentials_;
  const std::shared_ptr<Shared> shared_;
};

// The cluster's server: streams that other daemons open.
class Server {
 public:
  struct Callbacks {
    Post post;
    // On the loop: a stream has been opened. It reports to `events`.
    std::function<void(std::shared_ptr<Stream> stream)> opened;
    StreamEvents* events = nullptr;
  };
  static Result<std::unique_ptr<Server>> start(const Settings& settings, const Credentials& credentials,
                                               Callbacks callbacks, Refusals& refusals);
  ~Server();  // ends all streams

  Door& door();

 private:
  struct Impl;
  explicit Server(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace epd::cluster
