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
  int link_fd = -1;  // socketpair to the supervisor
  int page_fd = -1;  // this engine's EnginePage
  int bell_fd = -1;  // eventfd that peers ring
  transport::NetworkOptions network;
};

// Opens a transport with these limits. The engine's proxy calls it in its own thread.
using OpenTransport = std::function<Result<std::unique_ptr<transport::Transport>>(const transport::Limits&)>;

// Runs until the supervisor says stop or ends. Returns the process's exit code.
int engine_main(const EngineOptions& options);
// The same with another network than UCX, if options.network.library is not empty.
int engine_main(const EngineOptions& options, const OpenTransport& open);

}  // namespace epd::engine
