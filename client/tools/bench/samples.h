// What ranks measure, in memory shared with the coordinator.
#pragma once

#include "kit/shared_array.h"

#include <cstdint>

namespace epd::bench {

// Of one rank.
struct Verdict {
  std::uint32_t checks;
  std::uint32_t failures;
  char first[256];  // the first difference
};

// [iterations, ranks] each; iteration-major.
struct OperationSamples {
  OperationSamples() = default;
  OperationSamples(std::uint32_t iterations, std::uint32_t ranks)
      : time_us(std::size_t{iterations} * ranks),
        ahead_us(std::size_t{iterations} * ranks),
        host_us(std::size_t{iterations} * ranks),
        call_us(std::size_t{iterations} * ranks),
        counts_us(std::size_t{iterations} * ranks),
        gemm_us(std::size_t{iterations} * ranks),
        serial_us(std::size_t{iterations} * ranks),
        overlapped_us(std::size_t{iterations} * ranks),
        gemm_beside_us(std::size_t{iterations} * ranks),
        ceiling_begin_us(std::size_t{iterations} * ranks),
        ceiling_end_us(std::size_t{iterations} * ranks),
        moved_rows(std::size_t{iterations} * ranks),
        wire_rows(std::size_t{iterations} * ranks),
        logical_rows(std::size_t{iterations} * ranks),
        link_bytes(iterations),
        needed_bytes(std::size_t{iterations} * ranks),
        record_bytes(std::size_t{iterations} * ranks),
        request_bytes(std::size_t{iterations} * ranks),
        verdicts(ranks) {}

  kit::SharedArray<double> time_us;  // on GPUs the time in the stream, else on the host
  // On GPUs only: in the stream, behind the start barrier; and by the host: from submission to completion,
  // the submission itself, from submission to the counts (dispatch).
  kit::SharedArray<double> ahead_us;
  kit::SharedArray<double> host_us;
  kit::SharedArray<double> call_us;
  kit::SharedArray<double> counts_us;
  // With --overlap, in the stream: see OverlapTimes.
  kit::SharedArray<double> gemm_us;
  kit::SharedArray<double> serial_us;
  kit::SharedArray<double> overlapped_us;
  kit::SharedArray<double> gemm_beside_us;
  kit::SharedArray<double> ceiling_begin_us;  // on the clock that all processes share
  kit::SharedArray<double> ceiling_end_us;
  kit::SharedArray<std::uint32_t> moved_rows;    // pushed or pulled by this rank, its own included
  kit::SharedArray<std::uint32_t> wire_rows;     // of these, to or from other ranks
  kit::SharedArray<std::uint32_t> logical_rows;  // received by this rank's dispatch, its own included
  // With several nodes.
  kit::SharedArray<std::uint64_t> link_bytes;     // [iterations] sent between nodes, with the links' headers
  kit::SharedArray<std::uint64_t> needed_bytes;   // of this rank: its records and announcements
  kit::SharedArray<std::uint64_t> record_bytes;   // of these, the records
  kit::SharedArray<std::uint64_t> request_bytes;  // what goes before them, the other way
  kit::SharedArray<Verdict> verdicts;             // [ranks]
};

struct Samples {
  Samples(std::uint32_t iterations, std::uint32_t ranks, std::size_t noops, std::uint32_t targets)
      : dispatch(iterations, ranks),
        combine(iterations, ranks),
        layers_us(std::size_t{iterations} * ranks),
        computing_us(std::size_t{iterations} * ranks),
        moving_us(std::size_t{iterations} * ranks),
        noop_us(noops),
        noop_ahead_us(noops),
        events_us(noops),
        events_ahead_us(noops),
        raw_stream_mibps(iterations),
        raw_dispatch_us(iterations),
        raw_combine_us(iterations),
        row_counts(std::size_t{ranks} * targets),
        daemon(64),
        gpu(128),
        gemm(64) {}

  OperationSamples dispatch;
  OperationSamples combine;
  // Of epbench layer, [iterations, ranks]: all layers of a graph; the same graph without operations; and
  // with nothing but operations.
  kit::SharedArray<double> layers_us;
  kit::SharedArray<double> computing_us;
  kit::SharedArray<double> moving_us;
  kit::SharedArray<double> noop_us;
  // On GPUs only; `events`: of an empty pair of them.
  kit::SharedArray<double> noop_ahead_us;
  kit::SharedArray<double> events_us;
  kit::SharedArray<double> events_ahead_us;
  // With several nodes, [pairs] of so many as there are iterations at most; 0: not measured.
  kit::SharedArray<double> raw_stream_mibps;
  kit::SharedArray<double> raw_dispatch_us;
  kit::SharedArray<double> raw_combine_us;
  kit::SharedArray<std::uint32_t> row_counts;  // of the current iteration: kit::TargetCounts
  kit::SharedArray<char> daemon;               // its name and version
  kit::SharedArray<char> gpu;                  // rank 0's, and whether there is MPS
  kit::SharedArray<char> gemm;                 // epbench layer: what multiplies
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
