// Measurements of the ranks, in memory shared with the coordinator.
#pragma once

#include "kit/report.h"
#include "kit/team.h"

#include <cstdint>

namespace epd::bench {

// [iterations, ranks] each; iteration-major.
struct OperationSamples {
  OperationSamples(std::uint32_t iterations, std::uint32_t ranks)
      : n(std::size_t{iterations} * ranks), link_bytes(iterations), verdicts(ranks) {}

  std::size_t n;
  using Times = kit::SharedArray<double>;
  using Counts = kit::SharedArray<std::uint32_t>;
  using Bytes = kit::SharedArray<std::uint64_t>;
  Times time_us{n};  // on GPUs the time in the stream, else on the host
  // On GPUs only: in the stream, behind the start barrier; and by the host: from submission to completion,
  // the submission itself, from submission to the counts (dispatch).
  Times ahead_us{n}, host_us{n}, call_us{n}, counts_us{n};
  Times gemm_us{n}, serial_us{n}, overlapped_us{n}, gemm_beside_us{n};  // with --overlap: see OverlapTimes
  Times ceiling_begin_us{n}, ceiling_end_us{n};  // on the clock that all processes share
  Counts moved_rows{n};                          // pushed or pulled by this rank, its own included
  Counts wire_rows{n};                           // of these, to or from other ranks
  Counts logical_rows{n};                        // received by this rank's dispatch, its own included
  // Only with several nodes.
  Bytes link_bytes;                         // [iterations] sent between nodes, with the links' headers
  Bytes needed_bytes{n};                    // of this rank: its records and announcements
  Bytes record_bytes{n};                    // of these, the records
  Bytes request_bytes{n};                   // of the requests before them, the other way
  kit::SharedArray<kit::Verdict> verdicts;  // [ranks]
};

struct Samples {
  Samples(std::uint32_t its_iterations, std::uint32_t its_ranks, std::size_t its_noops, std::uint32_t targets)
      : iterations(its_iterations),
        ranks(its_ranks),
        noops(its_noops),
        row_counts(std::size_t{its_ranks} * targets) {}

  std::uint32_t iterations, ranks;
  std::size_t noops;
  OperationSamples dispatch{iterations, ranks}, combine{iterations, ranks};
  using Times = kit::SharedArray<double>;
  // epbench layer, [iterations, ranks]: all layers of a graph; the same graph without operations; and with
  // nothing but operations.
  Times layers_us{dispatch.n}, computing_us{dispatch.n}, moving_us{dispatch.n};
  Times noop_us{noops};
  // On GPUs only; `events`: of an empty pair of them.
  Times noop_ahead_us{noops}, events_us{noops}, events_ahead_us{noops};
  // Only with several nodes: [pairs], of which there are at most as many as iterations; 0: not measured.
  Times raw_stream_mibps{iterations}, raw_dispatch_us{iterations}, raw_combine_us{iterations};
  kit::SharedArray<std::uint32_t> row_counts;  // of the current iteration: kit::TargetCounts
  kit::SharedArray<char> daemon{64};           // its name and version
  kit::SharedArray<char> gpu{128};             // name of rank 0's GPU, and whether there is MPS
  kit::SharedArray<char> gemm{64};             // epbench layer: the name of the GEMM
};

// Back-to-back no-ops after each iteration of another operation (on rank 0), and per iteration of the
// operation noop (on every rank).
inline constexpr std::uint32_t kNoopsBetween = 8;
inline constexpr std::uint32_t kNoopsPerIteration = 100;
// On GPUs every rank times them as it times operations: after each iteration of another operation, and per
// iteration of the operation noop.
inline constexpr std::uint32_t kStreamNoopsBetween = 1;
inline constexpr std::uint32_t kStreamNoopsPerIteration = 10;

}  // namespace epd::bench
