// One rank's stream on a GPU, and what its operations need beside the arenas.
#pragma once

#include "cuda_device.h"

#include <atomic>
#include <vector>

namespace epd {

class CudaLane final : public Lane {
 public:
  static Result<std::unique_ptr<Lane>> open(CudaDevice& device, const LaneShape& shape);
  ~CudaLane() override;

  std::unique_ptr<Flight> launch(const LaunchRequest& request) override;
  void pass(std::uint32_t slot, const StreamSignal& signal) override;
  void release(const StreamSignal& signal) override;

 private:
  friend class CudaFlight;

  // What of a slot the host and the device both see; followed by the words of a placement.
  struct HostSlot {
    kernels::cuda::Operation staging;
    kernels::cuda::OpResult result;
    std::uint64_t counted;  // tag
  };
  struct SlotState {
    bool aborted = false;  // its abort word has been set
    StreamSignal passing;  // of the last pass(); ready null: none
  };

  CudaLane(CudaDevice& device, const LaneShape& shape);
  Status allocate();
  HostSlot& host_slot(std::uint32_t slot) const {
    return *reinterpret_cast<HostSlot*>(host_ + slot * host_stride_);
  }
  std::int32_t* placement(std::uint32_t slot) const {
    return reinterpret_cast<std::int32_t*>(host_ + slot * host_stride_ + sizeof(HostSlot));
  }
  CUdeviceptr abort_word(std::uint32_t slot) const;
  CUdeviceptr device_op(std::uint32_t slot) const;
  void follow_partition();
  void prepare(const LaunchRequest& request);
  void must(const char* what, CUresult result) const { cuda_must(driver_, what, result); }

  CudaDevice& device_;
  const CudaDriver& driver_;
  const LaneShape shape_;
  std::shared_ptr<Partition> partition_;
  CUstream stream_ = nullptr;
  std::byte* host_ = nullptr;  // pinned
  std::size_t host_stride_ = 0;
  CUdeviceptr memory_ = 0;  // operations, abort words, workspace
  CUdeviceptr workspace_ = 0;
  std::size_t workspace_bytes_ = 0;
  std::vector<SlotState> slots_;
  std::uint32_t in_flight_ = 0;
  bool dirty_ = false;  // an operation has failed: the workspace's counters are anything
};

}  // namespace epd
