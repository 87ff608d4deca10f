#pragma once

#include "channel.h"
#include "common/status.h"
#include "epd/v1/cluster.pb.h"
#include "good_files.h"

#include <grpcpp/security/auth_context.h>
#include <grpcpp/security/credentials.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/status.h>
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

}  // namespace epd::cluster
