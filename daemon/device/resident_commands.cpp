#include "resident_commands.h"

#include "proto/commands.h"
#include "resident_lane.h"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <utility>
#include <vector>

namespace epd {

using kernels::cuda::CommandArguments;
using kernels::cuda::CommandHost;
using kernels::cuda::CommandStart;
using kernels::cuda::CommandState;
using kernels::cuda::DeviceView;
using kernels::cuda::GroupView;
using kernels::cuda::JournalEntry;
using kernels::cuda::Kind;
using kernels::cuda::kJournalEntries;
using kernels::cuda::kMoverKinds;
using kernels::cuda::Movers;
using kernels::cuda::Operation;
using kernels::cuda::ResultRuns;
using kernels::cuda::RouteState;

namespace {

constexpr std::size_t kAlign = 64;

constexpr std::size_t aligned(std::size_t bytes) {
  return (bytes + kAlign - 1) / kAlign * kAlign;
}
constexpr std::size_t routes_bytes(const LaneShape& shape) {
  return aligned(shape.limits.num_routes * sizeof(RouteState));
}

}  // namespace

std::size_t ResidentCommands::device_bytes(const LaneShape& shape, std::uint32_t max_sms) {
  return sizeof(CommandState) + routes_bytes(shape) + aligned(sizeof(DeviceView)) +
         aligned(std::size_t{kMoverKinds} * max_sms * sizeof(Movers)) +
         abi::kReplayedResults * sizeof(ResultRuns);
}

std::size_t ResidentCommands::host_bytes(const LaneShape& shape) {
  return sizeof(CommandHost) + routes_bytes(shape) + sizeof(Look);
}

CUdeviceptr ResidentCommands::state() const {
  return lane_.own_device() + sizeof(kernels::cuda::ResidentState);
}

CUdeviceptr ResidentCommands::routes() const {
  return state() + sizeof(CommandState);
}

CUdeviceptr ResidentCommands::view() const {
  return routes() + routes_bytes(lane_.shape_);
}

CUdeviceptr ResidentCommands::movers() const {
  return view() + aligned(sizeof(DeviceView));
}

CUdeviceptr ResidentCommands::runs() const {
  return movers() + aligned(std::size_t{kMoverKinds} * lane_.device_.max_sms() * sizeof(Movers));
}

CommandHost& ResidentCommands::host() const {
  return *reinterpret_cast<CommandHost*>(lane_.own_host());
}

RouteState* ResidentCommands::host_routes() const {
  return reinterpret_cast<RouteState*>(lane_.own_host() + sizeof(CommandHost));
}

ResidentCommands::Look& ResidentCommands::last_look() const {
  return *reinterpret_cast<Look*>(lane_.own_host() + sizeof(CommandHost) + routes_bytes(lane_.shape_));
}

void ResidentCommands::write_state(std::size_t offset, std::uint32_t value) {
  lane_.write_word(reinterpret_cast<const void*>(state() + offset), value);
}

// The rings go on where the last kernel that served them left them, be it another engine's.
void ResidentCommands::open(const Layout& layout) {
  layout_ = layout;
  CommandStart& first = host().start;
  lane_.device_.read(&first.sequence[kernels::cuda::kByStreams],
                     layout.words + offsetof(abi::CommandWords, done), sizeof(std::uint32_t));
  first.sequence[kernels::cuda::kByHost] = host_ended();
  first.sets = 1;
  lane_.write_word(&reinterpret_cast<abi::CommandWords*>(layout.words)->closed, 0);  // by a former engine
  write_movers();
  write_results();
  // What is written by that stream is there before a kernel that another one starts.
  lane_.must("cuStreamSynchronize", lane_.driver_.cuStreamSynchronize(lane_.control()));
  lane_.follow_share();
}

// Of each number of SMs that a call may ask for.
void ResidentCommands::write_movers() const {
  const std::uint32_t most = lane_.device_.max_sms();
  std::vector<Movers> all(std::size_t{kMoverKinds} * most);
  for (std::uint32_t kind = 0; kind < 2 + lane_.shape_.limits.num_biases; ++kind) {
    for (std::uint32_t sms = 1; sms <= most; ++sms) {
      Operation op;
      op.shape = lane_.shape_.shape;
      op.landing = lane_.shape_.landing;
      for (std::uint32_t i = 0; i + 1 < kind; ++i) op.bias[i] = reinterpret_cast<const std::uint16_t*>(64);
      EPD_CHECK(kernels::cuda::configure(kind == 0 ? Kind::kDispatch : Kind::kCombine,
                                         lane_.device_.max_shared_bytes(), sms, op));
      all[kind * most + sms - 1] = op.movers;
    }
  }
  lane_.device_.write(reinterpret_cast<void*>(movers()), all.data(), all.size() * sizeof(Movers));
}

// What is written there, and how often what graphs have captured has run, goes on likewise.
void ResidentCommands::write_results() {
  auto& results = *reinterpret_cast<abi::Results*>(layout_.results->bytes());
  std::vector<ResultRuns> runs_of(abi::kReplayedResults);
  std::uint32_t written = 0;
  for (std::uint32_t place = 0; place < abi::kResultPlaces; ++place) {
    std::uint64_t words[abi::CallResult::kWords];
    for (std::uint32_t i = 0; i < abi::CallResult::kWords; ++i) {
      words[i] = std::atomic_ref(results.places[place].words[i]).load(std::memory_order_relaxed);
      written = std::max(written, static_cast<std::uint32_t>(words[i] >> 32));
    }
    if (place < abi::kOnceResults || words[abi::CallResult::kRuns] == 0) continue;
    runs_of[place - abi::kOnceResults] = {static_cast<std::uint32_t>(words[abi::CallResult::kResult]) + 1,
                                          static_cast<std::uint32_t>(words[abi::CallResult::kRuns])};
  }
  if (written == 0) return;
  write_state(offsetof(CommandState, results), written);
  lane_.device_.write(reinterpret_cast<void*>(runs()), runs_of.data(), runs_of.size() * sizeof(ResultRuns));
}

CommandArguments ResidentCommands::arguments() const {
  CommandArguments all;
  all.words = reinterpret_cast<abi::CommandWords*>(layout_.words);
  all.state = reinterpret_cast<CommandState*>(state());
  all.routes = reinterpret_cast<RouteState*>(routes());
  all.view = reinterpret_cast<const DeviceView*>(view());
  all.movers = reinterpret_cast<const Movers*>(movers());
  all.most_ctas = lane_.device_.max_sms();
  all.host = &host();
  all.results = reinterpret_cast<abi::Results*>(layout_.results->bytes());
  all.counts_stride = static_cast<std::uint32_t>(layout_.counts_stride);
  all.runs = reinterpret_cast<ResultRuns*>(runs());
  all.limits = lane_.shape_.limits;
  all.per_expert = lane_.shape_.shape.per_expert;
  return all;
}

void ResidentCommands::set_limits(std::uint32_t sms, std::uint32_t timeout_ms) {
  if (std::exchange(sms_, sms) != sms) write_state(offsetof(CommandState, sms), sms);
  if (std::exchange(timeout_ms_, timeout_ms) != timeout_ms)
    write_state(offsetof(CommandState, timeout_ms), timeout_ms);
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

// No kernel reads it before the next odd turn.
void ResidentCommands::write_view(const DeviceView& view_of_group) const {
  DeviceView own = view_of_group;
  Operation probe;
  probe.shape = lane_.shape_.shape;
  probe.landing = lane_.shape_.landing;
  lane_.describe_workspace(probe);
  EPD_CHECK(kernels::cuda::configure(Kind::kDispatch, lane_.device_.max_shared_bytes(), 1, probe));
  own.group.shape = probe.shape;
  own.group.workspace = probe.workspace;
  own.group.workspace_bytes = probe.workspace_bytes;
  lane_.device_.write(reinterpret_cast<void*>(view()), &own, sizeof(own));
}

void ResidentCommands::resume(const Start& start) {
  EPD_CHECK(halted() && start.routes.size() == lane_.shape_.limits.num_routes);
  std::copy(start.routes.begin(), start.routes.end(), host_routes());
  CommandStart& next = host().start;
  next.epoch = start.epoch;
  next.index = start.index;
  next.index_base = start.index_base;
  next.changed_epoch = start.changed_epoch;
  next.num_routes = static_cast<std::uint32_t>(start.routes.size());
  next.routes = host_routes();
  write_view(start.view);
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

// ---- the rings

std::uint32_t ResidentCommands::host_ended() const {
  auto& results = *reinterpret_cast<abi::Results*>(layout_.results->bytes());
  return std::atomic_ref(results.host_ended).load(std::memory_order_acquire);
}

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
  static_assert(offsetof(abi::CommandWords, host_calls) == sizeof(look.ring.calls) &&
                offsetof(Ring, host_calls) == sizeof(look.ring.calls));
  copy(look.ring.calls, offsetof(abi::CommandWords, calls), 2 * sizeof(look.ring.calls));
  copy(&look.ring.done, offsetof(abi::CommandWords, done), sizeof(look.ring.done));
  lane_.must("cuStreamWriteValue32", lane_.driver_.cuStreamWriteValue32(
                                         stream, reinterpret_cast<CUdeviceptr>(&look.number), ++looks_, 0));
}

const CommandPort::Ring* ResidentCommands::seen() {
  Look& look = last_look();
  if (!looking_ || std::atomic_ref(look.number).load(std::memory_order_acquire) != looks_) return nullptr;
  looking_ = false;
  look.ring.host_ended = host_ended();
  return &look.ring;
}

}  // namespace epd
