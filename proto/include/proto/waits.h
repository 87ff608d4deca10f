// The time that a rank has waited for each other rank, in memory of its own after its board: written by its
// engine's loop alone, with relaxed stores; read by the supervisor without a request. It lives as long as the
// rank, whatever becomes of engines. Its client may read it too.
//
// Times are those for which the device of the rank was held up:
//   ready    from when the rank had announced the operation until the other had
//   arrived  from when the rank was done with all others until the other was done with it
// Ranks are waited for at the same time, so the times of an operation add up to more than it took.
//
// On a host device each is exact: a rank stores with each signal when it gave it. On a GPU nobody knows when
// signals came. There a time counts that lies between two polls of the engine at the same operation, if both
// found the other rank missing: a wait below 50 ms is hardly ever seen.
#pragma once

#include "proto/exchange.h"
#include "proto/session.h"

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace epd::abi {

struct RankCounts {
  // Dispatches and combines that all ranks have announced, and those of them that this rank announced last.
  // Host devices only.
  alignas(64) std::atomic<std::uint64_t> operations;
  std::atomic<std::uint64_t> last_arrivals;
  std::atomic<std::uint64_t> rows;  // received by dispatches, with padding
};

struct PeerWait {
  std::atomic<std::uint64_t> ready_ns;
  std::atomic<std::uint64_t> arrived_ns;
};

struct WaitsLayout {
  std::uint64_t counts = 0;  // in the memory of the board
  std::uint64_t peers = 0;   // PeerWait[R]
  std::uint64_t total_bytes = 0;

  constexpr explicit WaitsLayout(const GroupShape& s)
      : counts(align_up(sizeof(Board), 64)),
        peers(counts + sizeof(RankCounts)),
        total_bytes(align_up(peers + s.num_ranks * sizeof(PeerWait), 64)) {}
};

// Where it lies. Null: nothing is counted.
struct RankWaits {
  RankCounts* counts = nullptr;
  PeerWait* peers = nullptr;

  static RankWaits in(std::byte* board, const GroupShape& shape) {
    const WaitsLayout layout(shape);
    return {reinterpret_cast<RankCounts*>(board + layout.counts),
            reinterpret_cast<PeerWait*>(board + layout.peers)};
  }
};

}  // namespace epd::abi
