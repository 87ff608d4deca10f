// The settings of the network between nodes that engines receive.
#pragma once

#include "supervisor/config.h"
#include "transport/network.h"

#include <string>
#include <vector>

namespace epd::supervisor {

// The interfaces for engines, as far as they are known now.
struct NetworkChoice {
  std::string devices;  // UCX_NET_DEVICES; "": none is known, and engines open no network
  // UCX listens at these, one of each interface. None: they have none, or are no interfaces of the kernel.
  std::vector<std::string> addresses;
  std::vector<std::string> held;  // all addresses of these interfaces
  std::string problem;            // why `devices` is empty

  friend bool operator==(const NetworkChoice& a, const NetworkChoice& b) {
    return a.devices == b.devices && a.addresses == b.addresses;
  }
};
// Whether `now` lacks what `known` has. An interface may be down for a while: that says nothing new.
bool lacks(const NetworkChoice& now, const NetworkChoice& known);
// Whether an engine that was started with `given` listens elsewhere than `now` says. Another address of the
// same interface changes nothing as long as those that were given are there.
bool is_outdated(const NetworkChoice& given, const NetworkChoice& now);

// "eth0 (10.0.0.1)", or "none".
std::string in_words(const NetworkChoice& choice);

// network.devices; "auto" becomes the interface by which the coordinator is reached, on the coordinator's
// node the one with the address of cluster.listen or cluster.advertise. May ask the resolver, which may take
// seconds. Any thread may call it.
NetworkChoice choose_network(const cluster::Settings& settings, const std::string& devices);

// For a daemon in a cluster, if interfaces are known; otherwise no network is opened.
transport::NetworkOptions network_options(const Config& config, const NetworkChoice& choice);

}  // namespace epd::supervisor
