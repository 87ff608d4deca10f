#include "gpu_list.h"

#include <algorithm>
#include <cctype>
#include <string_view>
#include <utility>

namespace epd::supervisor {
namespace {

bool is_number(std::string_view text) {
  constexpr std::size_t kMostDigits = 4;
  return !text.empty() && text.size() <= kMostDigits &&
         std::all_of(text.begin(), text.end(), [](unsigned char c) { return std::isdigit(c) != 0; });
}

// "GPU-01234567-89ab-cdef-0123-456789abcdef", or "MIG-..." for a part of a GPU.
bool is_uuid(std::string_view text) {
  constexpr std::string_view kForm = "xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx";
  constexpr std::size_t kPrefix = 4;
  if (!text.starts_with("GPU-") && !text.starts_with("MIG-")) return false;
  text.remove_prefix(kPrefix);
  return std::equal(text.begin(), text.end(), kForm.begin(), kForm.end(), [](unsigned char c, char form) {
    return form == 'x' ? std::isxdigit(c) != 0 : c == form;
  });
}

std::string_view trimmed(std::string_view text) {
  const std::size_t first = text.find_first_not_of(' ');
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(' ') - first + 1);
}

std::string in_lower_case(std::string_view uuid) {
  constexpr std::size_t kPrefix = 4;
  std::string text(uuid);
  std::transform(text.begin() + kPrefix, text.end(), text.begin() + kPrefix,
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return text;
}

// "007" is "7".
std::string without_zeros(std::string_view number) {
  const std::size_t first = std::min(number.find_first_not_of('0'), number.size() - 1);
  return std::string(number.substr(first));
}

}  // namespace

bool parse_gpu_list(const std::string& text, GpuList& gpus) {
  gpus = {};
  gpus.automatic = text == "auto";
  if (gpus.automatic || text == "none") return true;
  std::string_view rest = text;
  for (bool more = true; more;) {
    const std::size_t comma = rest.find(',');
    const std::string_view entry = trimmed(rest.substr(0, comma));
    if (gpus.list.size() == kMaxGpus || (!is_number(entry) && !is_uuid(entry))) return false;
    std::string gpu = is_number(entry) ? without_zeros(entry) : in_lower_case(entry);
    if (std::find(gpus.list.begin(), gpus.list.end(), gpu) != gpus.list.end()) return false;
    gpus.list.push_back(std::move(gpu));
    more = comma != std::string_view::npos;
    if (more) rest.remove_prefix(comma + 1);
  }
  return true;
}

}  // namespace epd::supervisor
