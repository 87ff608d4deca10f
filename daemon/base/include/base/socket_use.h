// Whether the file of a Unix socket is in use. A process that ends may leave its file behind.
#pragma once

#include <sys/types.h>
#include <string>
#include <utility>

namespace epd {

enum class SocketUse {
  kNobody,    // nobody listens there, or there is no such file
  kSomebody,  // a process listens there, by a socket of whatever type
  kUnknown,   // errno says why that can't be told
};
SocketUse socket_use(const std::string& path);

// Which file is at the path; {0, 0}: none.
using FileId = std::pair<dev_t, ino_t>;
FileId file_at(const std::string& path);
// Unless somebody has replaced it.
void remove_file(const std::string& path, const FileId& file);

}  // namespace epd
