// A transport that does everything badly that the contract allows: messages come late and in another order,
// completions come late, sends are refused, peers are cut off and come back, peers go down. What happens
// follows from a seed and the order of calls alone: time is counted in calls of progress().
#pragma once

#include "transport/transport.h"

#include <cstdint>
#include <memory>

namespace epd::transport {

struct FaultRates {
  unsigned refuse_percent = 0;  // sends: WOULD_BLOCK
  unsigned delay_percent = 0;   // messages held, when sent and when received: so they overtake each other
  unsigned late_percent = 0;    // kSent and kFlushed held
  unsigned cut_per_mille = 0;   // messages that begin a cut, in one direction or both, which mends by itself
  unsigned down_per_mille = 0;  // sends behind which the peer goes down
  unsigned max_turns = 1;       // a hold or a cut lasts 1 .. max_turns calls of progress(); at least 1
};

std::unique_ptr<Transport> make_faulty(std::unique_ptr<Transport> inner, std::uint64_t seed,
                                       const FaultRates& rates);

}  // namespace epd::transport
