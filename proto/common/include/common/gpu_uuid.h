// UUIDs of GPUs, as nvidia-smi -L prints them: "GPU-01234567-89ab-cdef-0123-456789abcdef".
#pragma once

#include "proto/attach.h"

#include <optional>
#include <string>
#include <string_view>

namespace epd {

std::string uuid_text(const abi::GpuUuid& uuid);
// No value: the text is no such UUID.
std::optional<abi::GpuUuid> parse_gpu_uuid(std::string_view text);

}  // namespace epd
