// The common parts of the harnesses: how an input is read, and how a violation ends the run.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

namespace epd::test {

inline void require(bool condition, const std::string& what) {
  if (condition) return;
  std::fprintf(stderr, "violated: %s\n", what.c_str());
  std::abort();
}

// Takes an input apart from front to back; past its end everything is zero.
class Bytes {
 public:
  Bytes(const std::uint8_t* data, std::size_t size) : at_(data), left_(size) {}

  bool empty() const { return left_ == 0; }
  std::size_t left() const { return left_; }
  std::uint8_t byte() {
    std::uint8_t value = 0;
    copy(&value, 1);
    return value;
  }
  std::uint32_t word() {
    std::uint32_t value = 0;
    copy(&value, sizeof(value));
    return value;
  }
  // Fills `bytes` of `to` as far as the input goes; the rest stays what it is.
  std::size_t copy(void* to, std::size_t bytes) {
    const std::size_t n = std::min(bytes, left_);
    if (n != 0) std::memcpy(to, at_, n);
    at_ += n;
    left_ -= n;
    return n;
  }
  std::string text(std::size_t bytes) {
    std::string value(std::min(bytes, left_), '\0');
    copy(value.data(), value.size());
    return value;
  }
  // A few bytes of *value are overwritten from the input: where, how many, with what.
  template <typename T>
  void dent(T& value) {
    for (int times = byte() % 4; times > 0; --times) {
      const std::size_t at = (byte() | static_cast<std::size_t>(byte()) << 8) % sizeof(T);
      copy(reinterpret_cast<std::uint8_t*>(&value) + at,
           std::min<std::size_t>(1 + byte() % 8, sizeof(T) - at));
    }
  }

 private:
  const std::uint8_t* at_;
  std::size_t left_;
};

}  // namespace epd::test
