// Transports by UCX: active messages, eager at every size, one worker.
#pragma once

#include "transport/transport.h"

#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace epd::transport {

struct UcxOptions {
  std::string library =
      "libucp.so.0";               // opened when the first transport is, kept for the life of the process
  std::string devices;             // UCX_NET_DEVICES; must not be empty
  std::string transports = "tcp";  // UCX_TLS; must not be empty
  Limits limits;
};

// What UCX reads when it is loaded, or of what it ignores ucp_config_modify: the environment in which a
// process that opens transports has to start.
std::vector<std::pair<std::string, std::string>> ucx_environment();

// UNSUPPORTED: no library, one that is too old or lacks a function, no such device or transport; names it.
// INVALID_ARGUMENT: an option; or the library is another than that of an earlier transport.
Result<std::unique_ptr<Transport>> open_ucx(const UcxOptions& options);

}  // namespace epd::transport
