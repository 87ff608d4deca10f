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
  void start(Kind kind, std::uint32_t place) override;
  void free_from_waiting(const Signal& signal) override;
};

}  // namespace epd
