// What a client gains when it computes while epd moves data: a GEMM beside an operation, in one stream.
#pragma once

#include "gpu_image.h"
#include "gpu_rank.h"

#include <cstdint>

namespace epd::bench {

// C = A * B with any number of rows of C. Throws kit::ToolError if there are no kernels.
class Gemm {
 public:
  Gemm(const GpuRank& gpu, std::uint32_t rows);
  ~Gemm();
  Gemm(const Gemm&) = delete;
  Gemm& operator=(const Gemm&) = delete;
  void enqueue(void* stream);

 private:
  const GpuDriver& driver_;
  std::uint32_t rows_;
  const GpuImage image_;
  void* const kernel_;
  GpuAddress memory_ = 0;
};

// Rows for a GEMM that takes somewhat longer than an operation of so many tokens.
std::uint32_t gemm_rows(std::uint32_t tokens);

// Microseconds in the stream, each of the slowest rank.
struct OverlapTimes {
  double operation = 0;    // alone
  double gemm = 0;         // alone
  double serial = 0;       // the one after the other
  double overlapped = 0;   // the operation begun, the GEMM, then the wait for the operation
  double gemm_beside = 0;  // of this, the GEMM
  // Of the operation's time, what is hidden.
  double efficiency() const { return operation > 0 ? (serial - overlapped) / operation : 0; }
  double slowdown() const { return gemm > 0 ? gemm_beside / gemm : 0; }
};

}  // namespace epd::bench
