// Lets the streams of all ranks go on together: neither the ranks' processors nor what their streams did
// before is in what is timed behind it.
#pragma once

#include "gpu_driver.h"
#include "kit/team.h"
#include "rank_device.h"

#include <cstdint>

namespace epd::bench {

// Words of all ranks, in memory that their GPUs share.
class BarrierWords {
 public:
  explicit BarrierWords(std::uint32_t ranks);
  // How often each stream has come to the start barrier.
  std::uint64_t* come() const { return words_.data(); }
  // And how often that of this rank may go on.
  std::uint64_t* opened(std::uint32_t rank) const { return words_.data() + std::size_t{1 + rank} * kLine; }
  std::uint32_t ranks() const { return ranks_; }
  std::size_t bytes() const { return words_.size() * sizeof(words_[0]); }

 private:
  static constexpr std::uint32_t kLine = 32;  // no two are written in one line
  std::uint32_t ranks_;
  kit::SharedArray<std::uint64_t> words_;
};

// One rank's, on its device's current context. Throws kit::ToolError.
class StartBarrier {
 public:
  StartBarrier(const GpuRank& gpu, const BarrierWords& words, std::uint32_t rank);
  ~StartBarrier();
  StartBarrier(const StartBarrier&) = delete;
  StartBarrier& operator=(const StartBarrier&) = delete;

  // Makes the stream wait. May be captured: each replay waits again.
  void enqueue();
  // Once for each wait of the stream, when everything that follows it has been enqueued. The stream goes on
  // when all barriers are open.
  void open();

 private:
  const GpuRank& gpu_;
  const BarrierWords& words_;
  const std::uint32_t rank_;
  const GpuImage image_;
  void* const kernel_;
  std::uint64_t times_ = 0;
};

}  // namespace epd::bench
