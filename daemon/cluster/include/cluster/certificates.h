// This node's certificate, as its files have it now.
#pragma once

#include "cluster/settings.h"
#include "common/status.h"

#include <cstdint>
#include <string>
#include <vector>

namespace epd::cluster {

struct CertificateFacts {
  std::vector<std::string> names;   // DNS names and addresses
  std::int64_t expires_unix_s = 0;  // the first of the chain's certificates
};

// What the files say, in PEM and nothing else.
struct CertificateTexts {
  std::string authorities;
  std::string identity;  // the key, then the chain of its certificate
};

// What is wrong with cluster.tls_ca, tls_cert and tls_key: INVALID_ARGUMENT naming key, value and what is
// allowed. Reads the files; `facts`, if not null, is filled as far as the certificate can be read, and
// `texts` if nothing is wrong.
Status check_certificates(const Settings& settings, CertificateFacts* facts = nullptr,
                          CertificateTexts* texts = nullptr);

}  // namespace epd::cluster
