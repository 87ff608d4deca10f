#include "socket.h"

#include "base/socket_use.h"

#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <string_view>

namespace epd::control {
namespace {

constexpr std::size_t kMaxPath = sizeof(sockaddr_un::sun_path) - 1;
constexpr std::string_view kPathCharacters =
    "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789/._-+=@~,";
constexpr int kBacklog = 64;

std::string octal(mode_t mode) {
  std::array<char, 16> text{};
  std::snprintf(text.data(), text.size(), "0%o", static_cast<unsigned>(mode));
  return text.data();
}

Status denied(const std::string& what) {
  return {StatusCode::kPermissionDenied, what + ": " + std::strerror(errno)};
}

}  // namespace

Status check_socket_options(const ControlOptions& options) {
  const std::string& path = options.socket_path;
  if (path.empty() || path.size() > kMaxPath) {
    return invalid_argument("control socket path '" + path + "' has " + std::to_string(path.size()) +
                            " characters; allowed: 1.." + std::to_string(kMaxPath));
  }
  const std::size_t odd = path.find_first_not_of(kPathCharacters);
  if (odd != std::string::npos) {
    return invalid_argument("control socket path '" + path + "' has an odd character at position " +
                            std::to_string(odd) + "; allowed: letters, digits and /._-+=@~,");
  }
  if ((options.mode & ~mode_t{0777}) != 0) {
    return invalid_argument("control socket mode is " + octal(options.mode) + "; allowed: 0..0777");
  }
  return {};
}

Status clear_socket_path(const std::string& path) {
  struct stat info {};
  if (::lstat(path.c_str(), &info) != 0) {
    if (errno != ENOENT && errno != ENOTDIR) return denied("control socket " + path);
    return make_socket_directory(path, "daemon.control_socket");
  }
  if (!S_ISSOCK(info.st_mode)) {
    return invalid_argument("control socket " + path +
                            ": a file of another kind is there; allowed: a free path or an unused socket");
  }
  const SocketUse use = socket_use(path);
  if (use == SocketUse::kSomebody) {
    return {StatusCode::kAborted, "control socket " + path +
                                      ": another process listens there; stop it first " +
                                      "or choose another path"};
  }
  if (use == SocketUse::kUnknown) {
    return denied("control socket " + path +
                  ": can't tell whether somebody listens (another daemon.control_socket can be named)");
  }
  if (::unlink(path.c_str()) != 0 && errno != ENOENT) return denied("can't remove the stale socket " + path);
  return {};
}

Result<UniqueFd> listen_on(const ControlOptions& options) {
  const std::string& path = options.socket_path;
  UniqueFd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket.valid()) return errno_status("socket");
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.data(), path.size());
  ::fchmod(socket.get(), 0600);  // the file gets this mode
  if (::bind(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0)
    return denied("can't bind the control socket " + path);
  if (options.group && ::chown(path.c_str(), static_cast<uid_t>(-1), *options.group) != 0) {
    return denied("can't give the control socket " + path + " to group " + std::to_string(*options.group) +
                  " (run as root or as a member of the group)");
  }
  if (::chmod(path.c_str(), options.mode) != 0)
    return denied("can't set mode " + octal(options.mode) + " on the control socket " + path);
  if (::listen(socket.get(), kBacklog) != 0) return denied("can't listen on the control socket " + path);
  return socket;
}

}  // namespace epd::control
