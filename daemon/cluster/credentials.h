// gRPC's credentials for both directions, of cluster.tls_* or of cluster.insecure.
#pragma once

#include "good_files.h"

#include <grpcpp/security/credentials.h>
#include <grpcpp/security/server_credentials.h>
#include <memory>

namespace epd::cluster {

struct Credentials {
  std::shared_ptr<grpc::ServerCredentials> server;
  std::shared_ptr<grpc::ChannelCredentials> client;
};
// gRPC looks at `good` each second, and new connections use what they say then. Null with cluster.insecure.
Credentials make_credentials(const GoodFiles* good);

}  // namespace epd::cluster
