// The numbers of messages that have come from one engine in an epoch, in any order.
#pragma once

#include <cstdint>
#include <set>

namespace epd::far {

class Sequence {
 public:
  // Numbers beyond the first that is missing, at most.
  static constexpr std::uint64_t kMostAhead = 1u << 16;

  // False: the number has come before or is too far ahead, or its sender has begun the epoch again since.
  // `began_ns`: when it began. An engine that begins an epoch again counts from 1 again.
  bool take(std::uint64_t began_ns, std::uint64_t number, std::uint64_t now_ns);
  // Since when a number has been missing, while later ones have come; 0: none is missing.
  std::uint64_t gap_since_ns() const { return gap_since_ns_; }
  // All numbers below have come.
  std::uint64_t next() const { return next_; }

 private:
  std::uint64_t began_ns_ = 0;
  std::uint64_t next_ = 1;
  std::set<std::uint64_t> ahead_;
  std::uint64_t gap_since_ns_ = 0;
};

}  // namespace epd::far
