#include "fake_cuda/kernel_protocol.h"

#include "fake_cuda/command_taker.h"
#include "fake_cuda/operation_check.h"
#include "fake_cuda/operation_exchange.h"
#include "fake_cuda/operation_kernel.h"

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

// A kernel that stays.
class Resident {
 public:
  Resident(const Launch& launch, const ResidentArguments& own, const KernelDevice& device)
      : launch_(launch),
        own_(own),
        device_(device),
        next_(own.first),
        commands_(own.commands, device, [this](Task task, const Operation& op) { return run(task, op); }) {}

  std::string stay();

 private:
  bool takes_commands() const { return own_.commands.words != nullptr; }
  // The next entry of the queue, if it is there. `stops`: it says so.
  bool look(std::string& wrong, bool& stops);
  std::string run(Task task, const Operation& op);
  // All CTAs have left what was heralded.
  void left() { ++own_.state->left; }

  const Launch& launch_;
  const ResidentArguments& own_;
  const KernelDevice& device_;
  std::uint32_t next_;
  CommandTaker commands_;
};

std::string Resident::run(Task task, const Operation& op) {
  if (op.movers.ctas > launch_.ctas) return "an operation asks for more CTAs than there are";
  const Launch its{launch_.kernel, op.movers.ctas, op.movers.threads, op.movers.shared_bytes};
  if (std::string wrong = check_operation(its, task, op, device_); !wrong.empty()) return wrong;
  std::string wrong = run_operation(task, op, device_);
  left();
  return wrong;
}

bool Resident::look(std::string& wrong, bool& stops) {
  const std::uint64_t entry = load_acquire(&own_.state->entries[next_ % kQueueEntries]);
  if (entry >> 32 != next_ + 1u) return false;
  ++next_;
  const auto task = static_cast<Task>(entry >> 16 & 0xffff);
  stops = task == Task::kStop;
  if (stops) {
    left();
    return true;
  }
  const std::uint64_t place = entry & 0xffff;
  if (device_.reaches(own_.given + place, sizeof(Operation)) &&
      device_.reaches(own_.operations + place, sizeof(Operation))) {
    const Operation op = own_.operations[place] = own_.given[place];
    wrong = run(task, op);
  } else {
    wrong = "an operation is out of reach";
  }
  return true;
}

std::string Resident::stay() {
  if (!device_.reaches(own_.state, sizeof(ResidentState))) return "the state is out of reach";
  std::string wrong;
  if (takes_commands()) wrong = commands_.begin();
  bool stops = false;
  for (unsigned looks = 1; wrong.empty() && !stops && !device_.over(); ++looks) {
    bool any = look(wrong, stops);
    if (takes_commands() && wrong.empty() && !stops) any = commands_.look(wrong) || any;
    if (any) looks = 0;
    if (looks != 0) device_.pause(looks);
  }
  return wrong;
}

}  // namespace

std::string run_resident(const Launch& launch, const ResidentArguments& own, const KernelDevice& device) {
  return Resident(launch, own, device).stay();
}

}  // namespace epd::fake_cuda
