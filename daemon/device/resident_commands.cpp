#include "resident_commands.h"

#include "proto/commands.h"
#include "resident_lane.h"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <utility>

namespace epd {

using kernels::cuda::CommandArguments;
using kernels::cuda::CommandHost;
using kernels::cuda::CommandStart;
using kernels::cuda::CommandState;
using kernels::cuda::JournalEntry;
using kernels::cuda::Kind;
using kernels::cuda::kJournalEntries;
using kernels::cuda::RouteState;
using kernels::cuda::Task;

namespace {

constexpr std::size_t kAlign = 64;

constexpr std::size_t routes_bytes(std::uint32_t num_routes) {
  return (num_routes * sizeof(RouteState) + kAlign - 1) / kAlign * kAlign;
}

}  // namespace

ResidentCommands::ResidentCommands(ResidentLane& lane, std::uint32_t num_routes)
    : lane_(lane), num_routes_(num_routes) {}

std::size_t ResidentCommands::device_bytes(std::uint32_t num_routes) {
  return sizeof(CommandState) + routes_bytes(num_routes) + abi::kMaxPrograms * sizeof(Program);
}

std::size_t ResidentCommands::host_bytes(std::uint32_t num_routes) {
  return sizeof(CommandHost) + routes_bytes(num_routes) + sizeof(Look);
}

CUdeviceptr ResidentCommands::state() const {
  return lane_.extra_device() + lane_.state_bytes();
}

CUdeviceptr ResidentCommands::routes() const {
  return state() + sizeof(CommandState);
}

CUdeviceptr ResidentCommands::programs() const {
  return routes() + routes_bytes(num_routes_);
}

CommandHost& ResidentCommands::host() const {
  return *reinterpret_cast<CommandHost*>(lane_.commands_host());
}

RouteState* ResidentCommands::host_routes() const {
  return reinterpret_cast<RouteState*>(lane_.commands_host() + sizeof(CommandHost));
}

ResidentCommands::Look& ResidentCommands::last_look() const {
  return *reinterpret_cast<Look*>(lane_.commands_host() + sizeof(CommandHost) + routes_bytes(num_routes_));
}

void ResidentCommands::write_state(std::size_t offset, std::uint32_t value) {
  lane_.write_word(reinterpret_cast<const void*>(state() + offset), value);
}

// The ring goes on where the last kernel that served it left it, be it another engine's.
void ResidentCommands::open(const Layout& layout) {
  layout_ = layout;
  CommandStart& first = host().start;
  lane_.device_.read(&first.sequence, layout.words + offsetof(abi::CommandWords, done),
                     sizeof(first.sequence));
  first.sets = 1;
  lane_.write_word(&reinterpret_cast<abi::CommandWords*>(layout.words)->closed, 0);  // by a former engine
  // What is written by that stream is there before a kernel that another one starts.
  lane_.must("cuStreamSynchronize", lane_.driver_.cuStreamSynchronize(lane_.control()));
  lane_.follow_share();
}

CommandArguments ResidentCommands::arguments() const {
  CommandArguments all;
  all.words = reinterpret_cast<abi::CommandWords*>(layout_.words);
  all.state = reinterpret_cast<CommandState*>(state());
  all.routes = reinterpret_cast<RouteState*>(routes());
  all.programs = reinterpret_cast<const Program*>(programs());
  all.host = &host();
  all.depth = layout_.depth;
  all.rank = layout_.rank;
  all.block_bytes = layout_.block_bytes;
  all.landing_bytes = layout_.landing_bytes;
  all.half_bytes = layout_.half_bytes;
  return all;
}

// ---- programs

void ResidentCommands::record(std::uint32_t number, Kind kind, const Program& program, std::uint32_t sms) {
  recorded_[number] = {kind, sms, program};
  bring(number);
}

void ResidentCommands::bring(std::uint32_t number) {
  Recorded& recorded = recorded_[number];
  lane_.describe_own(recorded.kind, recorded.sms, recorded.program.op);
  recorded.program.task = kernels::cuda::task_of(recorded.kind, recorded.program.op);
  lane_.device_.write(reinterpret_cast<void*>(programs() + number * sizeof(Program)), &recorded.program,
                      sizeof(Program));
}

void ResidentCommands::fit_programs() {
  for (std::uint32_t number = 0; number < abi::kMaxPrograms; ++number) {
    if (recorded_[number].program.task != Task::kStop) bring(number);
  }
}

// ---- turns

// The first kernel finds the turn as it is then.
void ResidentCommands::halt() {
  if (turn_ % 2 == 0) return;
  write_state(offsetof(CommandState, turn), ++turn_);
  write_state(offsetof(CommandState, abort), 1);
  if (!lane_.runs()) std::atomic_ref(host().turn).store(turn_, std::memory_order_relaxed);
}

bool ResidentCommands::turn_taken() const {
  return std::atomic_ref(host().turn).load(std::memory_order_acquire) == turn_;
}

bool ResidentCommands::halted() const {
  return turn_ % 2 == 0 && turn_taken();
}

bool ResidentCommands::resumed() const {
  return turn_ % 2 != 0 && turn_taken();
}

bool ResidentCommands::waits_for_room() const {
  return !lane_.runs();
}

void ResidentCommands::resume(const Start& start) {
  EPD_CHECK(halted() && start.routes.size() == num_routes_);
  std::copy(start.routes.begin(), start.routes.end(), host_routes());
  CommandStart& next = host().start;
  next.epoch = start.epoch;
  next.index = start.index;
  next.changed_epoch = start.changed_epoch;
  next.num_routes = num_routes_;
  next.routes = host_routes();
  std::atomic_thread_fence(std::memory_order_release);
  write_state(offsetof(CommandState, abort), 0);
  write_state(offsetof(CommandState, turn), ++turn_);
}

// ---- the journal

const JournalEntry* ResidentCommands::front() const {
  JournalEntry& entry = host().journal[read_ % kJournalEntries];
  const bool there = std::atomic_ref(entry.number).load(std::memory_order_acquire) == read_ + 1;
  return there ? &entry : nullptr;
}

void ResidentCommands::pop() {
  ++read_;
  if (read_ - told_ < kJournalEntries / 4) return;
  told_ = read_;
  write_state(offsetof(CommandState, journal_read), told_);
}

// ---- the ring

// Not the words between: those are the client's own. And not in the control stream: the copies may lie behind
// some of a client's, which take milliseconds.
void ResidentCommands::look() {
  if (std::exchange(looking_, true)) return;
  Look& look = last_look();
  const CUstream stream = lane_.device_.aside();
  const auto copy = [&](void* to, std::size_t offset, std::size_t bytes) {
    const auto from = reinterpret_cast<CUdeviceptr>(layout_.words + offset);
    lane_.must("cuMemcpyDtoHAsync", lane_.driver_.cuMemcpyDtoHAsync(to, from, bytes, stream));
  };
  copy(look.ring.commands, offsetof(abi::CommandWords, commands), sizeof(look.ring.commands));
  copy(&look.ring.done, offsetof(abi::CommandWords, done), sizeof(look.ring.done));
  lane_.must("cuStreamWriteValue32", lane_.driver_.cuStreamWriteValue32(
                                         stream, reinterpret_cast<CUdeviceptr>(&look.number), ++looks_, 0));
}

const CommandPort::Ring* ResidentCommands::seen() {
  Look& look = last_look();
  if (!looking_ || std::atomic_ref(look.number).load(std::memory_order_acquire) != looks_) return nullptr;
  looking_ = false;
  return &look.ring;
}

}  // namespace epd
