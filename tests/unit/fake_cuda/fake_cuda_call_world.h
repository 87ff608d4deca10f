// Ranks whose operations are calls, on the fake driver: pairs of a gate and a main kernel for each, the
// client's stream and the engine's words for them.
#pragma once

#include "kernels/calls.h"
#include "unit/fake_cuda/fake_cuda_world.h"

#include <atomic>
#include <chrono>
#include <functional>
#include <thread>

namespace epd::fake_cuda_test {

using abi::CallWords;
using kernels::CallHost;
using kernels::CallState;
using kernels::DeviceView;
using kernels::JournalEntry;
using kernels::LaneState;
using kernels::RouteState;
using kernels::Task;
using kernels::WorkDivision;

// The CTAs of main kernels.
inline constexpr unsigned kCtas = 8;
inline constexpr unsigned kShared = 200 * 1024;

template <typename T>
T now(const T& word) {
  return std::atomic_ref(const_cast<T&>(word)).load(std::memory_order_acquire);
}

// Until it is true, for at most half a minute.
inline bool comes(const std::function<bool()>& what) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (!what()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  return true;
}

using gpu_test::Case;
using gpu_test::shape_of;

struct CallRank {
  CUstream pairs = nullptr;
  CUstream client = nullptr;
  CUstream control = nullptr;
  std::unique_ptr<Arena> arena;
  std::uint8_t* exchange = nullptr;
  CallWords* words = nullptr;
  CallState* state = nullptr;
  RouteState* routes = nullptr;
  DeviceView* view = nullptr;
  WorkDivision* division = nullptr;
  LaneState* lane = nullptr;
  kernels::Bells* bells = nullptr;
  std::uint32_t* generation = nullptr;
  kernels::SmCredits* credits = nullptr;  // of its device
  CallHost* host = nullptr;               // pinned
  RouteState* starts = nullptr;           // pinned, [kRoutes]
  abi::Results* results = nullptr;        // pinned
  kernels::ResultRuns* runs = nullptr;
  bool open = false;
  std::uint32_t num_pairs = 0;  // enqueued
  std::uint32_t enabled_epoch = 0;
  std::uint32_t read = 0;  // of the journal
  std::uint32_t host_tail = 0;
};

class CallWorld {
 public:
  static constexpr std::uint32_t kDepth = 3;
  static constexpr std::uint32_t kRoutes = 2;
  static abi::Call noop();
  // On the slot of that number.
  abi::Call dispatch(std::uint32_t route) const;
  abi::Call cached(std::uint32_t route) const;
  abi::Call combine(std::uint32_t route) const;

  CallWorld(const kernels::Shape& shape, std::uint32_t max_tokens);
  ~CallWorld();
  CallWorld(const CallWorld&) = delete;
  CallWorld& operator=(const CallWorld&) = delete;

  World& world() { return world_; }
  Rank& rank(std::uint32_t r) { return world_.rank(r); }
  CallRank& own(std::uint32_t r) { return ranks_[r]; }
  std::uint32_t size() const { return world_.size(); }

  std::uint32_t dispatch_flags = 0;  // abi::OpFlags of calls
  // From here on pairs are enqueued with each call, as many as there are rings of the bell for one.
  void open(std::uint32_t r);
  // All pairs run, and take nothing.
  void close(std::uint32_t r);
  // After a wait for the bell.
  void enqueue_pairs(std::uint32_t r, std::uint32_t count);
  // As an engine rings the bell.
  void ring_bell(std::uint32_t r) { write(r, &ranks_[r].words->bell[0], 1); }
  bool inside(std::uint32_t r) const { return now(ranks_[r].lane->door[0]) != 0; }
  // A call of the host's.
  void call_by_host(std::uint32_t r, abi::Call call);

  struct Start {
    std::uint64_t epoch = 1;
    std::uint64_t index = 0;
    std::uint64_t changed_epoch = 0;
    std::vector<RouteState> routes = std::vector<RouteState>(kRoutes);
  };
  // The next odd enabled epoch, or the next even one. Returns when no kernel runs that knows an earlier one.
  void resume(std::uint32_t r, const Start& start);
  void halt(std::uint32_t r);

  struct Ring {
    std::uint32_t num_tokens = 0;
    const std::uint32_t* num_tokens_at = nullptr;
    bool flagged = false;
    bool waits = true;
  };
  void ring(std::uint32_t r, const abi::Call& call, const Ring& how);
  void synchronise(std::uint32_t r) { EPD_CU(cuStreamSynchronize(use(r).client)); }
  // As a client could store it itself.
  void store(std::uint32_t r, const abi::Call& call);
  // The next entry of the journal, which the host has read then. Default: none came.
  JournalEntry journal(std::uint32_t r);
  void tell_read(std::uint32_t r);

 private:
  void make(std::uint32_t r);
  void describe(std::uint32_t r);
  kernels::WorkerArguments arguments(std::uint32_t r) const;
  void write_enabled_epoch(std::uint32_t r, std::uint32_t enabled_epoch);
  void write(std::uint32_t r, const void* word, std::uint32_t value);
  CallRank& use(std::uint32_t r) {
    EPD_CU(cuCtxSetCurrent(world_.rank(r).context));
    return ranks_[r];
  }

  World world_;
  std::uint32_t max_tokens_;
  const abi::ExchangeArenaLayout layout_;
  const abi::ResultsLayout results_layout_;
  std::vector<CallRank> ranks_;
  CUlibrary library_ = nullptr;
  CUkernel gate_ = nullptr;
  CUkernel main_ = nullptr;
};

}  // namespace epd::fake_cuda_test
