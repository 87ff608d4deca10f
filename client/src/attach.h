// The handshake: makes descriptors, mapped segments and the device of a session from a socket path.
#pragma once

#include "attach_socket.h"
#include "device.h"
#include "shared_memory.h"

namespace epd::client {

struct Attachment {
  UniqueFd socket;
  UniqueFd engine_bell;  // rings the engine
  UniqueFd client_bell;  // the engine rings this
  Mapping segment_a;     // read-write
  Mapping segment_b;     // read-only
  abi::Welcome welcome{};
  std::unique_ptr<Device> device;   // null: a host device
  WaitBy wait_by = WaitBy::kMemop;  // of all its streams
};

struct AttachRequest {
  std::string socket_path;  // several, with colons between them: the first whose daemon takes the session
  std::string device;       // "" = any
  Deadline deadline;
  WaitBy wait_by = WaitBy::kMemop;
};

Status attach(const AttachRequest& request, Attachment& out);

}  // namespace epd::client
