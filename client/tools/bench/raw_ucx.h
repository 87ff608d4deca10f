// ucx_perftest between two nodes, with the settings of their engines.
#pragma once

#include "kit/daemon.h"
#include "kit/nodes.h"

#include <cstdint>
#include <string>
#include <vector>

namespace epd::bench {

class RawUcx {
 public:
  // "", or what is missing here.
  static std::string why_not();
  // Between node 0 and node 1. `batch_bytes`: of a message.
  RawUcx(const kit::OwnNodes& nodes, std::uint64_t batch_bytes);

  // MiB a second, while so many bytes go each way at the same time: of the slower way.
  double stream_mibps(std::uint64_t bytes) const;
  // One message of so many bytes, median of some: half of there and back.
  double one_way_us(std::uint64_t bytes) const;

 private:
  // The program's options.
  struct Ends {
    std::vector<std::string> server;
    std::vector<std::string> client;
  };
  kit::CommandOptions on_node(std::uint32_t node) const;
  // Numbers of the client's last line.
  std::vector<double> run(std::uint32_t from, std::uint32_t to, const Ends& ends) const;

  const kit::OwnNodes& nodes_;
  std::uint64_t batch_bytes_;
  std::vector<std::string> environment_;
};

}  // namespace epd::bench
