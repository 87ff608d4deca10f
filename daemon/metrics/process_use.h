// What this process, the supervisor, takes from the machine, as /proc says it.
#pragma once

#include <cstdint>

namespace epd::metrics {

struct ProcessUse {
  double cpu_seconds = 0;
  double start_seconds = 0;  // Unix time
  std::uint64_t resident_bytes = 0;
  std::uint64_t open_fds = 0;
  std::uint64_t max_fds = 0;
};
// What /proc does not say is 0.
ProcessUse own_use();

}  // namespace epd::metrics
