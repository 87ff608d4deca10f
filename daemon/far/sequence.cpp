#include "far/sequence.h"

#include <algorithm>

namespace epd::far {

bool Sequence::take(std::uint64_t began_ns, std::uint64_t number, std::uint64_t now_ns) {
  if (began_ns < began_ns_) return false;
  if (began_ns > began_ns_) {
    *this = Sequence();
    began_ns_ = began_ns;
  }
  if (number < next_ || number - next_ > kMostAhead) return false;
  if (number != next_) {
    if (!ahead_.insert(number).second) return false;
    if (gap_since_ns_ == 0) gap_since_ns_ = std::max<std::uint64_t>(1, now_ns);
    return true;
  }
  ++next_;
  if (ahead_.empty()) return true;
  while (!ahead_.empty() && *ahead_.begin() == next_) {
    ahead_.erase(ahead_.begin());
    ++next_;
  }
  gap_since_ns_ = ahead_.empty() ? 0 : std::max<std::uint64_t>(1, now_ns);
  return true;
}

}  // namespace epd::far
