// Time, injected so that tests can step it.
#pragma once

#include <cstdint>
#include <ctime>

namespace epd {

class Clock {
 public:
  virtual ~Clock() = default;
  virtual std::uint64_t now_ns() const = 0;  // CLOCK_MONOTONIC
};

class MonotonicClock final : public Clock {
 public:
  std::uint64_t now_ns() const override {
    timespec now{};
    ::clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<std::uint64_t>(now.tv_sec) * 1'000'000'000u + static_cast<std::uint64_t>(now.tv_nsec);
  }
};

// Advances only when told.
class ManualClock final : public Clock {
 public:
  std::uint64_t now_ns() const override { return now_ns_; }
  void advance_ms(std::uint64_t ms) { now_ns_ += ms * 1'000'000; }

 private:
  std::uint64_t now_ns_ = 1'000'000'000;
};

}  // namespace epd
