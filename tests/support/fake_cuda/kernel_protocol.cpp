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
  const CallArguments& calls = own_.calls;
  if (!device_.reaches(own_.state, sizeof(ResidentState))) return "the state is out of reach";
  if (!device_.reaches(own_.yield_epoch, sizeof(*own_.yield_epoch))) return "the yield_epoch is out of reach";
  if (!device_.reaches(calls.words, sizeof(abi::CallWords))) return "the words of calls are out of reach";
  if (!device_.reaches(calls.state, sizeof(CallState))) return "the state of calls is out of reach";
  if (!device_.reaches(calls.host, sizeof(CallHost))) return "the journal is out of reach";
  if (!device_.reaches(calls.results, sizeof(abi::Results))) return "the results are out of reach";
  if (!device_.reaches(calls.runs, sizeof(ResultRuns) * abi::kReplayedResults))
    return "the counts of runs are out of reach";
  if (calls.limits.depth == 0) return "an arena without blocks";
  return {};
}

std::string Resident::compose(Task task, Operation& op) const {
  const CallArguments& calls = own_.calls;
  const TakenCall& call = watch_.running;
  const std::uint32_t at = division_index(call, calls.most_ctas, launch_.ctas);
  if (!device_.reaches(calls.view, sizeof(DeviceView))) return "the group's view is out of reach";
  if (!device_.reaches(calls.division + at, sizeof(WorkDivision)))
    return "the division of work is out of reach";
  const DeviceView& view = *calls.view;
  op = kernels::cuda::compose(view.group, call);
  for (std::uint32_t rank = 0; rank < kMaxRanks; ++rank)
    compose_peer(op.peers[rank], view.group.exchange, view.peers[rank], call);
  compose_ends(op, calls, call);
  if (has_flag(call, abi::kFlagPlaces)) {
    const abi::RowPlaces& places = calls.words->places[call.number % abi::kCallSlots];
    if (op.memories != nullptr && !device_.reaches(op.memories, sizeof(MemoryTable)))
      return "the table of registered memories is out of reach";
    take_own_places(op,
                    {ordered::load_relaxed_system(&places.in), ordered::load_relaxed_system(&places.out)});
  }
  op.division = calls.division[at];
  return check(task, op);
}

std::string Resident::check(Task task, const Operation& op) const {
  if (op.division.ctas > launch_.ctas) return "an operation asks for more CTAs than there are";
  const Launch its{launch_.kernel, op.division.ctas, op.division.threads, op.division.shared_bytes};
  return check_operation(its, task, op, device_);
}

std::string Resident::stay() {
  device_.take_sms(launch_.ctas);
  std::string wrong = reach();
  if (!wrong.empty()) return wrong;
  begin_watch(own_, watch_);
  for (std::uint32_t broadcast = first_broadcast(*own_.state); !device_.over(); ++broadcast) {
    const Task task = find_work(own_, watch_, broadcast);
    broadcast_task(own_.state->broadcast, broadcast, task, watch_.running);
    if (task == Task::kStop) {
      ordered::store_release(&own_.state->left, broadcast + 1);
      return {};
    }
    Operation op;
    wrong = compose(task, op);
    if (wrong.empty()) wrong = run_operation(task, op, device_);
    if (!wrong.empty()) return wrong;
    const bool failed = op.result->error != OpError::kNone;
    ordered::store_release(&own_.state->left, std::uint64_t{failed} << 32 | (broadcast + 1));
  }
  return {};
}

}  // namespace

std::string run_resident(const Launch& launch, const ResidentArguments& own, const KernelDevice& device) {
  return Resident(launch, own, device).stay();
}

}  // namespace epd::fake_cuda
