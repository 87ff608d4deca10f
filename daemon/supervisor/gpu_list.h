// The value of devices.cuda: "auto", "none", or a list of GPUs.
#pragma once

#include "supervisor/config.h"

#include <string>

namespace epd::supervisor {

inline constexpr std::size_t kMaxGpus = 64;
inline constexpr const char* kAllowedGpus =
    R"("auto", "none", or a list of up to 64 different numbers and UUIDs: [0, 1], ["GPU-..."], or 0,1)";

// False: the text is not such a value. UUIDs become lower case, numbers lose zeros in front.
bool parse_gpu_list(const std::string& text, GpuList& gpus);

}  // namespace epd::supervisor
