// Where a rank's regions lie, and what is done with them outside the timed parts.
#pragma once

#include "gpu_driver.h"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace epd::bench {

class RankDevice {
 public:
  virtual ~RankDevice() = default;
  // Between regions and memory of this process. Complete when settle() has returned.
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
  // What `enqueue` enqueues in the stream, as a graph, which lives as long as the rank.
  void* capture(const std::function<void()>& enqueue);
  void launch(void* graph);
  // A pair of events in the stream, one after the other; elapsed_us waits for the second, at most a minute.
  // May be captured; then settle() before asking.
  void record_begin();
  void record_end();
  double elapsed_us();
  // Another pair, within.
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

}  // namespace epd::bench
