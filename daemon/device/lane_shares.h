// The lanes of a GPU, and how they share its SMs: each has some that it may always use, and takes others by
// credits (kernels/workers.h).
#pragma once

#include "cuda_driver.h"
#include "kernels/workers.h"

#include <cstdint>
#include <span>
#include <vector>

namespace epd::device {

class WorkerLane;

class LaneShares {
 public:
  explicit LaneShares(const CudaDriver& driver) : driver_(driver) {}

  // `max_sms`: that lanes may use at most, and do at first. `credits`: memory of the device for
  // kernels::SmCredits. Words are written by `control`.
  void open(std::uint32_t max_sms, CUdeviceptr credits, CUstream control);
  void add(WorkerLane* lane);
  void remove(WorkerLane* lane);
  // Clamped, so that each lane keeps one.
  void set_sms(std::uint32_t sms);
  // Tells the device and all lanes: SMs, lanes or priorities have changed.
  void apply();

  std::span<WorkerLane* const> lanes() const { return lanes_; }
  std::uint32_t size() const { return static_cast<std::uint32_t>(lanes_.size()); }
  std::uint32_t max_sms() const { return max_sms_; }
  std::uint32_t sms() const { return sms_; }
  // SMs that the lane may always use.
  std::uint32_t guaranteed(const WorkerLane& lane) const;
  kernels::SmCredits* credits() const { return reinterpret_cast<kernels::SmCredits*>(credits_); }

 private:
  std::uint32_t all_guaranteed() const;

  const CudaDriver& driver_;
  std::uint32_t max_sms_ = 0;
  std::uint32_t sms_ = 0;
  CUdeviceptr credits_ = 0;
  CUstream control_ = nullptr;
  std::vector<WorkerLane*> lanes_;
};

}  // namespace epd::device
