#include "fake_cuda/kernel_protocol.h"

#include "cuda/resident/work.h"
#include "fake_cuda/operation_check.h"
#include "fake_cuda/operation_kernel.h"

#include <cstring>

namespace epd::fake_cuda {

using namespace kernels::cuda;

std::string run_kernel(const Launch& launch, const Operation* given, const KernelDevice& device) {
  if (given == nullptr || !device.reaches(given, sizeof(Operation))) return "the operation is out of reach";
  const Operation op = *given;
  const Task task = launch.kernel == kKernelNames[0]   ? Task::kDispatch
                    : launch.kernel == kKernelNames[1] ? Task::kCombine
                                                       : Task::kCombinePerExpert;
  if (std::string wrong = check_operation(launch, task, op, device); !wrong.empty()) return wrong;
  return run_operation(task, op, device);
}

namespace {

// A resident kernel: what its CTA 0 does with one thread is kernels/cuda/resident/work.h. This does the rest,
// what the other threads and CTAs do (kernels/cuda/resident/kernel.cuh, kernels.cu).
class Resident {
 public:
  Resident(const Launch& launch, const ResidentArguments& own, const KernelDevice& device)
      : launch_(launch), own_(own), device_(device) {}

  std::string stay();

 private:
  std::string reach() const;
  std::string compose(Task task, Operation& op) const;
  std::string check(Task task, const Operation& op) const;

  const Launch& launch_;
  const ResidentArguments& own_;
  const KernelDevice& device_;
  Watch watch_{};
};

std::string Resident::reach() const {
  const CommandArguments& commands = own_.commands;
  if (!device_.reaches(own_.state, sizeof(ResidentState))) return "the state is out of reach";
  if (!device_.reaches(own_.round, sizeof(*own_.round))) return "the round is out of reach";
  if (!device_.reaches(commands.words, sizeof(abi::CommandWords)))
    return "the words of calls are out of reach";
  if (!device_.reaches(commands.state, sizeof(CommandState))) return "the state of calls is out of reach";
  if (!device_.reaches(commands.host, sizeof(CommandHost))) return "the journal is out of reach";
  if (!device_.reaches(commands.results, sizeof(abi::Results))) return "the results are out of reach";
  if (!device_.reaches(commands.runs, sizeof(ResultRuns) * abi::kReplayedResults))
    return "the counts of runs are out of reach";
  if (commands.limits.depth == 0) return "an arena without blocks";
  return {};
}

std::string Resident::compose(Task task, Operation& op) const {
  const CommandArguments& commands = own_.commands;
  const TakenCall& call = watch_.running;
  const std::uint32_t at = movers_index(call, commands.most_ctas, launch_.ctas);
  if (!device_.reaches(commands.view, sizeof(DeviceView))) return "the group's view is out of reach";
  if (!device_.reaches(commands.movers + at, sizeof(Movers))) return "the division of work is out of reach";
  const DeviceView& view = *commands.view;
  op = kernels::cuda::compose(view.group, call);
  for (std::uint32_t rank = 0; rank < kMaxRanks; ++rank)
    compose_peer(op.peers[rank], view.group.exchange, view.peers[rank], call);
  compose_ends(op, commands, call);
  op.movers = commands.movers[at];
  return check(task, op);
}

std::string Resident::check(Task task, const Operation& op) const {
  if (op.movers.ctas > launch_.ctas) return "an operation asks for more CTAs than there are";
  const Launch its{launch_.kernel, op.movers.ctas, op.movers.threads, op.movers.shared_bytes};
  return check_operation(its, task, op, device_);
}

std::string Resident::stay() {
  std::string wrong = reach();
  if (!wrong.empty()) return wrong;
  begin_watch(own_, watch_);
  for (std::uint32_t herald = first_broadcast(*own_.state); !device_.over(); ++herald) {
    const Task task = find_work(own_, watch_, herald);
    broadcast_task(own_.state->herald, herald, task, watch_.running);
    if (task == Task::kStop) {
      ordered::store_release(&own_.state->left, herald + 1);
      return {};
    }
    Operation op;
    wrong = compose(task, op);
    if (wrong.empty()) wrong = run_operation(task, op, device_);
    if (!wrong.empty()) return wrong;
    const bool failed = op.result->error != OpError::kNone;
    ordered::store_release(&own_.state->left, std::uint64_t{failed} << 32 | (herald + 1));
  }
  return {};
}

}  // namespace

std::string run_resident(const Launch& launch, const ResidentArguments& own, const KernelDevice& device) {
  return Resident(launch, own, device).stay();
}

}  // namespace epd::fake_cuda
