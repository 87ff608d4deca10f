// Beside the driver's ABI: what a test of a client sees of the calls, and decides. For programs that link the
// fake.
#pragma once

#include "fake_cuda/api.h"

#include <cstddef>
#include <cstdint>

namespace epd::fake_cuda {

// A call that is about to be enqueued on a stream, or that queries it.
struct StreamCall {
  const char* function = nullptr;  // of a launch: the kernel's name
  CUstream stream = nullptr;
  CUdeviceptr address = 0;  // of a word
  std::uint32_t value = 0;
  unsigned flags = 0;
  void** parameters = nullptr;  // of a launch
};

// Its functions are called by the threads that call the driver, without locks.
class Watcher {
 public:
  virtual ~Watcher() = default;
  // Each call, and the name of each kernel that is launched. Not CUDA_SUCCESS: what the call answers.
  virtual CUresult calls(const char* function) = 0;
  virtual void enqueues(const StreamCall& call) = 0;
  virtual void has_copied() = 0;  // from a device
  virtual void makes_stream(unsigned flags, int priority) = 0;
  virtual void sets_attribute(const char* kernel, CUfunction_attribute which, int value) = 0;
};
Watcher* watcher();

// The driver's objects that this process has.
struct Holdings {
  std::size_t mapped_bytes = 0;
  std::size_t reservations = 0;
  std::size_t allocations = 0;  // handles
  std::size_t streams = 0;      // but for default streams
  std::size_t libraries = 0;
  std::size_t retained = 0;  // primary contexts, each as often
  std::size_t faults = 0;    // of devices, since the first cuInit
};

}  // namespace epd::fake_cuda

extern "C" {
#pragma GCC visibility push(default)
// Null: nobody watches any more.
void cuFakeWatch(epd::fake_cuda::Watcher* watcher);
void cuFakeHoldings(epd::fake_cuda::Holdings* holdings);
// While a stream is held, it is as if a long kernel ran in it: nothing begins, and no wait ends.
void cuFakeHold(CUstream stream, bool held);
// Waits until no stream continues by itself.
void cuFakeSettle();
// How much of what was enqueued on the stream has not ended.
std::size_t cuFakePending(CUstream stream);
// The time passes for kernels that run.
void cuFakePassTime(std::uint64_t nanoseconds);
#pragma GCC visibility pop
}
