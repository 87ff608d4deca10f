// A lane whose operations are run by a kernel that stays on the lane's share of SMs.
#pragma once

#include "cuda_lane.h"

namespace epd {

class ResidentLane final : public CudaLane {
 public:
  ResidentLane(CudaDevice& device, const LaneShape& shape) : CudaLane(device, shape) {}
  ~ResidentLane() override;

  // Stops the kernel, and starts it anew on the lane's share of today.
  void follow_share() override;

 private:
  std::uint32_t num_sms() const override {
    return ctas_;
  }  // the share of today comes when nothing is in flight
  void start(Kind kind, std::uint32_t place) override;
  void free_from_waiting(const Signal&) override {}  // the kernel looks at the abort word
  std::size_t extra_device_bytes() const override { return sizeof(kernels::cuda::ResidentState); }
  std::size_t extra_host_bytes() const override {
    return kernels::cuda::kQueueEntries * sizeof(std::uint64_t);
  }
  std::uint64_t* entries() const { return reinterpret_cast<std::uint64_t*>(extra_host()); }
  void tell(kernels::cuda::Task task, std::uint32_t place);
  void stop();

  std::uint32_t ctas_ = 0;  // of the kernel; 0: it is not running
  std::uint32_t next_ = 0;  // entry of the queue
};

}  // namespace epd
