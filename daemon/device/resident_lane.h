// A lane whose operations are run by a kernel that stays on the lane's share of SMs.
#pragma once

#include "cuda_lane.h"

#include <vector>

namespace epd {

class ResidentLane final : public CudaLane {
 public:
  ResidentLane(CudaDevice& device, const LaneShape& shape);
  ~ResidentLane() override;

  // Stops the kernel, and starts it anew on the lane's share of today.
  void follow_share() override;

 private:
  std::uint32_t num_sms() const override {
    return ctas_;
  }  // the share of today comes when nothing is in flight
  void start(Kind kind, std::uint32_t place) override;
  const std::uint32_t* abort_word(std::uint32_t place) const override;
  void clear_abort(std::uint32_t place) override;
  void abort(std::uint32_t place, const Signal& signal) override;
  std::size_t extra_device_bytes() const override;
  void tell(kernels::cuda::Task task, std::uint32_t place);
  void stop();

  std::uint32_t ctas_ = 0;     // of the kernel; 0: it is not running
  std::uint32_t next_ = 0;     // entry of the queue
  std::vector<bool> aborted_;  // [places]: the word is set
};

}  // namespace epd
