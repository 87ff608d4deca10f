// The build that a program is of.
#pragma once

#include <string>

namespace epd {

struct BuildInfo {
  const char* version;  // "0.1.0"; between releases "0.1.0+g229aa93f1c2d"
  const char* commit;   // "229aa93f1c2d", with "-dirty" if the sources had changes; "unknown" without git
  bool cuda_kernels;    // GPUs can be served
};
const BuildInfo& build_info();
// The output of a program's --version: "epd 0.1.0\ncommit 229aa93f1c2d, with CUDA kernels"
std::string version_text(const std::string& program);

}  // namespace epd
