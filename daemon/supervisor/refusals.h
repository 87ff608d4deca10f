// Collects everything in the configuration's sources that is not allowed, so that one message tells it all.
#pragma once

#include "common/status.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace epd::supervisor {

class Refusals {
 public:
  static constexpr std::uint32_t kNoLine = 0xffff'ffff;  // of the environment and of flags

  void add(std::uint32_t line, std::string text) {
    if (!full()) list_.emplace_back(line, std::move(text));
  }
  // A file may have very many, and each unknown name takes time. The rest is not told.
  bool full() const { return list_.size() > kMost; }
  // OK if there are none; else all of them, those of the file first and in its order.
  Status status() const {
    auto sorted = list_;
    std::stable_sort(sorted.begin(), sorted.end(),
                     [](const auto& a, const auto& b) { return a.first < b.first; });
    std::string text;
    for (std::size_t i = 0; i < std::min(sorted.size(), kMost); ++i)
      text.append(i == 0 ? "" : "; ").append(sorted[i].second);
    if (full()) text += "; and more";
    return sorted.empty() ? Status() : invalid_argument(std::move(text));
  }

 private:
  static constexpr std::size_t kMost = 20;
  std::vector<std::pair<std::uint32_t, std::string>> list_;
};

}  // namespace epd::supervisor
