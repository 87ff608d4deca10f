// The handshake: from a socket path to a session's descriptors, mapped segments and device.
#pragma once

#include "attach_socket.h"
#include "device.h"
#include "shared_memory.h"

namespace epd::client {

struct Attachment {
  UniqueFd socket;
  UniqueFd engine_bell;  // to ring
  UniqueFd client_bell;  // to be rung by
  Mapping segment_a;     // read-write
  Mapping segment_b;     // read-only
  abi::Welcome welcome{};
  std::unique_ptr<Device> device;   // null: the session is on a host device
  WaitBy wait_by = WaitBy::kMemop;  // of all its streams
};

struct AttachRequest {
  std::string socket_path;
  std::string device;  // "" = any
  Deadline deadline;
  WaitBy wait_by = WaitBy::kMemop;
};

Status attach(const AttachRequest& request, Attachment& out);

}  // namespace epd::client
