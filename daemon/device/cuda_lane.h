// The base of all lanes of a GPU. It has a stream, memory and a priority. launched_lane.h and worker_lane.h
// say how operations are started.
#pragma once

#include "cuda_device.h"
#include "signal_look.h"

#include <memory>

namespace epd::device {

class CudaLane : public Lane {
 public:
  ~CudaLane() override;

  // Called once, before anything else. UNSUPPORTED: the device can't hold a row.
  Status allocate();
  // The SMs of the device, or the lane's share of them, have changed.
  virtual void follow_share() = 0;
  // Called in each round of the loop.
  virtual void advance() {}
  std::int32_t priority() const { return priority_; }
  virtual std::uint32_t in_flight() const { return 0; }  // operations that were launched
  // The partition of its stream; null: it has had no stream.
  const Partition* partition() const { return partition_.get(); }
  void set_priority(std::int32_t priority) final;
  void look_at_signals() final { signals_.begin(); }
  const SignalCopy* signals() final { return signals_.seen(); }

 protected:
  using Kind = kernels::cuda::Kind;
  using Operation = kernels::cuda::Operation;

  CudaLane(CudaDevice& device, const LaneShape& shape);

  // Sizes of the memory that this kind of lane needs. It is zeroed. That of the host is pinned.
  virtual std::size_t own_device_bytes() const = 0;
  virtual std::size_t own_host_bytes() const = 0;
  CUdeviceptr own_device() const { return memory_.device + workspace_bytes_; }
  std::byte* own_host() const { return memory_.host; }
  // Fills in the lane's workspace, of an operation that has no other part of the lane's.
  void describe_workspace(Operation& op) const;
  // The priority of the lane's stream, where `greatest` is the highest that there is.
  virtual int wanted_priority(int /*greatest*/) const { return -shape_.priority; }
  void take_stream();
  // Called when nothing is in flight and the stream has ended: gives the stream back.
  void let_stream_go();
  // Called by the destructor: the device keeps stream and memory until the stream has ended.
  void leave_running(std::unique_ptr<PairsAhead> pairs, CallPort::Layout calls);
  CUstream control() const { return device_.partition()->control(); }
  void write_word(const void* word, std::uint32_t value) const;
  void must(const char* what, CUresult result) const { cuda_must(driver_, what, result); }

  static constexpr std::size_t kAlign = 256;
  static constexpr std::size_t aligned(std::size_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

  CudaDevice& device_;
  const CudaDriver& driver_;
  const LaneShape shape_;
  std::shared_ptr<Partition> partition_;
  CUstream stream_ = nullptr;
  SignalLook signals_;

 private:
  bool fits(const kernels::cuda::Shape& shape) const;
  void leave(LeavingLane lane);

  std::int32_t priority_ = 0;
  int stream_priority_ = 0;
  LaneMemory memory_;  // on the device: workspace, own; on the host: own, signals
  std::size_t workspace_bytes_ = 0;
};

}  // namespace epd::device
