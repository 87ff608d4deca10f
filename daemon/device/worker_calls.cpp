#include "worker_calls.h"

#include "kernels/calls.h"
#include "proto/call_words.h"
#include "worker_lane.h"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <utility>
#include <vector>

namespace epd::device {

using kernels::Bells;
using kernels::CallArguments;
using kernels::CallHost;
using kernels::CallStart;
using kernels::CallState;
using kernels::DeviceView;
using kernels::division_kind;
using kernels::GroupView;
using kernels::JournalEntry;
using kernels::kDivisionKinds;
using kernels::Kind;
using kernels::kJournalEntries;
using kernels::MemoryTable;
using kernels::Operation;
using kernels::ResultRuns;
using kernels::RouteState;
using kernels::WorkDivision;
using kernels::WorkerArguments;

namespace {

constexpr std::size_t kAlign = 64;

constexpr std::size_t aligned(std::size_t bytes) {
  return (bytes + kAlign - 1) / kAlign * kAlign;
}
constexpr std::size_t routes_bytes(const LaneShape& shape) {
  return aligned(shape.limits.num_routes * sizeof(RouteState));
}

}  // namespace

std::size_t LaneOnDevice::bytes(const LaneShape& shape, std::uint32_t max_sms) {
  return sizeof(LaneOnDevice) + routes_bytes(shape) +
         std::size_t{kDivisionKinds} * max_sms * sizeof(WorkDivision);
}

std::size_t LaneOnHost::bytes(const LaneShape& shape) {
  return sizeof(LaneOnHost) + shape.limits.num_routes * sizeof(RouteState);
}

RouteState* WorkerCalls::routes() const {
  return reinterpret_cast<RouteState*>(lane_.on_device() + 1);
}

WorkDivision* WorkerCalls::divisions() const {
  return reinterpret_cast<WorkDivision*>(reinterpret_cast<std::byte*>(routes()) + routes_bytes(lane_.shape_));
}

void WorkerCalls::write_state(std::uint32_t CallState::*word, std::uint32_t value) {
  lane_.write_word(&(lane_.on_device()->calls.*word), value);
}

// The rings continue where the last kernel that served them stopped, even one of another engine. Such a
// kernel takes no call once the generation is written, so that comes first. The bell is rung: an
// earlier ring may have been for a kernel that is gone.
void WorkerCalls::open(const Layout& layout) {
  layout_ = layout;
  write_generation();
  // A former engine may have closed it.
  lane_.write_word(&reinterpret_cast<abi::CallWords*>(layout.words)->closed, 0);
  write_divisions();
  write_results();
  lane_.follow_share();
  std::uint32_t sequence[kernels::kCallRings] = {};
  lane_.device_.read(&sequence[kernels::kByStreams], layout.words + offsetof(abi::CallWords, done),
                     sizeof(std::uint32_t));
  sequence[kernels::kByHost] = host_ended();
  // This write waits for the stream. So kernels that another stream starts later see all that it has written.
  lane_.device_.write(lane_.on_device()->calls.sequence, sequence, sizeof(sequence));
  lane_.start_pairs();
  ring();
}

// Kernels that an engine has enqueued may run for a moment after its death.
void WorkerCalls::write_generation() {
  lane_.device_.read(&generation_, layout_.generation, sizeof(generation_));
  ++generation_;
  lane_.write_word(layout_.generation, generation_);
}

// Writes the work divisions for each number of SMs that a call may ask for.
void WorkerCalls::write_divisions() const {
  const std::uint32_t most = lane_.device_.max_sms();
  std::vector<WorkDivision> all(std::size_t{kDivisionKinds} * most);
  const auto add = [&](Kind kind, std::uint32_t place, const Operation& like) {
    for (std::uint32_t sms = 1; sms <= most; ++sms) {
      Operation op = like;
      EPD_CHECK(kernels::cuda::configure(kind, lane_.device_.max_shared_bytes(), sms, op));
      all[place * most + sms - 1] = op.division;
    }
  };
  Operation op;
  op.inbox = lane_.shape_.inbox;
  for (std::uint32_t format = 0; format < lane_.shape_.limits.num_formats; ++format) {
    op.shape = lane_.shape_.with_format(format);
    add(Kind::kDispatch, division_kind(abi::Op::kDispatch, format << abi::kFormatShift), op);
  }
  for (std::uint32_t biases = 0; biases <= lane_.shape_.limits.num_biases; ++biases) {
    if (biases > 0) op.bias[biases - 1] = reinterpret_cast<const std::uint16_t*>(64);
    add(Kind::kCombine, division_kind(abi::Op::kCombine, biases << abi::kBiasShift), op);
  }
  lane_.device_.write(divisions(), all.data(), all.size() * sizeof(WorkDivision));
}

// The numbers of results, and of runs of captured calls, also continue.
void WorkerCalls::write_results() {
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
  write_state(&CallState::results, written);
  lane_.device_.write(lane_.on_device()->runs, runs_of.data(), runs_of.size() * sizeof(ResultRuns));
}

WorkerArguments WorkerCalls::arguments() const {
  LaneOnDevice* const own = lane_.on_device();
  WorkerArguments all;
  all.lane = &own->lane;
  all.credits = lane_.device_.shares().credits();
  all.bells = &own->bells;
  all.generation = reinterpret_cast<const std::uint32_t*>(layout_.generation);
  all.own_generation = generation_;
  all.ctas = lane_.ctas();
  all.asked_sms = lane_.asked_sms();
  CallArguments& calls = all.calls;
  calls.words = reinterpret_cast<abi::CallWords*>(layout_.words);
  calls.state = &own->calls;
  calls.routes = routes();
  calls.view = &own->view;
  calls.division = divisions();
  calls.most_ctas = lane_.device_.max_sms();
  calls.host = &lane_.on_host()->calls;
  calls.results = reinterpret_cast<abi::Results*>(layout_.results->bytes());
  calls.counts_stride = static_cast<std::uint32_t>(layout_.counts_stride);
  calls.runs = own->runs;
  calls.memories = own->memories.of[layout_.rank];
  calls.limits = lane_.shape_.limits;
  calls.per_expert = lane_.shape_.shape.per_expert;
  return all;
}

void WorkerCalls::set_limits(const Limits& limits) {
  const Limits before = std::exchange(limits_, limits);
  if (before.sms != limits.sms) write_state(&CallState::sms, limits.sms);
  if (before.timeout_ms != limits.timeout_ms) write_state(&CallState::timeout_ms, limits.timeout_ms);
  if (before.linger_us != limits.linger_us) write_state(&CallState::linger_us, limits.linger_us);
}

void WorkerCalls::guarantee(std::uint32_t sms) {
  if (std::exchange(guaranteed_sms_, sms) != sms) write_state(&CallState::guaranteed_sms, sms);
}

void WorkerCalls::ring() {
  lane_.write_word(&reinterpret_cast<abi::CallWords*>(layout_.words)->bell[0], 1);
}

void WorkerCalls::drain(bool drains) {
  write_state(&CallState::drains, drains ? 1 : 0);
  if (drains) ring();
}

void WorkerCalls::leave() {
  write_state(&CallState::leaves, 1);
  ring();
}

// ---- halt and resume

// A gate stores that it is inside and reads the enabled epoch in one access. So one that has read an earlier
// epoch is seen by a look that was begun after the store of this one. Calls that stand are then discarded:
// nobody else may ring.
void WorkerCalls::write_enabled_epoch() {
  lane_.write_word(&lane_.on_device()->lane.door[1], ++enabled_epoch_);
  ring();
  lane_.write_word(&lane_.on_host()->told, ++changes_);
  settled_ = false;
}

// The copy goes by the stream aside, because the control stream must not wait behind clients' copies.
bool WorkerCalls::settled() {
  LaneOnHost& look = *lane_.on_host();
  if (settled_ || std::atomic_ref(look.told).load(std::memory_order_acquire) != changes_) return settled_;
  if (door_looking_ && std::atomic_ref(look.door_number).load(std::memory_order_acquire) != door_looks_)
    return false;
  // A look that was begun before the last change is over by now, and is not used.
  settled_ = std::exchange(door_looking_, false) && looked_at_change_ == changes_ &&
             kernels::nothing_runs(look.door[0]);
  if (settled_) return true;
  door_looking_ = true;
  looked_at_change_ = changes_;
  lane_.device_.read_aside(look.door, lane_.on_device()->lane.door, sizeof(look.door), sizeof(look.door), 1,
                           &look.door_number, ++door_looks_);
  return false;
}

void WorkerCalls::halt() {
  if (enabled_epoch_ % 2 == 0) return;
  write_state(&CallState::abort, 1);
  write_enabled_epoch();
}

bool WorkerCalls::halted() {
  return enabled_epoch_ % 2 == 0 && settled();
}

bool WorkerCalls::resumed() {
  return enabled_epoch_ % 2 != 0 && settled();
}

void WorkerCalls::write_bells(std::span<const Bell> of_ranks) {
  Bells all{};
  bells_.assign(of_ranks.begin(), of_ranks.end());
  for (const Bell& bell : bells_) all.of[bell.rank] = reinterpret_cast<abi::CallWords*>(bell.words)->bell;
  lane_.device_.write(&lane_.on_device()->bells, &all, sizeof(all));
}

// No kernel reads the view before the next enabled epoch.
void WorkerCalls::write_view(const Start& start) const {
  DeviceView own;
  own.group = start.view;
  std::copy(start.peers.begin(), start.peers.end(), own.peers);
  const MemoryTable& of_ranks = start.memories;
  Operation probe;
  probe.shape = lane_.shape_.shape;
  probe.inbox = lane_.shape_.inbox;
  lane_.describe_workspace(probe);
  EPD_CHECK(kernels::cuda::configure(Kind::kDispatch, lane_.device_.max_shared_bytes(), 1, probe));
  own.group.shape = probe.shape;
  own.group.workspace = probe.workspace;
  own.group.workspace_bytes = probe.workspace_bytes;
  LaneOnDevice* const to = lane_.on_device();
  own.group.memories = to->memories.of[0];
  lane_.device_.write(&to->memories, &of_ranks, sizeof(of_ranks));
  lane_.device_.write(&to->view, &own, sizeof(own));
}

// A kernel finds no memory there while the first word is 0.
void WorkerCalls::set_memory(std::uint32_t rank, std::uint32_t number, const abi::MappedMemory& memory) {
  const auto* const entry = &lane_.on_device()->memories.of[rank][number];
  const auto write = [this](const void* at, std::uint64_t value) {
    lane_.must("cuStreamWriteValue64",
               lane_.driver_.cuStreamWriteValue64(lane_.device_.control(), reinterpret_cast<CUdeviceptr>(at),
                                                  value, 0));
  };
  write(&entry->word, 0);
  write(&entry->bytes, memory.bytes);
  write(&entry->word, memory.word);
  lane_.must("cuStreamSynchronize", lane_.driver_.cuStreamSynchronize(lane_.device_.control()));
}

void WorkerCalls::resume(const Start& start) {
  EPD_CHECK(halted() && start.routes.size() == lane_.shape_.limits.num_routes);
  auto* const routes = reinterpret_cast<RouteState*>(lane_.on_host() + 1);
  std::copy(start.routes.begin(), start.routes.end(), routes);
  CallStart& next = lane_.on_host()->calls.start;
  next.epoch = start.epoch;
  next.index = start.index;
  next.index_base = start.index_base;
  next.changed_epoch = start.changed_epoch;
  next.num_routes = static_cast<std::uint32_t>(start.routes.size());
  next.routes = routes;
  write_view(start);
  write_bells(start.bells);
  std::atomic_thread_fence(std::memory_order_release);
  write_state(&CallState::abort, 0);
  write_enabled_epoch();
}

// ---- the journal

const JournalEntry* WorkerCalls::front() const {
  JournalEntry& entry = lane_.on_host()->calls.journal[read_ % kJournalEntries];
  const bool there = std::atomic_ref(entry.number).load(std::memory_order_acquire) == read_ + 1;
  return there ? &entry : nullptr;
}

void WorkerCalls::pop() {
  last_end_ns_ = lane_.device_.now_ns();
  ++read_;
  if (read_ - told_ < kJournalEntries / 4) return;
  told_ = read_;
  write_state(&CallState::journal_read, told_);
  ring();  // a call may stand because the journal was full
}

// ---- the rings

std::uint32_t WorkerCalls::host_ended() const {
  auto& results = *reinterpret_cast<abi::Results*>(layout_.results->bytes());
  return std::atomic_ref(results.host_ended).load(std::memory_order_acquire);
}

// Copies the words that the engine needs. Those between them are the client's own. The control stream is not
// used: copies may wait there for milliseconds after some of a client's.
void WorkerCalls::look() {
  if (std::exchange(looking_, true)) return;
  LaneOnHost& look = *lane_.on_host();
  const CUstream stream = lane_.device_.aside();
  const auto copy = [&](void* to, std::size_t offset, std::size_t bytes) {
    const auto from = reinterpret_cast<CUdeviceptr>(layout_.words + offset);
    lane_.must("cuMemcpyDtoHAsync", lane_.driver_.cuMemcpyDtoHAsync(to, from, bytes, stream));
  };
  static_assert(offsetof(abi::CallWords, host_calls) == sizeof(look.ring.calls) &&
                offsetof(Ring, host_calls) == sizeof(look.ring.calls));
  copy(look.ring.calls, offsetof(abi::CallWords, calls), 2 * sizeof(look.ring.calls));
  copy(&look.ring.done, offsetof(abi::CallWords, done), sizeof(look.ring.done));
  lane_.must("cuStreamWriteValue32",
             lane_.driver_.cuStreamWriteValue32(stream, reinterpret_cast<CUdeviceptr>(&look.ring_number),
                                                ++looks_, 0));
}

const CallPort::Ring* WorkerCalls::seen() {
  LaneOnHost& look = *lane_.on_host();
  if (!looking_ || std::atomic_ref(look.ring_number).load(std::memory_order_acquire) != looks_)
    return nullptr;
  looking_ = false;
  look.ring.host_ended = host_ended();
  ring_if_calls_stand(look.ring);
  return &look.ring;
}

// A call stands if another rank of this device has not called the operation. When its time is up, its gate
// has to see that.
void WorkerCalls::ring_if_calls_stand(const Ring& now) {
  const std::uint32_t next[] = {now.done, now.host_ended};
  const abi::PackedCall* const calls[] = {now.calls, now.host_calls};
  bool stand = false;
  for (std::uint32_t ring = 0; ring < kernels::kCallRings; ++ring) {
    const bool idle = std::exchange(ended_before_[ring], next[ring]) == next[ring];
    stand = stand || (idle && kernels::is_there(calls[ring][next[ring] % abi::kCallSlots], next[ring]));
  }
  if (stand) ring();
}

}  // namespace epd::device
