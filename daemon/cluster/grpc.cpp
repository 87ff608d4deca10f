#include "grpc.h"

#include "frames.h"

#include <grpc/grpc_security_constants.h>
#include <grpcpp/security/tls_certificate_provider.h>
#include <grpcpp/security/tls_credentials_options.h>
#include <grpcpp/support/slice.h>

namespace epd::cluster {

// ---- grpc frames

grpc::ByteBuffer to_bytes(const v1::Frame& frame) {
  const grpc::Slice slice(frame.SerializeAsString());
  return {&slice, 1};
}

Result<v1::Frame> from_bytes(const grpc::ByteBuffer& bytes, std::size_t most) {
  grpc::Slice slice;
  if (!bytes.DumpToSingleSlice(&slice).ok()) return invalid_argument("bytes that are compressed, or none");
  return parse_frame(std::string(reinterpret_cast<const char*>(slice.begin()), slice.size()), most);
}

// FAILED_PRECONDITION: the two ends have no version, or no cluster, in common.
grpc::Status to_grpc(const Status& status) {
  switch (status.code()) {
    case StatusCode::kOk: return grpc::Status::OK;
    case StatusCode::kInvalidArgument: return {grpc::StatusCode::INVALID_ARGUMENT, status.message()};
    case StatusCode::kPermissionDenied: return {grpc::StatusCode::PERMISSION_DENIED, status.message()};
    case StatusCode::kVersionMismatch: return {grpc::StatusCode::FAILED_PRECONDITION, status.message()};
    case StatusCode::kResourceExhausted: return {grpc::StatusCode::RESOURCE_EXHAUSTED, status.message()};
    default: return {grpc::StatusCode::ABORTED, status.message()};
  }
}

Status from_grpc(const grpc::Status& status) {
  const std::string& text = status.error_message();
  switch (status.error_code()) {
    case grpc::StatusCode::OK: return {StatusCode::kAborted, "the other end has ended the stream"};
    case grpc::StatusCode::INVALID_ARGUMENT: return invalid_argument(text);
    case grpc::StatusCode::PERMISSION_DENIED: return {StatusCode::kPermissionDenied, text};
    case grpc::StatusCode::FAILED_PRECONDITION: return {StatusCode::kVersionMismatch, text};
    case grpc::StatusCode::RESOURCE_EXHAUSTED: return resource_exhausted(text);
    case grpc::StatusCode::UNAVAILABLE: return {StatusCode::kDaemonLost, text};
    default: return {StatusCode::kAborted, text};
  }
}

PeerFacts peer_of(const grpc::AuthContext* context) {
  PeerFacts peer;
  if (context == nullptr) return peer;
  for (const grpc::string_ref& name : context->FindPropertyValues(GRPC_PEER_DNS_PROPERTY_NAME))
    peer.names.emplace_back(name.data(), name.size());
  for (const grpc::string_ref& address : context->FindPropertyValues(GRPC_PEER_IP_PROPERTY_NAME))
    peer.addresses.emplace_back(address.data(), address.size());
  peer.secure = context->IsPeerAuthenticated();
  return peer;
}

// ---- credentials

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
