// The configuration of the cluster, judged as a whole.
#pragma once

#include "common/status.h"

#include <cstdint>
#include <string>
#include <vector>

namespace epd::cluster {

// cluster.* of the configuration.
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

struct CertificateFacts {
  std::vector<std::string> names;   // DNS names and addresses
  std::int64_t expires_unix_s = 0;  // the first of the chain's certificates
};

// The contents of the files, as PEM without other text.
struct CertificateTexts {
  std::string authorities;
  std::string identity;  // the key, then the chain of its certificate
};

// Judges the files cluster.tls_ca, tls_cert and tls_key. INVALID_ARGUMENT names key, value and what is
// allowed. `facts`, if not null, is filled as far as the certificate can be read, and `texts` if nothing is
// wrong.
Status check_certificates(const Settings& settings, CertificateFacts* facts = nullptr,
                          CertificateTexts* texts = nullptr);

}  // namespace epd::cluster
