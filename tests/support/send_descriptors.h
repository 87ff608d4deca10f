// Bytes with descriptors beside them, by hand: as no sender of ours would send them.
#pragma once

#include <sys/socket.h>
#include <sys/types.h>
#include <cstddef>
#include <cstring>
#include <vector>

namespace epd::test {

// Sends bytes with descriptors. Returns the result of sendmsg().
inline ssize_t send_descriptors(int socket, const void* data, std::size_t bytes,
                                const std::vector<int>& fds) {
  iovec part{const_cast<void*>(data), bytes};
  std::vector<char> control(CMSG_SPACE(fds.size() * sizeof(int)));
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  cmsghdr* c = CMSG_FIRSTHDR(&message);
  c->cmsg_level = SOL_SOCKET;
  c->cmsg_type = SCM_RIGHTS;
  c->cmsg_len = CMSG_LEN(fds.size() * sizeof(int));
  std::memcpy(CMSG_DATA(c), fds.data(), fds.size() * sizeof(int));
  return ::sendmsg(socket, &message, MSG_NOSIGNAL);
}

}  // namespace epd::test
