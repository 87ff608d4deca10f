#include "credentials.h"

#include <grpcpp/security/tls_certificate_provider.h>
#include <grpcpp/security/tls_credentials_options.h>

namespace epd::cluster {
namespace {

constexpr unsigned kLookEachSeconds = 1;

}  // namespace

Credentials make_credentials(const GoodFiles* good) {
  if (good == nullptr) return {grpc::InsecureServerCredentials(), grpc::InsecureChannelCredentials()};
  namespace tls = grpc::experimental;
  const auto files = std::make_shared<tls::FileWatcherCertificateProvider>(
      good->identity(), good->identity(), good->authorities(), kLookEachSeconds);
  tls::TlsServerCredentialsOptions server(files);
  server.watch_root_certs();
  server.watch_identity_key_cert_pairs();
  server.set_cert_request_type(GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
  // The host of cluster.coordinator must be a name of the certificate there: gRPC's own rule.
  tls::TlsChannelCredentialsOptions client;
  client.set_certificate_provider(files);
  client.watch_root_certs();
  client.watch_identity_key_cert_pairs();
  client.set_verify_server_certs(true);
  return {tls::TlsServerCredentials(server), tls::TlsCredentials(client)};
}

}  // namespace epd::cluster
