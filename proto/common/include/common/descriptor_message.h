// The message of recvmsg() and sendmsg(): bytes, and descriptors beside them (SCM_RIGHTS).
#pragma once

#include "proto/wire.h"

#include <sys/socket.h>
#include <sys/uio.h>
#include <cstddef>
#include <cstring>
#include <span>
#include <vector>

namespace epd {

class DescriptorMessage {
 public:
  // To receive into `parts`, with space for kMaxMessageFds descriptors.
  explicit DescriptorMessage(std::span<iovec> parts);
  // To send `parts` and at most kMaxMessageFds descriptors, which stay the caller's.
  DescriptorMessage(std::span<iovec> parts, std::span<const int> fds);
  DescriptorMessage(const DescriptorMessage&) = delete;
  DescriptorMessage& operator=(const DescriptorMessage&) = delete;

  msghdr& header() { return header_; }
  // Whether the message was longer than `parts`, or some of its descriptors are lost.
  bool is_cut() const { return (header_.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) != 0; }
  // Appends the descriptors that came: ints, or UniqueFds. Allocates nothing where kMaxMessageFds are
  // reserved.
  template <typename T>
  void take_descriptors(std::vector<T>& fds) {
    for (cmsghdr* c = CMSG_FIRSTHDR(&header_); c != nullptr; c = CMSG_NXTHDR(&header_, c)) {
      if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
      const std::size_t count = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
      for (std::size_t i = 0; i < count; ++i) {
        int fd;
        std::memcpy(&fd, CMSG_DATA(c) + i * sizeof(int), sizeof(int));
        fds.emplace_back(fd);
      }
    }
  }

 private:
  msghdr header_{};
  alignas(cmsghdr) char control_[CMSG_SPACE(abi::kMaxMessageFds * sizeof(int))] = {};
};

}  // namespace epd
