// The file of a Unix socket: its directory, and whether it is in use. A process that ends may leave its file
// behind.
#pragma once

#include "common/status.h"

#include <sys/types.h>
#include <string>
#include <utility>

namespace epd {

// Makes the directory of the socket that the option names, if it is not there. PERMISSION_DENIED,
// INVALID_ARGUMENT: it can't be made.
Status make_socket_directory(const std::string& path, const std::string& option);

enum class SocketUse {
  kNobody,    // nobody listens there, or there is no such file
  kSomebody,  // a process listens there, by a socket of whatever type
  kUnknown,   // errno says why that can't be told
};
SocketUse socket_use(const std::string& path);

// Identifies the file at the path; {0, 0}: none.
using FileId = std::pair<dev_t, ino_t>;
FileId file_at(const std::string& path);
// Removes the file, unless another one has replaced it.
void remove_file(const std::string& path, const FileId& file);

}  // namespace epd
