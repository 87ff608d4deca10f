// The engine process: `epd engine --device host:0 --link-fd 3 --page-fd 4 --bell-fd 5`.
#pragma once

#include "transport/network.h"

#include "transport/transport.h"

#include <functional>
#include <memory>
#include <string>

namespace epd::engine {

struct EngineOptions {
  std::string device;
  bool resident = false;  // LaunchMode::kResident
  int link_fd = -1;       // socketpair to the supervisor
  int page_fd = -1;       // this engine's EnginePage
  int bell_fd = -1;       // eventfd that peers ring
  transport::NetworkOptions network;
};

// How a transport is opened, with these limits. The engine's proxy calls it in a thread of its own.
using OpenTransport = std::function<Result<std::unique_ptr<transport::Transport>>(const transport::Limits&)>;

// Runs until the supervisor says stop or is gone. Returns the process's exit code.
int engine_main(const EngineOptions& options);
// The same over another network than UCX, if there is to be one: options.network.library is not empty.
int engine_main(const EngineOptions& options, const OpenTransport& open);

}  // namespace epd::engine
