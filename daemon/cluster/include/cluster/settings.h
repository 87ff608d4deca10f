// What the configuration says of the cluster, judged as a whole.
#pragma once

#include "common/status.h"

#include <cstdint>
#include <string>
#include <vector>

namespace epd::cluster {

// As cluster.* of the configuration.
struct Settings {
  std::string name;
  std::string node;
  std::string listen;       // numeric address and port
  std::string advertise;    // host:port
  std::string coordinator;  // host:port
  std::vector<std::string> nodes;
  std::string tls_ca;
  std::string tls_cert;
  std::string tls_key;
  bool insecure = false;
  std::uint32_t heartbeat_ms = 0;
  std::uint32_t node_timeout_ms = 0;
  // "PATTERN=FIRST-LAST" or "PATTERN=UID": users for whom the nodes of such names may speak. Empty: all for
  // all.
  std::vector<std::string> users = {};

  // Whether this node is the coordinator.
  bool coordinates() const;
  // Whether the names that may attach include this one.
  bool allows(const std::string& name) const;
  // Whether ranks that this node tells of may be the user's; PERMISSION_DENIED: they may not.
  Status check_user(const std::string& other, std::uint32_t uid) const;
};

// Fills in what is empty: `node` with the host's name, `advertise` with the node's name and the port of
// `listen`. Writes numeric addresses in one form. INVALID_ARGUMENT naming key, value and what is allowed;
// looks at the certificate files too.
Result<Settings> complete(Settings settings);

}  // namespace epd::cluster
