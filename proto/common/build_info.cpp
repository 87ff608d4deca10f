#include "common/build_info.h"

#include "commit.h"

namespace epd {

const BuildInfo& build_info() {
  static constexpr BuildInfo kInfo{EPD_BUILD_VERSION, EPD_COMMIT, EPD_BUILD_HAS_CUDA != 0};
  return kInfo;
}

std::string version_text(const std::string& program) {
  const BuildInfo& info = build_info();
  return program + " " + info.version + "\ncommit " + info.commit +
         (info.cuda_kernels ? ", with CUDA kernels" : ", without CUDA kernels");
}

}  // namespace epd
