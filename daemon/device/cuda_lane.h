// What all lanes of a GPU have: a stream, memory, a share of the SMs. How operations get to run is for
// launched_lane.h and resident_lane.h.
#pragma once

#include "cuda_device.h"
#include "signal_look.h"

#include <memory>

namespace epd::device {

class CudaLane : public Lane {
 public:
  ~CudaLane() override;

  // Once, before anything else. UNSUPPORTED: the device can't hold a row.
  Status allocate();
  // The device's SMs, or their share for each lane, are not what they were.
  virtual void follow_share() = 0;
  // Goes on with that; true while it is under way.
  virtual bool advance() { return false; }
  // SMs that nobody else can have, while nothing runs too.
  virtual std::uint32_t held_sms() const { return 0; }
  std::int32_t priority() const { return priority_; }
  virtual std::uint32_t in_flight() const { return 0; }  // operations that were launched
  // Where its stream is; null: it has had none.
  const Partition* partition() const { return partition_.get(); }
  void set_priority(std::int32_t priority) final;
  void look_at_signals() final { signals_.begin(); }
  const SignalCopy* signals() final { return signals_.seen(); }

 protected:
  using Kind = kernels::cuda::Kind;
  using Operation = kernels::cuda::Operation;

  CudaLane(CudaDevice& device, const LaneShape& shape);

  // Memory of this kind of lane, zeroed. The host's is pinned.
  virtual std::size_t own_device_bytes() const = 0;
  virtual std::size_t own_host_bytes() const = 0;
  CUdeviceptr own_device() const { return memory_.device + workspace_bytes_; }
  std::byte* own_host() const { return memory_.host; }
  // The lane's part of an operation that has nothing else.
  void describe_workspace(Operation& op) const;
  void take_stream();
  // Nothing is in flight, and the stream has come to its end.
  void let_stream_go();
  // Of a lane that is being destroyed: stream and memory are the device's, until the stream has come to its
  // end.
  void leave_running(std::uint32_t held_sms, std::uint64_t told_ns, CallPort::Layout calls);
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
  void leave(LeavingLane lane);

  std::int32_t priority_ = 0;
  int stream_priority_ = 0;
  LaneMemory memory_;  // of the device: workspace, own; of the host: own, signals
  std::size_t workspace_bytes_ = 0;
};

}  // namespace epd::device
