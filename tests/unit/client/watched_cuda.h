// The fake driver (support/fake_cuda) as tests of libepd use it: all that the library enqueues is written
// down, calls fail as the test says, and leaks, faults and kernels that were not loaded in time fail the
// test.
#pragma once

#include "fake_cuda/watching.h"

#include <array>
#include <atomic>
#include <cstdint>
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
    kCheck,    // only asked about, never enqueued
    kRing,     // a call; address: abi::CallWords
    kAwait,    // the end of the last call on `slot`
    kCopyIn,   // value: pieces
    kCopyOut,  // likewise
  } kind;
  std::uintptr_t address;
  std::uint32_t value;           // kRing: the program
  const char* kernel = nullptr;  // its name; the write and the wait of one kernel are two of these
  std::uint64_t limit_ns = 0;    // of a kernel's wait
};

class WatchedCuda : private fake_cuda::Watcher {
 public:
  // The device on which streams of the test and of the library are; see uuid().
  static constexpr int kDevice = 1;

  WatchedCuda();
  ~WatchedCuda() override;
  WatchedCuda(const WatchedCuda&) = delete;
  WatchedCuda& operator=(const WatchedCuda&) = delete;

  static std::array<std::uint8_t, 16> uuid();
  // How the fake driver recognises a descriptor as memory of the device.
  static std::string memory_name();

  // ---- what the test says ----
  // In the primary context of kDevice, which the test keeps.
  CUstream make_stream();
  // Memory of the host's that devices reach.
  void* pinned_bytes(std::size_t bytes);
  std::uint32_t* pinned_word() { return static_cast<std::uint32_t*>(pinned_bytes(sizeof(std::uint32_t))); }
  void set_current(CUcontext context);  // of the calling thread, as an application does
  CUcontext current() const;
  CUcontext context() const { return context_; }  // of the test's streams
  // Called at each write, wait or check of a stream, before it is enqueued; without locks.
  void on_enqueue(std::function<void(CUstream, const StreamOp&)> hook);
  // Called once, when the library has read the device's memory; without locks.
  void after_next_copy(std::function<void()> hook);
  // Called once, before the next call of the function; without locks.
  void before_next(const std::string& function, std::function<void()> hook);
  // From now on the function, or the launch of the kernel, answers so; CUDA_SUCCESS: as it should.
  void fail(const std::string& function, CUresult error);
  void hold(CUstream stream, bool held);                   // as if a long kernel ran in it
  void poke(std::uintptr_t address, std::uint32_t value);  // what the engine writes
  // The limits of the kernels that wait now have passed.
  void pass_limits();
  // The library may leave so many behind.
  void allow_streams(std::size_t count) { allowed_streams_ = count; }

  // ---- the library's calls. All that can continue by itself has been done by then ----
  std::vector<StreamOp> enqueued(CUstream stream) const;
  std::size_t enqueued_anywhere() const;
  std::size_t launches() const;              // of kernels
  std::size_t stuck(CUstream stream) const;  // what can't end yet
  bool await_idle(CUstream stream) const;    // false after ten seconds
  static void settle() { cuFakeSettle(); }
  std::size_t mapped_bytes() const;
  int retained() const;
  int synchronized() const;
  std::vector<std::string> mistakes() const;
  std::vector<std::string> loaded() const;  // kernels, in the order of their first launch
  bool prefers_shared_memory(const std::string& kernel) const;

 private:
  CUresult calls(const char* function) override;
  void enqueues(const fake_cuda::StreamCall& call) override;
  void has_copied() override;
  void makes_stream(unsigned flags, int priority) override;
  void sets_attribute(const char* kernel, CUfunction_attribute which, int value) override;
  std::vector<StreamOp> ops_of(const fake_cuda::StreamCall& call);
  // For a kernel: whether it is only to be loaded.
  bool is_loading(const fake_cuda::StreamCall& call);
  static fake_cuda::Holdings holdings();

  CUcontext context_ = nullptr;  // of the test's streams
  std::vector<CUstream> made_;
  std::vector<void*> pinned_;
  std::size_t allowed_streams_ = 0;
  std::size_t faults_before_ = 0;
  mutable std::mutex mutex_;  // guards all below
  std::map<std::string, CUresult> failures_;
  std::map<CUstream, std::vector<StreamOp>> enqueued_;
  std::function<void(CUstream, const StreamOp&)> hook_;
  std::function<void()> after_copy_;
  std::map<std::string, std::function<void()>> before_;
  std::vector<std::string> mistakes_;
  std::vector<std::string> loaded_;
  std::map<std::string, int> carveouts_;
  std::size_t num_enqueued_ = 0;
  std::size_t launches_ = 0;
  int synchronized_ = 0;
};

}  // namespace epd::testing
