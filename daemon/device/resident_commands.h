// What the host's side of a resident lane has for commands. Memory of the lane's, in two parts:
//   device  CommandState, RouteState[num_routes], Program[kMaxPrograms]
//   host    CommandHost, RouteState[num_routes], Look; pinned
//
// Words for the kernel go by the control stream, in their order.
#pragma once

#include "cuda_driver.h"
#include "device/launcher.h"

#include <array>

namespace epd {

class ResidentLane;

class ResidentCommands final : public CommandPort {
 public:
  ResidentCommands(ResidentLane& lane, std::uint32_t num_routes);

  static std::size_t device_bytes(std::uint32_t num_routes);
  static std::size_t host_bytes(std::uint32_t num_routes);

  void open(const Layout& layout) override;
  void record(std::uint32_t number, kernels::cuda::Kind kind, const Program& program,
              std::uint32_t sms) override;
  void halt() override;
  bool halted() const override;
  void resume(const Start& start) override;
  bool resumed() const override;
  bool waits_for_room() const override;
  const kernels::cuda::JournalEntry* front() const override;
  void pop() override;
  void look() override;
  const Ring* seen() override;

  // For the lane. The kernel is not to run before this.
  bool opened() const { return layout_.words != nullptr; }
  kernels::cuda::CommandArguments arguments() const;
  const Layout& layout() const { return layout_; }
  // While no kernel runs: it has other SMs now.
  void fit_programs();

 private:
  struct Recorded {
    kernels::cuda::Kind kind = kernels::cuda::Kind::kNoop;
    std::uint32_t sms = 0;
    Program program;  // kStop: none
  };
  struct Look {
    Ring ring;
    std::uint32_t number;  // of the look that has brought it
  };
  CUdeviceptr state() const;
  CUdeviceptr routes() const;
  CUdeviceptr programs() const;
  kernels::cuda::CommandHost& host() const;
  kernels::cuda::RouteState* host_routes() const;
  Look& last_look() const;
  void write_state(std::size_t offset, std::uint32_t value);
  void bring(std::uint32_t number);
  bool turn_taken() const;

  ResidentLane& lane_;
  const std::uint32_t num_routes_;
  Layout layout_;
  std::uint32_t turn_ = 0;
  std::uint32_t read_ = 0;  // entries of the journal
  std::uint32_t told_ = 0;  // of these, how many the kernel knows of
  std::uint32_t looks_ = 0;
  bool looking_ = false;  // seen() has not given the last one
  std::array<Recorded, abi::kMaxPrograms> recorded_{};
};

}  // namespace epd
