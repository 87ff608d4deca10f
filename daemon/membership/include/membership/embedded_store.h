// The store of a cluster with one coordinator: what takes part in its groups, in the memory of that
// coordinator's daemon. It takes writes of the highest term that has begun, and of no other.
#pragma once

#include "membership/actions.h"

#include <cstdint>
#include <map>

namespace epd::membership {

class EmbeddedStore {
 public:
  // False: a higher term has begun.
  bool begin(std::uint64_t term) {
    if (term < term_) return false;
    if (term > term_) views_.clear();  // its groups are told by those who take part
    term_ = term;
    return true;
  }
  bool put(std::uint64_t term, const StoreView& view) {
    if (term != term_) return false;
    views_.insert_or_assign(view.label.id, view);
    return true;
  }
  bool drop(std::uint64_t term, std::uint64_t group_id) {
    if (term != term_) return false;
    views_.erase(group_id);
    return true;
  }
  const std::map<std::uint64_t, StoreView>& views() const { return views_; }

 private:
  std::uint64_t term_ = 0;
  std::map<std::uint64_t, StoreView> views_;
};

}  // namespace epd::membership
