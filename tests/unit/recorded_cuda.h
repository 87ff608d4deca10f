// A CUDA driver for tests of libepd: what the library's table of functions points to. Memory is the memfd
// that the fake daemon sends, mapped here; streams are queues of writes and waits, by memory operation or
// kernel, that run as far as they can at each call. Everything is recorded; calls without the right context,
// kernels that were not loaded before they are needed, and leaks, fail the test.
#pragma once

#include "cuda_driver.h"

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace epd::testing {

struct StreamOp {
  enum Kind {
    kWrite,
    kWait,
    kCheck,  // only asked about, never in a queue
    kRing,   // a command; address: abi::CommandWords
    kAwait,  // the last command of `slot`
  } kind;
  std::uintptr_t address;
  std::uint32_t value;           // kRing: the program
  const char* kernel = nullptr;  // its name; the write and the wait of one kernel are two of these
  std::uint64_t limit_ns = 0;    // of a kernel's wait
  // kRing, kAwait
  std::uint32_t slot = 0;
  std::uint32_t num_tokens = 0;
  std::uintptr_t num_tokens_at = 0;
  bool flagged = false;
};

class RecordedCuda {
 public:
  // Takes the place of the driver until it is destroyed. Devices are numbered from 0; each byte of a device's
  // uuid is its entry.
  explicit RecordedCuda(std::vector<std::uint8_t> uuids);
  ~RecordedCuda();

  static const client::CudaDriver& table();

  // ---- what the test says ----
  void set_current(CUcontext context);  // of the calling thread, as an application does
  CUcontext current() const;
  static CUcontext context_of(int device);
  // Called at each write, wait or check of a stream, before it is enqueued; without locks.
  void on_enqueue(std::function<void(CUstream, const StreamOp&)> hook);
  // Called once, when the library has read the device's memory; without locks.
  void after_next_copy(std::function<void()> hook);
  // From now on the function answers so; CUDA_SUCCESS: as it should.
  void fail(const std::string& function, CUresult error);
  void hold(CUstream stream, bool held);                   // as if a long kernel ran in it
  void poke(std::uintptr_t address, std::uint32_t value);  // what the engine writes

  // ---- what the library did ----
  std::vector<StreamOp> enqueued(CUstream stream) const;
  std::size_t enqueued_anywhere() const;
  std::size_t stuck(CUstream stream) const;  // operations that can't run yet
  bool await_idle(CUstream stream) const;    // false after ten seconds
  std::size_t mapped_bytes() const;
  int retained() const;
  int synchronized() const;
  std::vector<std::string> mistakes() const;
  std::vector<std::string> loaded() const;  // kernels, in the order of their first launch
  bool prefers_shared_memory(const std::string& kernel) const;
  // The limits of the kernels that wait now have passed.
  void pass_limits();

 private:
  friend struct RecordedCalls;
  struct Stream {
    std::vector<StreamOp> all;
    std::deque<StreamOp> waiting;
    bool held = false;
  };
  struct Kernel {
    const char* name = nullptr;
    int carveout = -1;
    bool loaded = false;
  };
  void run_locked();

  mutable std::mutex mutex_;  // guards all below
  const std::vector<std::uint8_t> uuids_;
  std::map<std::string, CUresult> failures_;
  std::map<CUstream, Stream> streams_;
  std::map<CUdeviceptr, std::size_t> reserved_;
  std::map<CUdeviceptr, std::size_t> mapped_;
  std::map<CUmemGenericAllocationHandle, int> imported_;
  std::function<void(CUstream, const StreamOp&)> hook_;
  std::function<void()> after_copy_;
  std::vector<std::string> mistakes_;
  std::size_t num_enqueued_ = 0;
  int retained_ = 0;
  int synchronized_ = 0;
  int num_streams_ = 0;  // created by the library, alive
  std::uint64_t next_handle_ = 1;
  int num_libraries_ = 0;  // loaded
  Kernel kernels_[5] = {
      {"epd_signal"}, {"epd_wait"}, {"epd_signal_and_wait"}, {"epd_command"}, {"epd_await_command"}};
  std::vector<std::string> loaded_;
};

}  // namespace epd::testing
