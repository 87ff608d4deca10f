// The cluster's server: streams that other daemons open.
#pragma once

#include "channel.h"
#include "cluster/cluster.h"
#include "door.h"
#include "grpc.h"
#include "refusals.h"

#include <functional>
#include <memory>

namespace epd::cluster {

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
