#include "common/gpu_uuid.h"

#include <charconv>

namespace epd {
namespace {

constexpr std::string_view kPrefix = "GPU-";

bool dash_before(std::size_t byte) {
  return byte == 4 || byte == 6 || byte == 8 || byte == 10;
}

}  // namespace

std::string uuid_text(const abi::GpuUuid& uuid) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string text(kPrefix);
  for (std::size_t i = 0; i < uuid.size(); ++i) {
    if (dash_before(i)) text += '-';
    text += kDigits[uuid[i] >> 4];
    text += kDigits[uuid[i] & 15];
  }
  return text;
}

std::optional<abi::GpuUuid> parse_gpu_uuid(std::string_view text) {
  abi::GpuUuid uuid{};
  if (text.size() != uuid_text(uuid).size() || !text.starts_with(kPrefix)) return std::nullopt;
  const char* at = text.data() + kPrefix.size();
  for (std::size_t i = 0; i < uuid.size(); ++i, at += 2) {
    if (dash_before(i) && *at++ != '-') return std::nullopt;
    if (std::from_chars(at, at + 2, uuid[i], 16).ptr != at + 2) return std::nullopt;
  }
  return uuid;
}

}  // namespace epd
