// The knowledge of a rank of a group that degrades about the ranks that held the rows of its routings, and so
// the results that its combines may give.
#pragma once

#include "support/cases.h"

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

namespace epd::test {

class Losses {
 public:
  using Ranks = std::set<std::uint32_t>;

  Losses(const Case& c, std::uint32_t rank) : case_(c), rank_(rank) {}

  std::uint64_t epoch() const { return epoch_; }
  // This rank takes part in the epoch, the lost ones don't. A rank that comes back holds nothing of what it
  // was sent before. Between two such calls epochs may have passed.
  void begin_epoch(std::uint64_t epoch, const Ranks& lost);
  // This rank has made the routing in this epoch.
  void make_routing(std::uint64_t routing);

  // The inputs dispatched by the routing. This rank has no tokens of a routing from before its time.
  std::vector<Input> dispatched(std::uint64_t routing, const std::vector<Input>& all) const;
  // Both: "" or what is wrong. `all`: the inputs of all ranks, as if none were lost.
  std::string check_dropped(std::uint64_t routing, const std::vector<Input>& all,
                            std::uint32_t num_dropped) const;
  std::string check_combine(const epd_buffers_t& buffers, Round round, const std::vector<Input>& all,
                            std::uint32_t num_dropped);

 private:
  struct Known {
    Ranks at;               // lost when it was made
    Ranks since;            // lost after that, back or not
    bool doubtful = false;  // epochs have passed that this rank has not seen
  };
  std::string check_newcomers_combine(const epd_buffers_t& buffers, std::uint32_t num_dropped) const;
  std::string check_doubtful_combine(Known& known, const epd_buffers_t& buffers, Round round,
                                     const std::vector<Input>& all, std::uint32_t num_dropped) const;

  const Case case_;
  const std::uint32_t rank_;
  std::uint64_t epoch_ = 0;
  Ranks lost_;
  std::map<std::uint64_t, Known> known_;  // by routing that this rank has made
};

}  // namespace epd::test
