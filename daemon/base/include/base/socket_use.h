// Whether the file of a Unix socket is in use. A process that ends may leave its file behind.
#pragma once

#include <string>

namespace epd {

enum class SocketUse {
  kNobody,    // nobody listens there, or there is no such file
  kSomebody,  // a process listens there, by a socket of whatever type
  kUnknown,   // errno says why that can't be told
};
SocketUse socket_use(const std::string& path);

}  // namespace epd
