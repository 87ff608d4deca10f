// A lane whose operations are calls. A resident kernel carries them out on the lane's share of SMs.
#pragma once

#include "cuda_lane.h"
#include "resident_calls.h"

namespace epd::device {

class ResidentLane final : public CudaLane {
 public:
  ResidentLane(CudaDevice& device, const LaneShape& shape) : CudaLane(device, shape), calls_(*this) {}
  ~ResidentLane() override;

  // Tells the kernel to stop after the call that it runs, and starts it again on the new share when it has
  // stopped. Calls that come meanwhile are for the next kernel, so nobody waits. A kernel that grows, or
  // begins, waits until others have made room.
  void follow_share() override;
  bool advance() override;
  std::uint32_t held_sms() const override { return held_; }
  CallPort* calls() override { return &calls_; }
  std::unique_ptr<OperationInFlight> launch(const LaunchRequest& /*request*/) override {
    EPD_CHECK(!"what a resident kernel runs is called by clients");
    return nullptr;
  }
  void release(const kernels::cuda::Signal& /*signal*/, std::uint64_t /*ticket*/) override {}

 private:
  friend class ResidentCalls;

  std::size_t own_device_bytes() const override;
  std::size_t own_host_bytes() const override { return ResidentCalls::host_bytes(shape_); }
  bool runs() const { return ctas_ != 0; }
  bool stopping() const { return told_ns_ != 0; }
  void stop();
  void follow_yield_epoch();
  void start_kernel();

  std::uint32_t ctas_ = 0;         // 0: there has been no kernel
  std::uint32_t held_ = 0;         // SMs of the kernel, or of the next one if the kernel was told to stop
  bool waits_ = false;             // for room
  std::uint64_t told_ns_ = 0;      // when it was told to stop, or began to yield; 0: neither
  bool aside_ = false;             // it yields
  std::uint32_t yield_epoch_ = 0;  // in which the kernel was started
  std::uint32_t kernels_ = 0;      // number of kernels that have been started
  ResidentCalls calls_;
};

}  // namespace epd::device
