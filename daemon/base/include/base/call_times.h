// How long calls of each kind took, and with what status they ended. Any thread may add and read.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <string_view>

namespace epd {

class CallTimes {
 public:
  // Upper bounds of the buckets but the last, in seconds: each twice the one before, 0.25 ms to 4 s.
  static constexpr std::array<double, 15> kBounds_s = [] {
    std::array<double, 15> bounds{};
    double bound = 0.25e-3;
    for (double& of : bounds) {
      of = bound;
      bound *= 2;
    }
    return bounds;
  }();

  struct Calls {
    std::array<std::uint64_t, kBounds_s.size() + 1> buckets{};  // the last: longer than all bounds
    double seconds = 0;                                         // of all calls
    std::map<std::string, std::uint64_t, std::less<>> failed;   // by the status's name
  };
  // All calls, by name.
  using All = std::map<std::string, Calls, std::less<>>;

  // `failed`: the name of the status; "" if the call succeeded. Names come from the program, so they are few.
  void add(std::string_view call, double seconds, std::string_view failed) {
    const std::lock_guard lock(mutex_);
    Calls& calls = entry(all_, call);
    std::size_t bucket = 0;
    while (bucket < kBounds_s.size() && seconds > kBounds_s[bucket]) ++bucket;
    ++calls.buckets[bucket];
    calls.seconds += seconds;
    if (!failed.empty()) ++entry(calls.failed, failed);
  }
  All all() const {
    const std::lock_guard lock(mutex_);
    return all_;
  }

 private:
  template <typename Map>
  static typename Map::mapped_type& entry(Map& map, std::string_view name) {
    const auto found = map.find(name);
    return found != map.end() ? found->second : map.try_emplace(std::string(name)).first->second;
  }

  mutable std::mutex mutex_;
  All all_;  // guarded by mutex_
};

}  // namespace epd
