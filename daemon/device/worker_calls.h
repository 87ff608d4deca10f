// The host's side of a lane's calls. Words for the kernels go by the control stream, in their order.
#pragma once

#include "cuda_driver.h"
#include "device/launcher.h"
#include "kernels/calls.h"
#include "kernels/workers.h"

#include <cstddef>
#include <span>
#include <vector>

namespace epd::device {

class WorkerLane;

// A lane's memory on the device, without its workspace. kernels::RouteState[num_routes] and
// WorkDivision[kDivisionKinds, SMs of the device] follow.
struct LaneOnDevice {
  kernels::LaneState lane;
  alignas(64) kernels::CallState calls;
  alignas(64) kernels::DeviceView view;
  alignas(64) kernels::MemoryTable memories;
  alignas(64) kernels::Bells bells;
  alignas(64) kernels::ResultRuns runs[abi::kReplayedResults];

  static std::size_t bytes(const LaneShape& shape, std::uint32_t max_sms);
};

// A lane's pinned memory on the host. RouteState[num_routes] follow.
struct LaneOnHost {
  kernels::CallHost calls;
  CallPort::Ring ring;        // a copy of the words of calls, and
  std::uint32_t ring_number;  // the number of the look that has copied them
  std::uint32_t door[2];      // a copy of the lane's door, and
  std::uint32_t door_number;  // the number of the look that has copied it
  std::uint32_t told;         // number of the last change of the enabled epoch that the door has

  static std::size_t bytes(const LaneShape& shape);
};

class WorkerCalls final : public CallPort {
 public:
  explicit WorkerCalls(WorkerLane& lane) : lane_(lane) {}

  void open(const Layout& layout) override;
  void set_limits(const Limits& limits) override;
  void halt() override;
  bool halted() override;
  void stop() override { halt(); }
  bool stopped() override { return halted(); }
  void resume(const Start& start) override;
  void set_memory(std::uint32_t rank, std::uint32_t number, const abi::MappedMemory& memory) override;
  bool resumed() override;
  const kernels::JournalEntry* front() const override;
  void pop() override;
  void look() override;
  const Ring* seen() override;

  // Called by the lane. All pairs that are enqueued run, and discard calls.
  void leave();
  void guarantee(std::uint32_t sms);
  // While it drains, the stream empties by itself, and takes calls as long as it has pairs.
  void drain(bool drains);
  std::uint64_t last_end_ns() const { return last_end_ns_; }  // of a call, as the journal told
  kernels::WorkerArguments arguments() const;
  const Layout& layout() const { return layout_; }

 private:
  kernels::RouteState* routes() const;
  kernels::WorkDivision* divisions() const;
  void write_state(std::uint32_t kernels::CallState::*word, std::uint32_t value);
  void write_divisions() const;
  void write_results();
  void write_view(const Start& start) const;
  void write_bells(std::span<const Bell> of_ranks);
  void write_generation();
  void write_enabled_epoch();
  // Whether no kernel runs that knows an earlier enabled epoch. Begins a look at the door if it has to.
  bool settled();
  void ring();
  // Rings if there are calls, and nothing has ended since the last look.
  void ring_if_calls_stand(const Ring& now);
  std::uint32_t host_ended() const;

  WorkerLane& lane_;
  Layout layout_;
  Limits limits_;
  std::uint32_t enabled_epoch_ = 0;
  std::uint32_t read_ = 0;  // entries of the journal
  std::uint32_t told_ = 0;  // how many of these the kernel knows to be read
  std::uint32_t looks_ = 0;
  bool looking_ = false;  // seen() has not returned the last copy
  std::uint32_t generation_ = 0;
  std::uint32_t guaranteed_sms_ = 0;
  std::uint64_t last_end_ns_ = 0;
  std::vector<Bell> bells_;    // of other ranks: their memory stays mapped while gates may ring
  std::uint32_t changes_ = 0;  // of the enabled epoch
  std::uint32_t looked_at_change_ = 0;
  std::uint32_t door_looks_ = 0;
  bool door_looking_ = false;
  bool settled_ = true;
  std::uint32_t ended_before_[kernels::kCallRings] = {};  // at the last look at the rings
};

}  // namespace epd::device
