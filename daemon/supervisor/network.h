// What engines are told of the network between nodes.
#pragma once

#include "supervisor/config.h"
#include "transport/network.h"

namespace epd::supervisor {

// Of a daemon in a cluster; else nothing is opened. network.devices = "auto" is looked up here: the interface
// by which the coordinator is reached. May ask the resolver for cluster.coordinator.
transport::NetworkOptions network_options(const Config& config);

}  // namespace epd::supervisor
