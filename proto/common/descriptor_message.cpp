#include "common/descriptor_message.h"

#include "common/status.h"

namespace epd {

DescriptorMessage::DescriptorMessage(std::span<iovec> parts) {
  header_.msg_iov = parts.data();
  header_.msg_iovlen = parts.size();
  header_.msg_control = control_;
  header_.msg_controllen = sizeof(control_);
}

DescriptorMessage::DescriptorMessage(std::span<iovec> parts, std::span<const int> fds)
    : DescriptorMessage(parts) {
  EPD_CHECK(fds.size() <= abi::kMaxMessageFds);
  header_.msg_controllen = fds.empty() ? 0 : CMSG_SPACE(fds.size_bytes());
  if (fds.empty()) return;
  cmsghdr* c = CMSG_FIRSTHDR(&header_);
  c->cmsg_level = SOL_SOCKET;
  c->cmsg_type = SCM_RIGHTS;
  c->cmsg_len = CMSG_LEN(fds.size_bytes());
  std::memcpy(CMSG_DATA(c), fds.data(), fds.size_bytes());
}

}  // namespace epd
