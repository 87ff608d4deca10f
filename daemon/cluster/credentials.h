// gRPC's credentials for both directions, of cluster.tls_* or of cluster.insecure.
#pragma once

#include "cluster/settings.h"

#include <grpcpp/security/credentials.h>
#include <grpcpp/security/server_credentials.h>
#include <memory>

namespace epd::cluster {

struct Credentials {
  std::shared_ptr<grpc::ServerCredentials> server;
  std::shared_ptr<grpc::ChannelCredentials> client;
};
// The files are looked at each second; new connections use what they say then.
Credentials make_credentials(const Settings& settings);

}  // namespace epd::cluster
