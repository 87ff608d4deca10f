// The sockets on which this process listens by TCP.
#pragma once

#include <sys/types.h>
#include <vector>

namespace epd::transport {

struct Listener {
  int fd = -1;
  ino_t inode = 0;  // tells it from a later socket with this descriptor
  friend bool operator==(const Listener&, const Listener&) = default;
};

std::vector<Listener> listeners();
// Whether it has not been closed.
bool is_open(const Listener& listener);

}  // namespace epd::transport
