// Words for an engine page's values about far engines.
#pragma once

#include "proto/far_statistics.h"

#include <string>

namespace epd::supervisor {

// "host:0 of node-b, host:1 of node-b and 3 more": those that the engine has begun to connect to and has not
// heard of. An address that UCX can't bear ends the engine at that time.
std::string connecting_to(const abi::FarTable& table);

}  // namespace epd::supervisor
