// One rank's stream on a GPU, and what its operations need beside the arenas.
#pragma once

#include "cuda_device.h"

#include <map>
#include <vector>

namespace epd {

class CudaLane final : public Lane {
 public:
  static Result<std::unique_ptr<Lane>> open(CudaDevice& device, const LaneShape& shape);
  ~CudaLane() override;

  std::unique_ptr<Flight> launch(const LaunchRequest& request) override;
  void pass(const StreamSignal& signal) override;
  void release(const StreamSignal& signal) override;

 private:
  friend class CudaFlight;

  // What of a place the host and the device both see; followed by the words of a placement.
  struct HostPlace {
    kernels::cuda::Operation staging;
    kernels::cuda::OpResult result;
    std::uint64_t counted;  // tag
    std::uint32_t abort;    // looked at by waiting kernels; here, as no stream need have a turn to write it
  };
  CudaLane(CudaDevice& device, const LaneShape& shape);
  Status allocate();
  HostPlace& host_place(std::uint32_t place) const {
    return *reinterpret_cast<HostPlace*>(memory_.host + place * host_stride_);
  }
  std::int32_t* placement(std::uint32_t place) const {
    return reinterpret_cast<std::int32_t*>(memory_.host + place * host_stride_ + sizeof(HostPlace));
  }
  CUdeviceptr device_op(std::uint32_t place) const;
  void write_word(CUstream stream, const void* word, std::uint32_t value) const;
  // Of passes: nothing that comes after them in the stream can have begun.
  void free_passes();
  void follow_partition();
  void let_stream_go();
  void prepare(const LaunchRequest& request);
  void must(const char* what, CUresult result) const { cuda_must(driver_, what, result); }

  CudaDevice& device_;
  const CudaDriver& driver_;
  const LaneShape shape_;
  std::shared_ptr<Partition> partition_;
  CUstream stream_ = nullptr;
  int stream_priority_ = 0;
  LaneMemory memory_;  // of the device: operations, workspace; of the host: places
  std::size_t host_stride_ = 0;
  CUdeviceptr workspace_ = 0;
  std::size_t workspace_bytes_ = 0;
  std::map<const void*, StreamSignal> passing_;    // the last of each ready word
  std::map<const void*, std::uint32_t> released_;  // the furthest of each done word
  std::uint32_t in_flight_ = 0;
  bool dirty_ = false;  // an operation has failed: the workspace's counters are anything
};

}  // namespace epd
