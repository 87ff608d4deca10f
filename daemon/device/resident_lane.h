// A lane whose operations are calls, which a resident kernel takes on the lane's share of SMs.
#pragma once

#include "cuda_lane.h"
#include "resident_calls.h"

namespace epd::device {

class ResidentLane final : public CudaLane {
 public:
  ResidentLane(CudaDevice& device, const LaneShape& shape) : CudaLane(device, shape), calls_(*this) {}
  ~ResidentLane() override;

  // Tells the kernel to stop when it has ended the call that it runs, and starts it anew on the lane's share
  // of today when it has. Nobody waits for that: calls that come meanwhile are for the next one. It grows, or
  // begins, when others have made room.
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
  void follow_round();
  void start_kernel();

  std::uint32_t ctas_ = 0;         // 0: there has been no kernel
  std::uint32_t held_ = 0;         // SMs: of the kernel, and of the next one if that has been told to stop
  bool waits_ = false;             // for room
  std::uint64_t told_ns_ = 0;      // when it was told to stop, or began to yield; 0: neither
  bool aside_ = false;             // that
  std::uint32_t yield_epoch_ = 0;  // CudaDevice::round(), of the kernel
  std::uint32_t kernels_ = 0;      // that have been started
  ResidentCalls calls_;
};

}  // namespace epd::device
