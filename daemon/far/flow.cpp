#include "far/flow.h"

#include "common/status.h"

#include <algorithm>
#include <limits>
#include <utility>

namespace epd::far {

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

}  // namespace epd::far
