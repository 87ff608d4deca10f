// A GPU's lane. Its operations are calls: pairs of a gate and a main kernel, enqueued ahead, carry them out
// (kernels/workers.h). No kernel runs, and no SM is held, while there is no call.
#pragma once

#include "cuda_device.h"
#include "pairs_ahead.h"
#include "signal_look.h"
#include "worker_calls.h"

#include <memory>

namespace epd::device {

class WorkerLane final : public Lane {
 public:
  WorkerLane(CudaDevice& device, const LaneShape& shape);
  ~WorkerLane() override;

  // Called once, before anything else. UNSUPPORTED: the device can't hold a row.
  Status allocate();
  // The SMs of the device, or the lane's share of them, have changed.
  void follow_share();
  // Called in each round of the loop.
  void advance();
  std::int32_t priority() const { return priority_; }
  // While it drains, nothing is enqueued ahead of calls, and what is there runs and ends.
  void drain(bool drains);
  bool is_drained() const;
  std::uint64_t last_call_ns() const { return calls_.last_end_ns(); }
  CallPort& calls() override { return calls_; }
  bool by_kernels() const override { return true; }
  void set_priority(std::int32_t priority) override;
  void look_at_signals() override { signals_.begin(); }
  const SignalCopy* signals() override { return signals_.seen(); }

 private:
  friend class WorkerCalls;
  using Operation = kernels::Operation;

  bool fits(const kernels::Shape& shape) const;
  // The host only takes addresses in it.
  LaneOnDevice* on_device() const {
    return reinterpret_cast<LaneOnDevice*>(memory_.device + workspace_bytes_);
  }
  LaneOnHost* on_host() const { return reinterpret_cast<LaneOnHost*>(memory_.host); }
  // Fills in the lane's workspace, of an operation that has no other part of the lane's.
  void describe_workspace(Operation& op) const;
  // The CTAs of a main kernel, and the SMs that a gate asks for beyond the guaranteed ones.
  std::uint32_t ctas() const;
  std::uint32_t asked_sms() const;
  void take_stream();
  // Called when the rings are known.
  void start_pairs();
  void write_word(const void* word, std::uint32_t value) const;
  void must(const char* what, CUresult result) const { cuda_must(driver_, what, result); }

  CudaDevice& device_;
  const CudaDriver& driver_;
  const LaneShape shape_;
  std::int32_t priority_ = 0;
  LaneMemory memory_;  // on the device: workspace, LaneOnDevice; on the host: LaneOnHost, signals
  std::size_t workspace_bytes_ = 0;
  CUstream stream_ = nullptr;
  int stream_priority_ = 0;
  SignalLook signals_;
  std::unique_ptr<PairsAhead> pairs_;
  WorkerCalls calls_;
};

}  // namespace epd::device
