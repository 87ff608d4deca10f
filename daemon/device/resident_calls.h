// What the host's side of a resident lane has for calls. Memory of the lane's, in two parts:
//   device  CallState, RouteState[num_routes], DeviceView, MemoryTable,
//           WorkDivision[kDivisionKinds, SMs of the device], ResultRuns[kReplayedResults]
//   host    CallHost, RouteState[num_routes], Look; pinned
//
// Words for the kernel go by the control stream, in their order.
#pragma once

#include "cuda_driver.h"
#include "device/launcher.h"

#include <cstddef>

namespace epd::device {

class ResidentLane;

class ResidentCalls final : public CallPort {
 public:
  explicit ResidentCalls(ResidentLane& lane) : lane_(lane) {}

  static std::size_t device_bytes(const LaneShape& shape, std::uint32_t max_sms);
  static std::size_t host_bytes(const LaneShape& shape);

  void open(const Layout& layout) override;
  void set_limits(std::uint32_t sms, std::uint32_t timeout_ms) override;
  void halt() override;
  bool halted() const override;
  void resume(const Start& start) override;
  bool resumed() const override;
  bool waits_for_room() const override;
  const kernels::cuda::JournalEntry* front() const override;
  void pop() override;
  void look() override;
  const Ring* seen() override;

  // Called by the lane: the kernel with this number is to leave.
  void stop(std::uint32_t kernel) { write_state(offsetof(kernels::cuda::CallState, stop), kernel); }
  // The kernel must not be started before this is true.
  bool opened() const { return layout_.words != nullptr; }
  kernels::cuda::CallArguments arguments() const;
  const Layout& layout() const { return layout_; }

 private:
  struct Look {
    Ring ring;
    std::uint32_t number;  // of the look that has copied it
  };
  CUdeviceptr state() const;
  CUdeviceptr routes() const;
  CUdeviceptr view() const;
  CUdeviceptr memories() const;
  CUdeviceptr division() const;
  CUdeviceptr runs() const;
  kernels::cuda::CallHost& host() const;
  kernels::cuda::RouteState* host_routes() const;
  Look& last_look() const;
  void write_state(std::size_t offset, std::uint32_t value);
  void write_divisions() const;
  void write_results();
  void write_view(const kernels::cuda::DeviceView& view_of_group,
                  const kernels::cuda::MemoryTable& of_ranks) const;
  bool enabled_epoch_taken() const;
  std::uint32_t host_ended() const;

  ResidentLane& lane_;
  Layout layout_;
  std::uint32_t sms_ = 0;
  std::uint32_t timeout_ms_ = 0;
  std::uint32_t enabled_epoch_ = 0;
  std::uint32_t read_ = 0;  // entries of the journal
  std::uint32_t told_ = 0;  // how many of these the kernel knows to be read
  std::uint32_t looks_ = 0;
  bool looking_ = false;  // seen() has not returned the last copy
};

}  // namespace epd::device
