#include "far/flow.h"

#include "common/status.h"

#include <algorithm>
#include <limits>
#include <utility>

namespace epd::far {

// ---- flow

void Window::leave(std::uint64_t tag) {
  order_.erase(std::remove(order_.begin(), order_.end(), tag), order_.end());
}

void Window::take(std::uint64_t tag) {
  EPD_CHECK(available(tag) > 0);
  --credits_;
}

bool Window::give_back(std::uint32_t credits) {
  if (credits > batches_ - credits_) return false;
  credits_ += credits;
  return true;
}

bool Debt::receive() {
  if (held_ + owed_ >= batches_) return false;
  ++held_;
  return true;
}

void Debt::settle(std::uint64_t now_ns) {
  EPD_CHECK(held_ > 0);
  --held_;
  if (owed_++ == 0) since_ns_ = now_ns;
}

bool Debt::is_due(std::uint64_t now_ns) const {
  return owed_ != 0 && (owed_ * 2 >= batches_ || now_ns >= due_ns());
}

std::uint16_t Debt::take() {
  const auto credits =
      static_cast<std::uint16_t>(std::min<std::uint32_t>(owed_, std::numeric_limits<std::uint16_t>::max()));
  owed_ -= credits;
  return credits;
}

// ---- sequence

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
