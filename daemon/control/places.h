// Long calls hold a thread each, so each user may have few of a kind. Other users' calls do not count.
#pragma once

#include "common/status.h"

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>

namespace epd::control {

// Any thread may call. Outlives its places.
class Places {
 public:
  // `what` appears in the refusal: "user 1001 has 4 watches of events; allowed: 4".
  Places(int most, const char* what) : most_(most), what_(what) {}

  struct GiveBack {
    std::uint32_t uid;
    void operator()(Places* places) const { places->give_back(uid); }
  };
  // The place is free again when this ends.
  using Place = std::unique_ptr<Places, GiveBack>;
  Result<Place> take(std::uint32_t uid) {
    const std::lock_guard lock(mutex_);
    const auto found = taken_.find(uid);
    if (found != taken_.end() && found->second >= most_) {
      return resource_exhausted("user " + std::to_string(uid) + " has " + std::to_string(found->second) +
                                " " + what_ + "; allowed: " + std::to_string(most_));
    }
    ++taken_[uid];
    return Place(this, GiveBack{uid});
  }

 private:
  void give_back(std::uint32_t uid) {
    const std::lock_guard lock(mutex_);
    const auto found = taken_.find(uid);
    if (--found->second == 0) taken_.erase(found);
  }

  const int most_;
  const char* const what_;
  std::mutex mutex_;
  std::map<std::uint32_t, int> taken_;  // guarded by mutex_
};

}  // namespace epd::control
