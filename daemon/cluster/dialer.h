// Streams that this daemon opens, to the coordinator.
#pragma once

#include "channel.h"
#include "cluster/cluster.h"
#include "grpc.h"

#include <memory>
#include <string>

namespace epd::cluster {

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

}  // namespace epd::cluster
