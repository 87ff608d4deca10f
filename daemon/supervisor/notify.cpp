#include "notify.h"

#include "base/log.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <cstddef>
#include <cstring>

namespace epd::supervisor {

void ServiceNotifier::send(std::string_view message) {
  sockaddr_un address{};
  if (path_.empty() || path_.size() >= sizeof(address.sun_path)) return;
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path_.data(), path_.size());
  if (path_[0] == '@') address.sun_path[0] = '\0';
  const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + path_.size());
  if (!socket_.valid()) socket_.reset(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  const ssize_t n = ::sendto(socket_.get(), message.data(), message.size(), MSG_DONTWAIT | MSG_NOSIGNAL,
                             reinterpret_cast<const sockaddr*>(&address), length);
  if (n >= 0 || complained_) return;
  complained_ = true;
  log_event(LogLevel::kWarning, "service manager not notified",
            {{"socket", path_}, {"reason", errno_status("sendto").message()}});
}

}  // namespace epd::supervisor
