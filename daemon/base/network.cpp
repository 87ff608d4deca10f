#include "base/network.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <cerrno>
#include <cstdlib>
#include <cstring>

namespace epd {
namespace {

struct Address {
  sockaddr_storage bytes{};
  socklen_t size = 0;
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&bytes); }
};

Address address_of(const std::string& text) {
  Address address;
  const std::size_t colon = text.rfind(':');
  const auto port = htons(static_cast<std::uint16_t>(std::strtoul(text.c_str() + colon + 1, nullptr, 10)));
  if (text.front() == '[') {
    auto& v6 = reinterpret_cast<sockaddr_in6&>(address.bytes);
    v6.sin6_family = AF_INET6;
    v6.sin6_port = port;
    ::inet_pton(AF_INET6, text.substr(1, colon - 2).c_str(), &v6.sin6_addr);
    address.size = sizeof(v6);
  } else {
    auto& v4 = reinterpret_cast<sockaddr_in&>(address.bytes);
    v4.sin_family = AF_INET;
    v4.sin_port = port;
    ::inet_pton(AF_INET, text.substr(0, colon).c_str(), &v4.sin_addr);
    address.size = sizeof(v4);
  }
  return address;
}

}  // namespace

Result<UniqueFd> open_listener(const std::string& key, const std::string& listen, int backlog) {
  const Address address = address_of(listen);
  const std::string option = key + " is \"" + listen + "\": ";
  UniqueFd listener(::socket(address.bytes.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!listener.valid() && (errno == EAFNOSUPPORT || errno == EPERM || errno == EACCES)) {
    return Status(
        StatusCode::kPermissionDenied,
        option + "this process may open no network socket: " + std::strerror(errno) +
            "; allowed: where the service has a network (OPERATING.md, \"Watching\", has the drop-in)");
  }
  const int on = 1;
  if (listener.valid()) ::setsockopt(listener.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  if (!listener.valid() || ::bind(listener.get(), address.get(), address.size) != 0 ||
      ::listen(listener.get(), backlog) != 0) {
    return resource_exhausted(option + std::strerror(errno) +
                              "; allowed: an address of this machine and a port that is free");
  }
  return listener;
}

}  // namespace epd
