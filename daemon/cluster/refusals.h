// Connections, streams and nodes that were refused: counted by reason, and in the log.
#pragma once

#include "base/log.h"
#include "common/status.h"

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace epd::cluster {

enum class Refusal {
  kPlainText,       // on a TLS port; with cluster.insecure: TLS, or anything else that is not HTTP/2
  kHandshake,       // the connection ended before it had opened a stream
  kConnections,     // too many
  kIdentity,        // the name: not in the certificate, or not allowed
  kOtherCluster,    // of another name
  kVersion,         // none in common
  kFrame,           // malformed, overlong, or at the wrong time
  kNotCoordinator,  // asked to take a node in
  kNodes,           // too many, or the name is in use
  kTerm,            // it would be raised again too soon, or beyond the last
  kFlood,           // more bytes or streams than a connection may send
};

// Each kind has its own limit of log lines, so strangers leave room for nodes.
enum class Who {
  kStranger,  // a connection without a stream
  kNode,      // a stream: its certificate has been accepted
};

// From any thread.
class Refusals {
 public:
  void refuse(Who who, Refusal reason, const std::string& peer, const std::string& node,
              const std::string& text);
  // Words and numbers of the reasons that have occurred.
  std::vector<std::pair<std::string, std::uint64_t>> counts() const;

 private:
  LogLimiter strangers_;
  LogLimiter nodes_;
  mutable std::mutex mutex_;
  std::map<Refusal, std::uint64_t> counts_;  // guarded by mutex_
};

}  // namespace epd::cluster
