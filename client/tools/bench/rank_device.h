// Where a rank's regions lie, the work on them outside the timed parts, and the common start of all streams.
#pragma once

#include "gpu_driver.h"
#include "kit/team.h"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace epd::bench {

// Where a rank's regions lie, and what is done with them outside the timed parts.
class RankDevice {
 public:
  virtual ~RankDevice() = default;
  // Copy between regions and memory of this process. Complete when settle() has returned.
  virtual void put(void* region, const void* from, std::size_t bytes) = 0;
  virtual void get(void* to, const void* region, std::size_t bytes) = 0;
  virtual void fill(void* region, int byte, std::size_t bytes) = 0;
  // Writes through twice the size of the cache that inputs and outputs could be in.
  virtual void flush_cache() = 0;
  virtual void settle() = 0;
};

// A host device: regions are memory of this process, the cache is the core's own.
class HostRank : public RankDevice {
 public:
  explicit HostRank(bool flushes);
  void put(void* region, const void* from, std::size_t bytes) override;
  void get(void* to, const void* region, std::size_t bytes) override;
  void fill(void* region, int byte, std::size_t bytes) override;
  void flush_cache() override;
  void settle() override {}

 private:
  std::vector<char> evict_;
};

// A GPU: the device's primary context, a stream of the rank's own, and events in it.
class GpuRank : public RankDevice {
 public:
  // Makes the context current in this thread. Throws kit::ToolError, as everything here.
  GpuRank(std::uint32_t ordinal, bool flushes);
  ~GpuRank() override;
  GpuRank(const GpuRank&) = delete;
  GpuRank& operator=(const GpuRank&) = delete;

  void put(void* region, const void* from, std::size_t bytes) override;
  void get(void* to, const void* region, std::size_t bytes) override;
  void fill(void* region, int byte, std::size_t bytes) override;
  void flush_cache() override;
  // At most a minute.
  void settle() override;

  // Makes the context current again, in a process with several.
  void use() const;
  int device() const { return device_; }
  void* context() const { return context_; }
  void* stream() const { return stream_; }
  // Captures as a graph what `enqueue` enqueues in the stream. The graph lives as long as the rank.
  void* capture(const std::function<void()>& enqueue);
  void launch(void* graph);
  // A pair of events in the stream, one after the other; elapsed_us waits for the second, at most a minute.
  // May be captured; then settle() before asking.
  void record_begin();
  void record_end();
  double elapsed_us();
  // Another pair of events, between the first two.
  void record_inner_begin();
  void record_inner_end();
  double inner_us();

  // "NVIDIA H200"
  std::string name() const;
  // Whether contexts on the device are shared through MPS.
  bool mps() const;

 private:
  void record(void* event);
  double between(void* begin, void* end) const;
  void wait_for(void* event) const;
  int attribute(int which) const;

  const GpuDriver& driver_;
  int device_ = 0;
  void* context_ = nullptr;
  void* stream_ = nullptr;
  void* begin_ = nullptr;
  void* end_ = nullptr;
  void* inner_begin_ = nullptr;
  void* inner_end_ = nullptr;
  void* settled_ = nullptr;
  std::vector<void*> graphs_;  // executable
  bool capturing_ = false;
  GpuAddress fills_ = 0;  // 0: caches are not flushed
  std::size_t fill_bytes_ = 0;
  unsigned char fill_value_ = 0;
};

// Words that the streams of all ranks wait for, in memory that their GPUs share.
class BarrierWords {
 public:
  explicit BarrierWords(std::uint32_t ranks);
  // How often each stream has come to the start barrier.
  std::uint64_t* come() const { return words_.data(); }
  // How often this rank's stream may go on.
  std::uint64_t* opened(std::uint32_t rank) const { return words_.data() + std::size_t{1 + rank} * kLine; }
  std::uint32_t ranks() const { return ranks_; }
  std::size_t bytes() const { return words_.size() * sizeof(words_[0]); }

 private:
  static constexpr std::uint32_t kLine = 32;  // no two are written in one line
  std::uint32_t ranks_;
  kit::SharedArray<std::uint64_t> words_;
};

// Lets the streams of all ranks go on together, so that neither the ranks' processors nor earlier work of
// their streams is in what is timed behind it. This is one rank's part, on its device's current context.
// Throws kit::ToolError.
class StartBarrier {
 public:
  StartBarrier(const GpuRank& gpu, const BarrierWords& words, std::uint32_t rank);
  ~StartBarrier();
  StartBarrier(const StartBarrier&) = delete;
  StartBarrier& operator=(const StartBarrier&) = delete;

  // Makes the stream wait. May be captured: each replay waits again.
  void enqueue();
  // Call it once for each wait of the stream, when everything that follows the wait has been enqueued. The
  // stream goes on when all barriers are open.
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
