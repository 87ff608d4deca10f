// A lane whose operations are run by a kernel that stays on the lane's share of SMs.
#pragma once

#include "cuda_lane.h"
#include "resident_commands.h"

#include <memory>
#include <vector>

namespace epd {

class ResidentLane final : public CudaLane {
 public:
  ResidentLane(CudaDevice& device, const LaneShape& shape);
  ~ResidentLane() override;

  // Tells the kernel to stop when it has ended what it was told before, or the command that it runs, and
  // starts it anew on the lane's share of today when it has. Nobody waits for that: what it is told meanwhile
  // is for the next one. It grows, or begins, when others have made room.
  void follow_share() override;
  bool advance() override;
  std::uint32_t held_sms() const override { return held_; }
  CommandPort* commands() override { return commands_.get(); }

 private:
  friend class ResidentCommands;

  // Of the kernel that stays, or is to come: the first one may be small.
  std::uint32_t num_sms() const override { return runs() ? ctas_ : 1; }
  void start(Kind kind, std::uint32_t place) override;
  const std::uint32_t* abort_word(std::uint32_t place) const override;
  void clear_abort(std::uint32_t place) override;
  void abort(std::uint32_t place, const Signal& signal) override;
  std::size_t extra_device_bytes() const override;
  std::size_t extra_host_bytes() const override;
  std::size_t state_bytes() const;
  std::uint64_t& told(std::uint32_t entry) const;
  std::byte* commands_host() const;  // what of the host's memory is for commands
  void tell(kernels::cuda::Task task, std::uint32_t place);
  bool runs() const { return ctas_ != 0; }
  bool stopping() const { return told_ns_ != 0; }
  void stop();
  void follow_round();
  void start_kernel();

  std::uint32_t ctas_ = 0;     // 0: there has been no kernel
  std::uint32_t held_ = 0;     // SMs: of the kernel, and of the next one if that has been told to stop
  bool waits_ = false;         // for room
  std::uint64_t told_ns_ = 0;  // when it was told to stop, or began to step aside; 0: neither
  bool aside_ = false;         // that
  std::uint32_t round_ = 0;    // CudaDevice::round(), of the kernel
  std::uint32_t next_ = 0;     // entry of the queue
  bool behind_ = false;        // the next entry comes behind another word in the control stream
  std::vector<bool> aborted_;  // [places]: the word is set
  std::unique_ptr<ResidentCommands> commands_;
};

}  // namespace epd
