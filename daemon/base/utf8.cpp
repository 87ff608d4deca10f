#include "base/utf8.h"

namespace epd {

std::string clean_text(std::string_view text) {
  std::string clean;
  clean.reserve(text.size());
  while (!text.empty()) {
    const std::size_t length = first_character(text).bytes;
    if (length == 0) {
      clean += "\xef\xbf\xbd";
    } else {
      clean += text.substr(0, length);
    }
    text.remove_prefix(length == 0 ? 1 : length);
  }
  return clean;
}

}  // namespace epd
