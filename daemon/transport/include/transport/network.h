// An engine's settings of the network between nodes.
#pragma once

#include "proto/far.h"

#include <cstdint>
#include <string>

namespace epd::transport {

// How engines of several nodes reach each other (network.* of the configuration).
struct NetworkOptions {
  std::string library;  // of UCX; empty: engines of other nodes don't reach this one, and nothing is opened
  std::string devices;  // UCX_NET_DEVICES
  std::string transports;  // UCX_TLS
  std::uint64_t batch_bytes = 0;
  std::uint64_t window_bytes = 0;
  std::uint64_t max_bytes = 0;  // of windows and send buffers of all groups
  std::uint32_t peer_timeout_ms = 0;
  abi::FarCheck check = abi::FarCheck::kCrc;
};

}  // namespace epd::transport
