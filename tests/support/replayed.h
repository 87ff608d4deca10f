// A round that a rank's stream has captured as a graph, whose operations are calls.
#pragma once

#include "support/client.h"
#include "support/cuda_memory.h"
#include "support/echo.h"

#include <cstddef>
#include <cstdint>
#include <set>

namespace epd::test {

// One round, captured once: upload, n too, dispatch, the expert's answer, combine, download. Each replay
// works on what lies in the same pinned memory then. All throw RankFailure.
class Replayed {
 public:
  Replayed(const Group& group, const Case& c, std::uint32_t rank);

  void play(std::uint64_t round);
  // As play(), with a choice of an expert that there is none of.
  void play_with_a_bad_choice();
  // The last replay's results, which was of this round.
  void check(std::uint64_t round, const std::set<std::uint32_t>& lost = {});
  // Checks the tickets' status of the last replay.
  void must_end(epd_status_t status);
  epd_ticket_t dispatched() const { return dispatch_.ticket; }
  const GpuStream& stream() const { return stream_; }

 private:
  GpuGraph capture();
  void launch();
  struct Captured {
    epd_ticket_t ticket = 0;
    std::uint32_t runs = 0;  // of which has been told
  };
  std::uint32_t must_be_told(Captured& of, epd_status_t status) const;

  const Group& group_;
  const Case case_;
  const std::uint32_t rank_;
  const std::size_t bytes_;  // of a slot
  const GpuStream stream_;
  std::byte* const given_;  // then as received, then as combined
  std::uint32_t* const n_;
  std::byte* const n_at_;
  Captured dispatch_;
  Captured combine_;
  std::uint32_t replays_ = 0;
  const GpuGraph graph_;
};

}  // namespace epd::test
