// The memory that a group takes: the supervisor counts joins by it, and the client library and epctl tell it
// before anybody joins.
#pragma once

#include "proto/arena.h"
#include "proto/route_memory.h"
#include "proto/session.h"
#include "proto/waits.h"

#include <cstdint>

namespace epd::abi {

// In bytes, of one rank but for `group`. A shape inside its limits keeps all far below 2^64 (see arena.h).
struct GroupBytes {
  std::uint64_t user_arena = 0;
  std::uint64_t exchange_arena = 0;
  std::uint64_t routing_records = 0;  // in the exchange arena
  std::uint64_t inboxes = 0;          // in the exchange arena
  std::uint64_t board = 0;            // with what is counted behind it (waits.h)
  std::uint64_t results = 0;          // of the host
  std::uint64_t rank = 0;             // both arenas, the board, results: what counts for its user
  std::uint64_t group = 0;            // of all ranks
  std::uint64_t host_quota = 0;       // what counts for all users: memory of the host
  std::uint64_t routing_quota = 0;  // what an engine of a host device may keep of routings in its own memory

  constexpr GroupBytes(const GroupShape& shape, bool host_device) {
    const ExchangeArenaLayout exchange(shape);
    user_arena = UserArenaLayout(shape).total_bytes;
    exchange_arena = exchange.total_bytes;
    routing_records = exchange.routing_bytes * shape.num_routes();
    inboxes = exchange.inbox_bytes * shape.depth;
    board = WaitsLayout(shape).total_bytes;
    results = ResultsLayout(shape).total_bytes;
    rank = user_arena + exchange_arena + board + results;
    group = rank * shape.num_ranks;
    host_quota = host_device ? rank : board + results;
    routing_quota = host_device ? routing_bytes(shape) : 0;
  }
};

}  // namespace epd::abi
