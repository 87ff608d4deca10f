// A network of emulated nodes on this machine. Each node has a network and an IPC namespace of its own, in
// which it sees one interface. The interfaces are joined by a bridge in one more namespace. Nothing of it has
// a name outside: the kernel removes all of it with the last process in it and the last descriptor of it.
#pragma once

#include "common/fd.h"

#include <cstdint>
#include <string>
#include <vector>

namespace epd::kit {

struct Traffic {
  std::uint64_t sent_bytes = 0;  // with the link's headers
  std::uint64_t sent_packets = 0;
  std::uint64_t received_bytes = 0;
  std::uint64_t received_packets = 0;
};

class NodeNetwork {
 public:
  static constexpr const char* kInterface = "eth0";
  static constexpr std::uint32_t kMaxNodes = 64;

  // "", or what is missing here. Makes one and removes it.
  static std::string why_not();
  // `rate` is what each node sends at, as tc has it: "4gbit"; empty: as fast as it goes. Throws ToolError.
  // A process that may not make namespaces becomes root of a user namespace first, and stays so. It must have
  // one thread.
  explicit NodeNetwork(std::uint32_t nodes, const std::string& rate = "");

  std::uint32_t size() const { return static_cast<std::uint32_t>(nodes_.size()); }
  std::string address(std::uint32_t node) const;
  // For a process between fork and exec: it is there from now on, with a /sys of its own. "" or what failed.
  const char* enter(std::uint32_t node) const;
  // Counters of the node's interface. In any process forked from this one.
  Traffic traffic(std::uint32_t node) const;
  // The cable between the node and the bridge.
  void plug(std::uint32_t node);
  void unplug(std::uint32_t node);

 private:
  struct Namespaces {
    UniqueFd network, ipc;
    UniqueFd counters;  // /proc/net/dev there
  };
  static Namespaces make_namespaces();
  void add_node(const std::string& rate);
  void run_in(const Namespaces& place, const std::vector<std::string>& words) const;

  Namespaces bridge_;
  std::vector<Namespaces> nodes_;
};

// Bits a second of "4gbit", "500mbit"; 0: empty. Throws ToolError for what else it may be.
double bits_per_second(const std::string& rate);

}  // namespace epd::kit
