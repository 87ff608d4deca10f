// Transports by UCX: active messages, eager or by rendezvous, one worker.
#pragma once

#include "transport/transport.h"

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace epd::transport {

inline constexpr std::uint64_t kAlwaysEager = ~0ull;

struct UcxOptions {
  std::string library =
      "libucp.so.0";               // opened when the first transport is, kept for the life of the process
  std::string devices;             // UCX_NET_DEVICES; must not be empty
  std::string transports = "tcp";  // UCX_TLS; must not be empty
  // Bodies of so many bytes and more are sent by rendezvous: the receiver fetches them into memory of its
  // own. Smaller ones are eager: they go with their header. At least 1; all are eager by default.
  std::uint64_t rendezvous_bytes = kAlwaysEager;
  Limits limits;
};

// What UCX reads when it is loaded, or of what it ignores ucp_config_modify: the environment in which a
// process that opens transports has to start.
std::vector<std::pair<std::string, std::string>> ucx_environment();

// NOT_FOUND: no library. VERSION_MISMATCH: it is too old. UNSUPPORTED: it lacks a function, or there is no
// such device or transport. Each is named. INVALID_ARGUMENT: an option; or the library is another than that
// of an earlier transport.
Result<std::unique_ptr<Transport>> open_ucx(const UcxOptions& options);

}  // namespace epd::transport
