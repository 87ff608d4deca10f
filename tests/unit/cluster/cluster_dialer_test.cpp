// Streams to the coordinator over gRPC: what is left of them when they end.
#include "grpc.h"

#include <gtest/gtest.h>
#include <functional>
#include <memory>

namespace epd::cluster {
namespace {

struct NoEvents : StreamEvents {
  void on_frame(Stream&, Result<v1::Frame>) override {}
  void on_written(Stream&) override {}
  void on_closed(Stream&, const Status&) override {}
};

// When a process releases its last channel, gRPC stops its threads and frees their queue. A channel that was
// released on such a thread aborted some processes: "assertion failed: prior > 0".
TEST(ClusterDialer, TheLastChannelMayEndWithItsStream) {
  const Credentials credentials = make_credentials(nullptr);
  const Post post = [](const std::function<void()>&) { return false; };
  NoEvents events;
  for (int i = 0; i < 300; ++i) {
    Dialer dialer("127.0.0.1:1", credentials, post, events);  // nobody listens there
    const std::shared_ptr<Stream> stream = dialer.dial();
    if (i % 2 == 0) stream->finish({});
  }
}

}  // namespace
}  // namespace epd::cluster
