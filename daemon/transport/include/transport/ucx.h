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
  // Bodies of this size or more are sent by rendezvous: the receiver fetches them into its own memory.
  // Smaller ones are eager: they are sent with their header. At least 1; all are eager by default.
  std::uint64_t rendezvous_bytes = kAlwaysEager;
  Limits limits;
};

// The environment that a process that opens transports must start with: settings that UCX reads when it is
// loaded, or that ucp_config_modify ignores.
std::vector<std::pair<std::string, std::string>> ucx_environment();

// NOT_FOUND: no library. VERSION_MISMATCH: it is too old. UNSUPPORTED: it lacks a function, or there is no
// such device or transport. Each is named. INVALID_ARGUMENT: an option; or an earlier transport has loaded
// another library.
Result<std::unique_ptr<Transport>> open_ucx(const UcxOptions& options);

}  // namespace epd::transport
