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
        commands_(own.commands, device, [this](Task task, const Operation& op) { return run(task, op); }) {}

  std::string stay();

 private:
  bool takes_commands() const { return own_.commands.words != nullptr; }
  // The next entry of the queue, if it is there. `stops`: it says so, or the round is over.
  bool look(std::string& wrong, bool& stops);
  bool round_is_over() const { return load_acquire(own_.round) != own_.own_round; }
  // Of an entry, that is there: whether it is a stop for a kernel that has stepped aside.
  bool is_of_former_round(std::uint64_t entry) const {
    return task_of(entry) == Task::kStop && (entry & 0xffff) != own_.own_round % kStopRounds;
  }
  static Task task_of(std::uint64_t entry) { return static_cast<Task>(entry >> 16 & 0xffff); }
  // The entry that comes next, as the device has it or, when the round is over, the host. 0: it is not there.
  std::uint64_t next_entry(bool over) const;
  // Until the client's stream has got as far, or the operation is to fail at once. False: the round is over
  // before.
  bool await_ready(Operation& op) const;
  std::string run(Task task, const Operation& op);
  // All CTAs have left what was heralded.
  void left() { ++own_.state->left; }

  const Launch& launch_;
  const ResidentArguments& own_;
  const KernelDevice& device_;
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

std::uint64_t Resident::next_entry(bool over) const {
  const auto at = [&](const std::uint64_t* entries) {
    const std::uint64_t entry = load_acquire(entries + own_.state->next % kQueueEntries);
    return entry >> 32 == own_.state->next + 1u ? entry : 0;
  };
  if (const std::uint64_t entry = at(own_.state->entries); entry != 0) return entry;
  const std::uint64_t entry = over ? at(own_.told) : 0;
  return task_of(entry) == Task::kStop ? 0 : entry;
}

bool Resident::await_ready(Operation& op) const {
  if (op.signal.ready == nullptr) return true;
  const std::uint64_t begin_ns = nanoseconds();
  for (unsigned looks = 1; !device_.over(); ++looks) {
    if (static_cast<std::int32_t>(load_acquire(op.signal.ready) - op.signal.value) >= 0) return true;
    if (op.abort != nullptr && load_acquire(op.abort) != 0) return true;
    if (nanoseconds() - begin_ns >= op.timeout_ns) {
      op.timeout_ns = 0;
      return true;
    }
    if (round_is_over()) return false;
    device_.pause(looks);
  }
  return true;
}

bool Resident::look(std::string& wrong, bool& stops) {
  const bool over = round_is_over();
  const std::uint64_t entry = next_entry(over);
  if (entry == 0) {
    stops = over;
    if (stops) left();
    return stops;
  }
  stops = task_of(entry) == Task::kStop && !is_of_former_round(entry);
  if (task_of(entry) == Task::kStop) {
    ++own_.state->next;
    if (stops) left();
    return true;
  }
  const std::uint64_t place = entry & 0xffff;
  if (!device_.reaches(own_.given + place, sizeof(Operation)) ||
      !device_.reaches(own_.operations + place, sizeof(Operation))) {
    wrong = "an operation is out of reach";
    return true;
  }
  Operation op = own_.operations[place] = own_.given[place];
  stops = !await_ready(op);
  if (stops) {
    left();
    return true;
  }
  ++own_.state->next;
  wrong = run(task_of(entry), op);
  return true;
}

std::string Resident::stay() {
  if (!device_.reaches(own_.state, sizeof(ResidentState))) return "the state is out of reach";
  if (!device_.reaches(own_.round, sizeof(*own_.round))) return "the round is out of reach";
  if (!device_.reaches(own_.told, sizeof(ResidentState::entries))) return "what was told is out of reach";
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
