#include "cluster/settings.h"

#include "cluster/address.h"
#include "common/fd.h"
#include "gate.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/x509.h>
#include <openssl/x509_vfy.h>
#include <openssl/x509v3.h>
#include <sys/stat.h>
#include <unistd.h>
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <limits>
#include <memory>
#include <utility>

namespace epd::cluster {
namespace {

constexpr std::size_t kMaxFileBytes = std::size_t{1} << 20;
constexpr int kMaxCertificates = 1000;  // in one file
// A node's chain must fit into what a coordinator takes before a Hello, beside the rest of the handshake and
// the Hello itself.
constexpr int kMaxChainBytes = static_cast<int>(Gate::kBeforeHello) - (4 << 10);
constexpr const char* kAllowedCertificates = "a file with PEM certificates";
constexpr const char* kAllowedKey = "a file with the PEM private key of cluster.tls_cert";

template <typename T, void (*kFree)(T*)>
struct Freer {
  void operator()(T* object) const { kFree(object); }
};
using Bio = std::unique_ptr<BIO, Freer<BIO, BIO_free_all>>;
using Key = std::unique_ptr<EVP_PKEY, Freer<EVP_PKEY, EVP_PKEY_free>>;
using Store = std::unique_ptr<X509_STORE, Freer<X509_STORE, X509_STORE_free>>;
using StoreContext = std::unique_ptr<X509_STORE_CTX, Freer<X509_STORE_CTX, X509_STORE_CTX_free>>;

using Certificates = std::vector<std::shared_ptr<X509>>;

struct FreeNames {
  void operator()(GENERAL_NAMES* names) const { GENERAL_NAMES_free(names); }
};
struct FreeStack {
  void operator()(STACK_OF(X509) * stack) const { sk_X509_free(stack); }
};

Status refused(const char* key, const std::string& value, const std::string& why,
               const std::string& allowed) {
  return invalid_argument(std::string(key) + " is \"" + value + "\", " + why + "; allowed: " + allowed);
}

// Reads regular files only, so it never waits.
Result<std::string> read_file(const char* key, const std::string& path, const char* allowed) {
  if (path.empty()) return refused(key, path, "which names no file", allowed);
  const auto unreadable = [&](const char* why) {
    return refused(key, path, std::string("which can't be read: ") + why, allowed);
  };
  const UniqueFd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK));
  struct stat info {};
  if (!file.valid() || ::fstat(file.get(), &info) != 0) return unreadable(std::strerror(errno));
  if (!S_ISREG(info.st_mode)) return unreadable("it is no file");
  if (static_cast<std::size_t>(info.st_size) > kMaxFileBytes) return unreadable("it has more than 1 MiB");
  std::string text(static_cast<std::size_t>(info.st_size), '\0');
  std::size_t size = 0;
  while (size < text.size()) {
    const ssize_t n = ::read(file.get(), text.data() + size, text.size() - size);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return unreadable(std::strerror(errno));
    if (n == 0) break;
    size += static_cast<std::size_t>(n);
  }
  text.resize(size);
  return text;
}

Bio bio_of(const std::string& text) {
  return Bio(BIO_new_mem_buf(text.data(), static_cast<int>(text.size())));
}

Result<Certificates> read_certificates(const char* key, const std::string& path) {
  Result<std::string> text = read_file(key, path, kAllowedCertificates);
  if (!text.ok()) return text.status();
  const Bio bio = bio_of(*text);
  Certificates list;
  while (bio != nullptr && list.size() < kMaxCertificates) {
    X509* certificate = PEM_read_bio_X509(bio.get(), nullptr, nullptr, nullptr);
    if (certificate == nullptr) break;
    list.emplace_back(certificate, X509_free);
  }
  // The end of the text, or a certificate that is cut off.
  const unsigned long error = ERR_peek_last_error();
  const bool is_cut = error != 0 && ERR_GET_REASON(error) != PEM_R_NO_START_LINE;
  ERR_clear_error();
  if (is_cut) return refused(key, path, "in which a certificate can't be read", kAllowedCertificates);
  if (list.empty()) return refused(key, path, "which has no certificate", kAllowedCertificates);
  return list;
}

Result<Key> read_key(const std::string& path) {
  Result<std::string> text = read_file("cluster.tls_key", path, kAllowedKey);
  if (!text.ok()) return text.status();
  const Bio bio = bio_of(*text);
  // No password is asked for.
  static char none[] = "";
  Key key(bio == nullptr ? nullptr : PEM_read_bio_PrivateKey(bio.get(), nullptr, nullptr, none));
  ERR_clear_error();
  if (key == nullptr)
    return refused("cluster.tls_key", path, "which has no private key, or one with a password", kAllowedKey);
  return key;
}

