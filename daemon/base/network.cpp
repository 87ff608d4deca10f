#include "base/network.h"

#include "common/fd.h"

#include <sys/socket.h>
#include <cerrno>
#include <cstring>
#include <string>

namespace epd {

Status may_use_network(int family) {
  const UniqueFd socket(::socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (socket.valid() || (errno != EAFNOSUPPORT && errno != EPERM && errno != EACCES)) return {};
  return {StatusCode::kPermissionDenied,
          std::string("this process may open no network socket: ") + std::strerror(errno) +
              "; allowed: where the service has a network (OPERATING.md, \"Watching\", has the drop-in)"};
}

}  // namespace epd
