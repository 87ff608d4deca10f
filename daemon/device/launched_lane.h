// A lane whose operations are launched one by one, on a stream of its own.
#pragma once

#include "cuda_lane.h"

namespace epd {

class LaunchedLane final : public CudaLane {
 public:
  LaunchedLane(CudaDevice& device, const LaneShape& shape) : CudaLane(device, shape) {}
  ~LaunchedLane() override;

  void follow_share() override;

 private:
  std::uint32_t num_sms() const override { return device_.lane_sms(); }
  void start(Kind kind, std::uint32_t place) override;
  void free_from_waiting(const Signal& signal) override;
};

}  // namespace epd
