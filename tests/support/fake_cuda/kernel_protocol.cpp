#include "fake_cuda/kernel_protocol.h"

#include "cuda/workers/call_gate.h"
#include "fake_cuda/operation_check.h"
#include "fake_cuda/operation_kernel.h"

#include <algorithm>
#include <cstring>

namespace epd::fake_cuda {

using namespace kernels;
using namespace kernels::cuda;
using kernels::cuda::Operation;

namespace {

std::string reach(const WorkerArguments& own, const KernelDevice& device) {
  const CallArguments& calls = own.calls;
  if (!device.reaches(own.lane, sizeof(LaneState))) return "the lane's state is out of reach";
  if (!device.reaches(own.credits, sizeof(SmCredits))) return "the SMs' credits are out of reach";
  if (!device.reaches(own.bells, sizeof(Bells))) return "the other ranks' bells are out of reach";
  if (!device.reaches(own.generation, sizeof(*own.generation))) return "the generation is out of reach";
  if (!device.reaches(calls.words, sizeof(abi::CallWords))) return "the words of calls are out of reach";
  if (!device.reaches(calls.state, sizeof(CallState))) return "the state of calls is out of reach";
  if (!device.reaches(calls.host, sizeof(CallHost))) return "the journal is out of reach";
  if (!device.reaches(calls.results, sizeof(abi::Results))) return "the results are out of reach";
  if (!device.reaches(calls.runs, sizeof(ResultRuns) * abi::kReplayedResults))
    return "the counts of runs are out of reach";
  if (calls.limits.depth == 0) return "an arena without blocks";
  return {};
}

// The warp of a gate reads these words together (kernels/cuda/workers/main.cuh).
void enter(const WorkerArguments& own, Gate& gate, std::uint32_t lingering, std::uint32_t asks) {
  const CallArguments& calls = own.calls;
  gate.enabled_epoch = static_cast<std::uint32_t>(
      ordered::fetch_or_system(reinterpret_cast<std::uint64_t*>(own.lane->door), 1) >> 32);
  ordered::exchange_system(reinterpret_cast<std::uint64_t*>(calls.words->bell), 0);
  gate.generation = ordered::load_relaxed_system(own.generation);
  gate.limit = ordered::load_relaxed_system(&own.credits->limit);
  gate.held = ordered::add(&own.credits->held, asks) + asks;
  gate.lingering = lingering;
  gate.asked = asks;
  for (std::uint32_t i = 0; i < abi::kCallSlots; ++i) {
    gate.calls[kByStreams][i] = load_call(calls.words->calls + i);
    gate.calls[kByHost][i] = load_call(calls.words->host_calls + i);
  }
  ordered::load_whole(gate.state, *calls.state);
  for (std::uint32_t i = 0; i < std::min(calls.limits.num_routes, Gate::kRoutes); ++i)
    ordered::load_whole(gate.routes[i], calls.routes[i]);
}

// The warp of a gate stores these words together.
void hand_over(const WorkerArguments& own, const Gate& gate, std::uint32_t number) {
  std::uint32_t words[Work::kWords];
  std::memcpy(words, &gate.work, sizeof(words));
  fence_call(gate);
  for (std::uint32_t i = 0; i < Work::kWords; ++i)
    ordered::store_relaxed(&own.lane->work.words[i], std::uint64_t{number} << 32 | words[i]);
}

void keep(const WorkerArguments& own, const Gate& gate) {
  auto* const to = reinterpret_cast<std::byte*>(own.calls.state);
  std::memcpy(to + kKeptState, reinterpret_cast<const std::byte*>(&gate.state) + kKeptState,
              sizeof(CallState) - kKeptState);
  own.lane->end = gate.end;
  if (gate.work.task != Task::kNone)
    own.lane->divisions[is_dispatch(gate.work.call) ? 0 : 1] =
        division_index(gate.work.call, own.calls.most_ctas, gate.work.ctas);
}

// Empty: the work has been handed over.
std::string load_work(const WorkerArguments& own, std::uint32_t number, Work& work) {
  std::uint32_t words[Work::kWords];
  for (std::uint32_t i = 0; i < Work::kWords; ++i) {
    const std::uint64_t word = ordered::load_acquire(&own.lane->work.words[i]);
    if (word >> 32 != number) return "the gate before has handed nothing over";
    words[i] = static_cast<std::uint32_t>(word);
  }
  std::memcpy(&work, words, sizeof(work));
  return {};
}

std::string compose_work(const Launch& launch, const WorkerArguments& own, const Work& work,
                         const KernelDevice& device, Operation& op) {
  const CallArguments& calls = own.calls;
  const TakenCall& call = work.call;
  if (work.ctas == 0 || std::max(work.ctas, work.lingering) > launch.ctas)
    return "a call asks for more CTAs than there are";
  const std::uint32_t at = division_index(call, calls.most_ctas, work.ctas);
  if (!device.reaches(calls.view, sizeof(DeviceView))) return "the group's view is out of reach";
  if (!device.reaches(calls.division + at, sizeof(WorkDivision)))
    return "the division of work is out of reach";
  const DeviceView& view = *calls.view;
  static_cast<kernels::Operation&>(op) = compose(view.group, call);
  for (std::uint32_t rank = 0; rank < kMaxRanks; ++rank)
    compose_peer(op.peers[rank], view.group.exchange, view.peers[rank], call);
  compose_ends(op, calls, call);
  if (has_flag(call, abi::kFlagPlaces)) {
    const abi::RowPlaces& places = calls.words->places[call.number % abi::kCallSlots];
    if (op.memories != nullptr && !device.reaches(op.memories, sizeof(MemoryTable)))
      return "the table of registered memories is out of reach";
    take_own_places(op,
                    {ordered::load_relaxed_system(&places.in), ordered::load_relaxed_system(&places.out)});
  }
  op.division = calls.division[at];
  const Launch its{launch.kernel, op.division.ctas, op.division.threads, op.division.shared_bytes};
  return check_operation(its, work.task, op, device);
}

// As await_call() of the main kernel.
bool await_call(const WorkerArguments& own, Gate& gate, bool stands, std::uint64_t until_ns) {
  for (std::uint32_t looks = 1;; ++looks) {
    const bool rung =
        ordered::load_relaxed_system(reinterpret_cast<const std::uint64_t*>(own.calls.words->bell)) != 0;
    enter(own, gate, gate.lingering, 0);
    if (!may_linger(own, gate)) return false;
    if (rung || (!stands && has_call(gate))) return true;
    if (ordered::nanoseconds() >= until_ns) return false;
    ordered::look_again(looks);
  }
}

// The work of a main kernel that lingers between two calls.
void linger(const WorkerArguments& own, const Work& before) {
  Gate gate{};
  enter(own, gate, before.lingering, 0);
  const std::uint64_t until_ns =
      std::min(ordered::nanoseconds() + std::uint64_t{gate.state.linger_us} * 1'000, before.linger_until_ns);
  const bool last = before.number + 1 - own.number == kWorksOfPair - 1;
  bool taken = false;
  for (bool goes_on = !last && may_linger_behind(own, gate, before); goes_on;) {
    const Look look = decide(own, gate);
    keep(own, gate);
    taken = look == Look::kTaken;
    goes_on = !taken && await_call(own, gate, look == Look::kStands, until_ns);
  }
  gate.work.number = before.number + 1;
  gate.work.linger_until_ns = before.linger_until_ns;
  gate.work.credit = before.credit;
  if (!taken) end_lingering(own, gate, before);
  hand_over(own, gate, gate.work.number);
  if (taken) tell_begun(own, gate);
}

}  // namespace

std::string run_gate(const WorkerArguments& own, const KernelDevice& device) {
  if (std::string wrong = reach(own, device); !wrong.empty()) return wrong;
  Gate gate{};
  enter(own, gate, 0, own.asked_sms);
  const Look look = decide(own, gate);
  hand_over(own, gate, own.number);
  keep(own, gate);
  if (look == Look::kTaken) {
    tell_begun(own, gate);
    leave_to_main(own);
  } else {
    leave_gate(own, gate, look);
  }
  return {};
}

std::string run_main(const Launch& launch, const WorkerArguments& own, const KernelDevice& device) {
  Work work;
  std::string wrong = load_work(own, own.number, work);
  if (!wrong.empty() || work.task == Task::kNone) return wrong;
  device.take_sms(std::max(work.ctas, work.lingering));
  for (;;) {
    Operation op;
    if (begin_call(*own.lane, work.call)) {
      wrong = compose_work(launch, own, work, device, op);
      if (wrong.empty()) wrong = run_operation(work.task, op, device);
      if (!wrong.empty()) return wrong;
    } else {
      static_cast<kernels::Operation&>(op) = compose(own.calls.view->group, work.call);
      compose_ends(op, own.calls, work.call);
      fail_unbegun(op);
      end_failed(op);
    }
    conclude(own, work, op.result->error != OpError::kNone, runs_of(own.calls, work.call.result));
    if (work.lingering == 0) return {};
    linger(own, work);
    wrong = load_work(own, work.number + 1, work);
    if (!wrong.empty() || work.task == Task::kNone) return wrong;
  }
}

}  // namespace epd::fake_cuda
