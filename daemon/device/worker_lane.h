// A lane whose operations are calls. Pairs of a gate and a main kernel, enqueued ahead, carry them out
// (kernels/workers.h). No kernel runs, and no SM is held, while there is no call.
#pragma once

#include "cuda_lane.h"
#include "pairs_ahead.h"
#include "worker_calls.h"

namespace epd::device {

class WorkerLane final : public CudaLane {
 public:
  WorkerLane(CudaDevice& device, const LaneShape& shape) : CudaLane(device, shape), calls_(*this) {}
  ~WorkerLane() override;

  void follow_share() override;
  void advance() override;
  CallPort* calls() override { return &calls_; }
  std::unique_ptr<OperationInFlight> launch(const LaunchRequest& /*request*/) override {
    EPD_CHECK(!"what this lane runs is called by clients");
    return nullptr;
  }
  void release(const kernels::cuda::Signal& /*signal*/, std::uint64_t /*ticket*/) override {}

 private:
  friend class WorkerCalls;

  std::size_t own_device_bytes() const override;
  std::size_t own_host_bytes() const override { return WorkerCalls::host_bytes(shape_); }
  kernels::cuda::LaneState* state() const {
    return reinterpret_cast<kernels::cuda::LaneState*>(own_device());
  }
  // A GPU that is busy looks at a wait within some 4 us if its stream has the highest priority, else within
  // 100 us.
  int wanted_priority(int greatest) const override { return shape_.priority < 0 ? greatest + 1 : greatest; }
  // Of a main kernel, and of these what a gate asks for beyond the guaranteed ones.
  std::uint32_t ctas() const;
  std::uint32_t asked_sms() const;
  // Called when the rings are known.
  void start_pairs();

  std::unique_ptr<PairsAhead> pairs_;
  WorkerCalls calls_;
};

}  // namespace epd::device
