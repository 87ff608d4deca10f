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
  std::uint32_t num_sms() const override { return device_.lane_sms(*this); }
  void start(Kind kind, std::uint32_t place) override;
  // In the host's memory, as no stream need have a turn then to write it.
  const std::uint32_t* abort_word(std::uint32_t place) const override { return &host_place(place).abort; }
  void clear_abort(std::uint32_t place) override { host_place(place).abort = 0; }
  void abort(std::uint32_t place, const Signal& signal) override;
};

}  // namespace epd
