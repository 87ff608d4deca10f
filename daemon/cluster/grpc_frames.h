// Frames and statuses as gRPC carries them.
#pragma once

#include "common/status.h"
#include "epd/v1/cluster.pb.h"
#include "stream.h"

#include <grpcpp/security/auth_context.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/status.h>
#include <string>
#include <vector>

namespace epd::cluster {

// gRPC ends a stream on which so many times as much as a frame may have comes at once; up to then a frame
// that is too long has a name in the log.
constexpr int kMaxGrpcFrames = 2;
constexpr const char* kAttach = "/epd.v1.Cluster/Attach";

grpc::ByteBuffer to_bytes(const v1::Frame& frame);
Result<v1::Frame> from_bytes(const grpc::ByteBuffer& bytes, std::size_t most);

grpc::Status to_grpc(const Status& status);
Status from_grpc(const grpc::Status& status);

// Of the certificate that the other end has shown; without its address.
PeerFacts peer_of(const grpc::AuthContext* context);

}  // namespace epd::cluster
