// ucx_perftest between two nodes, with the settings of their engines.
#pragma once

#include "kit/nodes.h"

#include <cstdint>
#include <string>
#include <vector>

namespace epd::bench {

class RawUcx {
 public:
  // "", or what is missing here.
  static std::string why_not();
  // From node 0 to node 1. `batch_bytes`: of a message.
  RawUcx(const kit::OwnNodes& nodes, std::uint64_t batch_bytes);

  // MiB a second of so many bytes, one way.
  double stream_mibps(std::uint64_t bytes) const;
  // One message of so many bytes there, median of some: half of there and back.
  double one_way_us(std::uint64_t bytes) const;

 private:
  // Numbers of its last line.
  std::vector<double> run(const std::vector<std::string>& words) const;

  const kit::OwnNodes& nodes_;
  std::uint64_t batch_bytes_;
  std::vector<std::string> environment_;
};

}  // namespace epd::bench