std::int64_t seconds_until(const ASN1_TIME* time) {
  int days = 0;
  int seconds = 0;
  if (ASN1_TIME_diff(&days, &seconds, nullptr, time) != 1) return std::numeric_limits<std::int64_t>::min();
  return std::int64_t{days} * 86'400 + seconds;
}

std::int64_t unix_s_of(const ASN1_TIME* time) {
  std::tm parts{};
  return ASN1_TIME_to_tm(time, &parts) == 1 ? ::timegm(&parts) : std::numeric_limits<std::int64_t>::min();
}

std::string text_in(const Bio& bio) {
  char* data = nullptr;
  const long size = BIO_get_mem_data(bio.get(), &data);
  return {data, static_cast<std::size_t>(size)};
}

std::string text_of(const ASN1_TIME* time) {
  const Bio bio(BIO_new(BIO_s_mem()));
  if (bio == nullptr || ASN1_TIME_print(bio.get(), time) != 1) return "an unreadable time";
  return text_in(bio);
}

// DNS names, or all: addresses too.
std::vector<std::string> names_of(X509& certificate, bool all) {
  std::vector<std::string> list;
  const std::unique_ptr<GENERAL_NAMES, FreeNames> names(
      static_cast<GENERAL_NAMES*>(X509_get_ext_d2i(&certificate, NID_subject_alt_name, nullptr, nullptr)));
  for (int i = 0; names != nullptr && i < sk_GENERAL_NAME_num(names.get()); ++i) {
    const GENERAL_NAME* name = sk_GENERAL_NAME_value(names.get(), i);
    if (name->type == GEN_DNS) {
      const ASN1_IA5STRING* text = name->d.dNSName;
      list.emplace_back(reinterpret_cast<const char*>(ASN1_STRING_get0_data(text)),
                        static_cast<std::size_t>(ASN1_STRING_length(text)));
    } else if (all && name->type == GEN_IPADD) {
      const ASN1_OCTET_STRING* bytes = name->d.iPAddress;
      const int family = ASN1_STRING_length(bytes) == 4 ? AF_INET : AF_INET6;
      if (family == AF_INET6 && ASN1_STRING_length(bytes) != 16) continue;
      char text[INET6_ADDRSTRLEN] = "";
      ::inet_ntop(family, ASN1_STRING_get0_data(bytes), text, sizeof(text));
      list.emplace_back(text);
    }
  }
  return list;
}

bool is_for_host(X509& certificate, const std::string& host) {
  if (numeric_address({host, 1})) return X509_check_ip_asc(&certificate, host.c_str(), 0) == 1;
  return X509_check_host(&certificate, host.data(), host.size(), 0, nullptr) == 1;
}

Status check_validity(const char* key, const std::string& path, X509& certificate) {
  if (seconds_until(X509_get0_notBefore(&certificate)) > 0) {
    return refused(key, path, "whose certificate begins at " + text_of(X509_get0_notBefore(&certificate)),
                   "one that is valid now");
  }
  if (seconds_until(X509_get0_notAfter(&certificate)) <= 0) {
    return refused(key, path, "whose certificate expired at " + text_of(X509_get0_notAfter(&certificate)),
                   "one that is valid now");
  }
  return {};
}

// The daemon shows it to nodes that attach and to the coordinator. TLS judges the other end's certificate in
// the same way.
Status check_purpose(const Settings& settings, X509& certificate) {
  const std::uint32_t uses = X509_get_extended_key_usage(&certificate);  // all ones: it says nothing of it
  const char* lacking = (uses & XKU_SSL_SERVER) == 0   ? "serverAuth"
                        : (uses & XKU_SSL_CLIENT) == 0 ? "clientAuth"
                                                       : nullptr;
  if (lacking == nullptr) return {};
  return refused("cluster.tls_cert", settings.tls_cert,
                 std::string("whose extendedKeyUsage lacks ") + lacking,
                 "one with serverAuth and clientAuth, or without extendedKeyUsage");
}

Status check_size(const Settings& settings, const Certificates& chain) {
  int bytes = 0;
  for (const auto& certificate : chain) bytes += i2d_X509(certificate.get(), nullptr);
  if (bytes <= kMaxChainBytes) return {};
  return refused(
      "cluster.tls_cert", settings.tls_cert,
      "whose " + std::to_string(chain.size()) + " certificates have " + std::to_string(bytes) + " bytes",
      std::to_string(kMaxChainBytes) +
          "; only those between the node's certificate and cluster.tls_ca are needed");
}

