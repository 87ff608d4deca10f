// A stream between two daemons, as the loop sees it: gRPC's (server.h, dialer.h), or a test's.
#pragma once

#include "common/status.h"
#include "epd/v1/cluster.pb.h"

#include <memory>
#include <string>
#include <vector>

namespace epd::cluster {

// Who is at the other end, as the connection says.
struct PeerFacts {
  std::string address;                      // "10.0.0.2:41234"
  bool secure = false;                      // by TLS, with a certificate of cluster.tls_ca
  std::vector<std::string> names;           // DNS names of that certificate
  std::vector<std::string> addresses = {};  // numeric ones of it
};

class Stream;

// On the loop. Nothing follows closed().
class StreamEvents {
 public:
  virtual ~StreamEvents() = default;
  // What read() asked for; not OK: what came is no frame.
  virtual void on_frame(Stream& stream, Result<v1::Frame> frame) = 0;
  virtual void on_written(Stream& stream) = 0;
  virtual void on_closed(Stream& stream, const Status& why) = 0;
};

// All calls on the loop. One frame is read at a time and one written at a time, so nothing queues up on the
// way.
class Stream {
 public:
  virtual ~Stream() = default;
  virtual const PeerFacts& peer() const = 0;  // complete as soon as a frame has come
  virtual void read() = 0;
  virtual void write(const v1::Frame& frame) = 0;
  // Ends it; of a stream that the other end has opened, with this status. Nothing is reported any more.
  virtual void finish(const Status& status) = 0;
};

}  // namespace epd::cluster
