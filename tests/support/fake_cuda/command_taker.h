// What CTA 0 of a kernel that stays does with commands (kernels/cuda/commands.cuh), by a host.
#pragma once

#include "fake_cuda/kernel_protocol.h"
#include "kernels/command_turn.h"

namespace epd::fake_cuda {

class CommandTaker {
 public:
  using Operation = kernels::cuda::Operation;
  // Runs an operation to its end. Not empty: what a device would have faulted at.
  using Run = std::function<std::string(kernels::cuda::Task, const Operation&)>;

  CommandTaker(const kernels::cuda::CommandArguments& own, const KernelDevice& device, Run run)
      : own_(own), device_(device), run_(std::move(run)) {}

  // Before all else. Not empty: what is out of reach.
  std::string begin();
  // Takes the host's turn or a command, if there is one: false, there was none. `wrong`: as Run says.
  bool look(std::string& wrong);

 private:
  bool take_turn(std::string& wrong);
  void set_sequence();
  bool journal_is_full() const;
  kernels::cuda::JournalEntry& next_entry();
  // The end of what was not run: for the client, then for the host unless it is discarded.
  void end(const abi::Command& command, bool well);
  void refuse(const abi::Command& command, const kernels::cuda::Judgement& judgement);
  void run_noop(const abi::Command& command);
  std::string run(const abi::Command& command, const kernels::cuda::ProgramHead& head);
  void write_journal(const abi::Command& command, std::uint64_t index, std::uint32_t num_tokens);

  const kernels::cuda::CommandArguments own_;
  const KernelDevice& device_;
  const Run run_;
};

}  // namespace epd::fake_cuda