Status check_chain(const Settings& settings, const Certificates& authorities, const Certificates& chain,
                   int purpose) {
  const Store store(X509_STORE_new());
  const StoreContext context(X509_STORE_CTX_new());
  const std::unique_ptr<STACK_OF(X509), FreeStack> between(sk_X509_new_null());
  if (store == nullptr || context == nullptr || between == nullptr)
    return resource_exhausted("OpenSSL has no memory");
  for (const auto& authority : authorities) X509_STORE_add_cert(store.get(), authority.get());
  for (const auto& certificate : chain) sk_X509_push(between.get(), certificate.get());
  if (X509_STORE_CTX_init(context.get(), store.get(), chain.front().get(), between.get()) != 1)
    return internal_error("OpenSSL can't verify");
  X509_STORE_CTX_set_purpose(context.get(), purpose);
  const bool good = X509_verify_cert(context.get()) == 1;
  ERR_clear_error();
  if (good) return {};
  return refused("cluster.tls_cert", settings.tls_cert,
                 std::string("which does not lead to cluster.tls_ca: ") +
                     X509_verify_cert_error_string(X509_STORE_CTX_get_error(context.get())),
                 "a certificate of that authority");
}

Status write_texts(const Certificates& authorities, const Certificates& chain, EVP_PKEY& key,
                   CertificateTexts& texts) {
  const Bio trusted(BIO_new(BIO_s_mem()));
  const Bio own(BIO_new(BIO_s_mem()));
  bool good = trusted != nullptr && own != nullptr &&
              PEM_write_bio_PrivateKey(own.get(), &key, nullptr, nullptr, 0, nullptr, nullptr) == 1;
  for (const auto& certificate : chain) good = good && PEM_write_bio_X509(own.get(), certificate.get()) == 1;
  for (const auto& authority : authorities)
    good = good && PEM_write_bio_X509(trusted.get(), authority.get()) == 1;
  ERR_clear_error();
  if (!good) return resource_exhausted("OpenSSL has no memory");
  texts = {text_in(trusted), text_in(own)};
  return {};
}

}  // namespace

Status check_certificates(const Settings& settings, CertificateFacts* facts, CertificateTexts* texts) {
  const auto chain = read_certificates("cluster.tls_cert", settings.tls_cert);
  const auto authorities = read_certificates("cluster.tls_ca", settings.tls_ca);
  CertificateFacts found;
  if (chain.ok()) {
    found.names = names_of(*chain.value().front(), true);
    found.expires_unix_s = std::numeric_limits<std::int64_t>::max();
    for (const auto& certificate : chain.value())
      found.expires_unix_s = std::min(found.expires_unix_s, unix_s_of(X509_get0_notAfter(certificate.get())));
    if (facts != nullptr) *facts = found;
  }
  if (!authorities.ok()) return authorities.status();
  if (!chain.ok()) return chain.status();
  X509& own = *chain.value().front();
  const Result<Key> key = read_key(settings.tls_key);
  if (!key.ok()) return key.status();
  if (X509_check_private_key(&own, key.value().get()) != 1) {
    ERR_clear_error();
    return refused("cluster.tls_key", settings.tls_key, "which is not the key of cluster.tls_cert",
                   kAllowedKey);
  }
  for (const auto& certificate : chain.value()) {
    if (Status status = check_validity("cluster.tls_cert", settings.tls_cert, *certificate); !status.ok())
      return status;
  }
  if (Status status = check_purpose(settings, own); !status.ok()) return status;
  if (Status status = check_size(settings, chain.value()); !status.ok()) return status;
  for (const int purpose : {X509_PURPOSE_SSL_SERVER, X509_PURPOSE_SSL_CLIENT}) {
    Status status = check_chain(settings, authorities.value(), chain.value(), purpose);
    if (!status.ok()) return status;
  }
  const std::vector<std::string> dns_names = names_of(own, false);
  const bool named = std::any_of(dns_names.begin(), dns_names.end(),
                                 [&](const std::string& name) { return same_name(name, settings.node); });
  if (!named) {
    return refused("cluster.node", settings.node, "which is no DNS name of cluster.tls_cert",
                   listed(dns_names));
  }
  const std::optional<HostPort> coordinator = parse_host_port(settings.coordinator);
  if (settings.coordinates() && coordinator && !is_for_host(own, coordinator->host)) {
    return refused("cluster.coordinator", settings.coordinator,
                   "whose host is no name of cluster.tls_cert, so nobody would attach here",
                   listed(found.names));
  }
  if (texts == nullptr) return {};
  return write_texts(authorities.value(), chain.value(), *key.value(), *texts);
}

}  // namespace epd::cluster
