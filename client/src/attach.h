// The handshake: from a socket path to a session's descriptors and mapped segments.
#pragma once

#include "attach_socket.h"

namespace epd::client {

struct Attachment {
  UniqueFd socket;
  UniqueFd doorbell;
  Mapping segment_a;  // read-write
  Mapping segment_b;  // read-only
  abi::Welcome welcome{};
};

struct AttachRequest {
  std::string socket_path;
  std::string device;  // "" = any
  Deadline deadline;
};

Status attach(const AttachRequest& request, Attachment& out);

}  // namespace epd::client
