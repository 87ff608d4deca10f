// Copies between a test's memory and a GPU's: regions of a group on a CUDA device are not the host's to
// touch. And streams, as an application has them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

namespace epd::test {

// Whether there is a driver to open (a true one, or support/fake_cuda by LD_LIBRARY_PATH). Says nothing of
// GPUs.
bool has_cuda_driver();

// Blocking, by GPU `gpu` as the driver numbers them. Throw RankFailure. Not before a fork that is to use the
// driver.
void copy_to_gpu(int gpu, void* to, const void* from, std::size_t bytes);
void copy_from_gpu(int gpu, void* to, const void* from, std::size_t bytes);

// An allocation of cuMemCreate that can be passed on by descriptor, mapped for its GPU; all of it stays until
// the process ends but the descriptor, which is the caller's.
struct GpuAllocation {
  int fd = -1;
  std::byte* address = nullptr;
  std::size_t bytes = 0;  // at least what was asked for
};
GpuAllocation allocate_on_gpu(int gpu, std::size_t bytes);

// Consecutive allocations of cuMemCreate, as torch's expandable segments are made.
class PiecedMemory {
 public:
  PiecedMemory(int gpu, std::size_t bytes);
  ~PiecedMemory();
  PiecedMemory(const PiecedMemory&) = delete;
  PiecedMemory& operator=(const PiecedMemory&) = delete;
  std::byte* begin() const { return begin_; }
  // Frees all pieces, and puts others in their places.
  void renew();

 private:
  void map();
  void unmap();

  const int gpu_;
  std::size_t unit_ = 0;
  std::size_t pieces_ = 0;
  std::byte* begin_ = nullptr;
};

// Memory of cudaMalloc, and its end.
std::byte* malloc_on_gpu(int gpu, std::size_t bytes);
void free_on_gpu(int gpu, std::byte* address);

// Pinned memory of the process, which copies in streams need. It stays until the process ends: freeing it
// would wait for all streams.
std::byte* pinned_memory(int gpu, std::size_t bytes);

// Keeps the GPU at work for the process, beside others: a kill then comes in the middle of a kernel. Returns
// a text that names the work.
std::string occupy_gpu(int gpu, int seconds = 600);

// A graph that a stream has captured.
class GpuGraph {
 public:
  explicit GpuGraph(void* executable) : executable_(executable) {}
  GpuGraph(GpuGraph&& other) noexcept : executable_(std::exchange(other.executable_, nullptr)) {}
  GpuGraph& operator=(GpuGraph&&) = delete;
  ~GpuGraph();
  void* get() const { return executable_; }

 private:
  void* executable_;
};

// A stream of the calling thread's GPU. All but finish() only enqueue; all throw RankFailure.
class GpuStream {
 public:
  explicit GpuStream(int gpu);
  ~GpuStream();
  GpuStream(const GpuStream&) = delete;
  GpuStream& operator=(const GpuStream&) = delete;

  void* get() const { return stream_; }
  void copy_in(void* to_gpu, const void* pinned, std::size_t bytes) const;
  void copy_out(void* pinned, const void* from_gpu, std::size_t bytes) const;
  void copy(void* to_gpu, const void* from_gpu, std::size_t bytes) const;
  // The stream's later work begins when the event has completed, or when the other stream's work so far has.
  void wait_event(void* event) const;
  void wait_for(const GpuStream& other) const;
  // Work that is enqueued between these two is not run, but becomes a graph. It must have no calls that would
  // break the capture, also of other threads.
  void begin_capture() const;
  GpuGraph end_capture() const;
  void launch(const GpuGraph& graph) const;
  // Later work begins when unblock() has been called.
  void hold();
  void unblock() const;
  // Whether all has run by now.
  bool idle() const;
  // Waits for that; false after `seconds`.
  bool finish(double seconds) const;

 private:
  const int gpu_;
  void* stream_ = nullptr;
  std::uint32_t* gate_ = nullptr;  // pinned
};

}  // namespace epd::test
