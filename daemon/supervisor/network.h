// What engines are told of the network between nodes.
#pragma once

#include "supervisor/config.h"
#include "transport/network.h"

#include <string>

namespace epd::supervisor {

// The interfaces for engines, as far as they are known now.
struct NetworkChoice {
  std::string devices;  // UCX_NET_DEVICES; "": none is known, and engines open no network
  std::string
      addresses;        // of these interfaces, by which UCX listens; "": they are no interfaces of the kernel
  std::string problem;  // why `devices` is empty

  friend bool operator==(const NetworkChoice&, const NetworkChoice&) = default;
};

// "eth0 (10.0.0.1)", or "none".
std::string in_words(const NetworkChoice& choice);

// network.devices; "auto" becomes the interface by which the coordinator is reached, on the coordinator's
// node the one with the address of cluster.listen or cluster.advertise. May ask the resolver, which may take
// seconds. Any thread may call it.
NetworkChoice choose_network(const cluster::Settings& settings, const std::string& devices);

// For a daemon in a cluster, if interfaces are known; otherwise no network is opened.
transport::NetworkOptions network_options(const Config& config, const NetworkChoice& choice);

}  // namespace epd::supervisor
