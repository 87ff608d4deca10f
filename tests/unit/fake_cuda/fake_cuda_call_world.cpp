#include "unit/fake_cuda/fake_cuda_call_world.h"

#include "step.h"

#include <utility>

namespace epd::fake_cuda_test {
namespace {

CUdeviceptr address(const void* pointer) {
  return reinterpret_cast<CUdeviceptr>(pointer);
}

template <typename T>
T* pinned(std::size_t count) {
  void* memory = nullptr;
  EPD_CU(cuMemHostAlloc(&memory, count * sizeof(T), CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP));
  std::memset(memory, 0, count * sizeof(T));
  return static_cast<T*>(memory);
}

constexpr std::uint64_t kLong_ns = 30'000'000'000;
constexpr std::uint32_t kTimeout_ms = 30'000;
constexpr std::uint64_t kAnyBell = 0x0000'0001'0000'0001;
// One takes the call, one may find nothing after it, and one is rung for by another rank.
constexpr std::uint32_t kPairsOfACall = 3;

}  // namespace

CallWorld::CallWorld(const kernels::Shape& shape, std::uint32_t max_tokens)
    : world_(shape, max_tokens),
      max_tokens_(max_tokens),
      layout_(gpu_test::group_shape(shape, max_tokens, kDepth)),
      results_layout_(gpu_test::group_shape(shape, max_tokens, kDepth)),
      ranks_(shape.num_ranks) {
  EPD_CU(cuLibraryLoadData(&library_, "any", nullptr, nullptr, 0, nullptr, nullptr, 0));
  EPD_CU(cuLibraryGetKernel(&gate_, library_, kernels::cuda::kGateKernel));
  EPD_CU(cuLibraryGetKernel(&main_, library_, kernels::cuda::kMainKernel));
  for (std::uint32_t r = 0; r < size(); ++r) make(r);
  for (std::uint32_t r = 0; r < size(); ++r) describe(r);
}

CallWorld::~CallWorld() {
  for (std::uint32_t r = 0; r < size(); ++r) {
    CallRank& own = use(r);
    for (const CUstream stream : {own.pairs, own.client, own.control}) cuStreamDestroy(stream);
    cuMemFreeHost(own.host);
    cuMemFreeHost(own.starts);
    cuMemFreeHost(own.results);
  }
  cuLibraryUnload(library_);
}

void CallWorld::make(std::uint32_t r) {
  CallRank& own = use(r);
  EPD_CU(
      cuKernelSetAttribute(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, kShared, main_, rank(r).device));
  for (CUstream* stream : {&own.pairs, &own.client, &own.control})
    EPD_CU(cuStreamCreate(stream, CU_STREAM_NON_BLOCKING));
  constexpr std::size_t kDivisions = std::size_t{kernels::kDivisionKinds} * kCtas;
  own.arena = std::make_unique<Arena>(rank(r).device, layout_.total_bytes + sizeof(DeviceView) +
                                                          sizeof(WorkDivision) * kDivisions + (256 << 10));
  own.exchange = own.arena->take<std::uint8_t>(layout_.total_bytes);
  own.words = own.arena->take<CallWords>(1);
  own.state = own.arena->take<CallState>(1);
  own.routes = own.arena->take<RouteState>(kRoutes);
  own.view = own.arena->take<DeviceView>(1);
  own.division = own.arena->take<WorkDivision>(kDivisions);
  own.lane = own.arena->take<LaneState>(1);
  own.bells = own.arena->take<kernels::Bells>(1);
  own.generation = own.arena->take<std::uint32_t>(1);
  own.credits = own.arena->take<kernels::SmCredits>(1);
  for (std::uint32_t other = 0; other < r; ++other) {
    if (rank(other).device == rank(r).device) own.credits = ranks_[other].credits;
  }
  own.state->guaranteed_sms = kCtas;
  own.state->timeout_ms = kTimeout_ms;
  own.runs = own.arena->take<kernels::ResultRuns>(abi::kReplayedResults);
  own.host = pinned<CallHost>(1);
  own.starts = pinned<RouteState>(kRoutes);
  own.results = reinterpret_cast<abi::Results*>(pinned<std::byte>(results_layout_.total_bytes));
}

// As an engine does. Every slot has the same regions.
void CallWorld::describe(std::uint32_t r) {
  using abi::Region;
  CallRank& own = use(r);
  const Rank& its = rank(r);
  const auto place = [](const void* at) {
    return kernels::RegionPlace{static_cast<std::uint8_t*>(const_cast<void*>(at)), 0};  // NOLINT
  };
  DeviceView& view = *own.view;
  view = {};
  view.group.shape = world_.shape();
  view.group.rank = r;
  view.group.exchange_arena = own.exchange;
  view.group.workspace = its.workspace;
  view.group.workspace_bytes = its.workspace_bytes;
  view.group.exchange = layout_;
  const bool scales = world_.shape().format.scale_bytes != 0 && !world_.shape().format.cast;
  const std::pair<Region, const void*> regions[] = {{Region::kX, its.x},
                                                    {Region::kXScales, scales ? its.x_scales : nullptr},
                                                    {Region::kTopkIdx, its.topk_idx},
                                                    {Region::kTopkWeights, its.topk_weights},
                                                    {Region::kRankOffsets, its.counts.rank_offsets},
                                                    {Region::kExpertCounts, its.counts.expert_counts},
                                                    {Region::kExpertOffsets, its.counts.expert_offsets},
                                                    {Region::kSourceRanges, its.counts.source_ranges},
                                                    {Region::kOut, its.out},
                                                    {Region::kOutWeights, its.out_weights}};
  for (const auto& [region, at] : regions) view.group.regions[static_cast<std::size_t>(region)] = place(at);
  for (std::uint32_t i = 0; i < size(); ++i) {
    const kernels::Peer& peer = rank(i).peer;
    kernels::PeerView& to = view.peers[i];
    if (i != r) {
      view.group.others |= 1u << i;
      own.bells->of[i] = ranks_[i].words->bell;
    }
    to.exchange = ranks_[i].exchange;
    to.recv_x = place(peer.target.recv_x);
    to.recv_scales = place(peer.target.recv_scales);
    to.recv_topk_idx = place(peer.target.recv_topk_idx);
    to.recv_topk_weights = place(peer.target.recv_topk_weights);
    to.recv_src = place(peer.target.recv_src);
    to.y = place(peer.source.y);
    to.y_weights = place(peer.source.y_weights);
  }
  for (std::uint32_t i = 0; i < kernels::kDivisionKinds * kCtas; ++i) {
    own.division[i].ctas = i % kCtas + 1;
    own.division[i].threads = 512;
    own.division[i].shared_bytes = kShared;
  }
}

abi::Call CallWorld::noop() {
  abi::Call call;
  call.op = abi::Op::kNoop;
  return call;
}

abi::Call CallWorld::dispatch(std::uint32_t route) const {
  abi::Call call;
  call.op = abi::Op::kDispatch;
  call.slot = call.route = route;
  call.flags = dispatch_flags;
  return call;
}

abi::Call CallWorld::cached(std::uint32_t route) const {
  abi::Call call = dispatch(route);
  call.flags |= abi::kFlagCached;
  return call;
}

abi::Call CallWorld::combine(std::uint32_t route) const {
  abi::Call call;
  call.op = abi::Op::kCombine;
  call.slot = call.route = route;
  return call;
}

kernels::WorkerArguments CallWorld::arguments(std::uint32_t r) const {
  const CallRank& own = ranks_[r];
  kernels::WorkerArguments all;
  all.lane = own.lane;
  all.credits = own.credits;
  all.bells = own.bells;
  all.generation = own.generation;
  all.own_generation = now(*own.generation);
  all.ctas = kCtas;
  all.asked_sms = kCtas - std::min<std::uint32_t>(kCtas, now(own.state->guaranteed_sms));
  all.calls.words = own.words;
  all.calls.state = own.state;
  all.calls.routes = own.routes;
  all.calls.view = own.view;
  all.calls.division = own.division;
  all.calls.most_ctas = kCtas;
  all.calls.host = own.host;
  all.calls.results = own.results;
  all.calls.counts_stride = static_cast<std::uint32_t>(results_layout_.counts_stride);
  all.calls.runs = own.runs;
  all.calls.limits = {kDepth, max_tokens_, kRoutes, 0};
  all.calls.per_expert = world_.shape().per_expert;
  return all;
}

void CallWorld::open(std::uint32_t r) {
  CallRank& own = ranks_[r];
  own.open = true;
  write(r, &own.state->leaves, 0);
  write(r, own.generation, *own.generation + 1);
}

void CallWorld::close(std::uint32_t r) {
  CallRank& own = ranks_[r];
  own.open = false;
  write(r, &own.state->leaves, 1);
  ring_bell(r);
  EPD_CU(cuStreamSynchronize(own.pairs));
}

void CallWorld::enqueue_pairs(std::uint32_t r, std::uint32_t count) {
  const CUstream stream = use(r).pairs;
  kernels::WorkerArguments own = arguments(r);
  void* parameters[] = {&own};
  for (; count > 0; --count) {
    own.number = ++ranks_[r].num_pairs * kernels::kWorksOfPair;
    EPD_CU(cuStreamWaitValue64(stream, address(own.calls.words->bell), kAnyBell, CU_STREAM_WAIT_VALUE_AND));
    EPD_CU(cuLaunchKernel(reinterpret_cast<CUfunction>(gate_), 1, 1, 1, kernels::cuda::kGateThreads, 1, 1, 0,
                          stream, parameters, nullptr));
    EPD_CU(cuLaunchKernel(reinterpret_cast<CUfunction>(main_), kCtas, 1, 1, 512, 1, 1, kShared, stream,
                          parameters, nullptr));
  }
}

void CallWorld::call_by_host(std::uint32_t r, abi::Call call) {
  CallRank& own = use(r);
  call.number = own.host_tail++;
  call.epoch = now(own.words->epoch);
  const abi::PackedCall packed = abi::pack(call);
  EPD_CU(cuMemcpyHtoDAsync(address(&own.words->host_calls[call.number % abi::kCallSlots]), &packed,
                           sizeof(packed), own.control));
  EPD_CU(cuStreamWriteValue32(own.control, address(&own.words->bell[1]), 1, 0));
  if (own.open) enqueue_pairs(r, kPairsOfACall);
}

void CallWorld::write(std::uint32_t r, const void* word, std::uint32_t value) {
  EPD_CU(cuStreamWriteValue32(use(r).control, address(word), value, 0));
  EPD_CU(cuStreamSynchronize(ranks_[r].control));
}

void CallWorld::write_enabled_epoch(std::uint32_t r, std::uint32_t enabled_epoch) {
  ranks_[r].enabled_epoch = enabled_epoch;
  write(r, &ranks_[r].lane->door[1], enabled_epoch);
}

void CallWorld::resume(std::uint32_t r, const Start& start) {
  CallRank& own = ranks_[r];
  kernels::CallStart& to = own.host->start;
  to.epoch = start.epoch;
  to.index = start.index;
  to.changed_epoch = start.changed_epoch;
  to.num_routes = kRoutes;
  to.routes = own.starts;
  for (std::uint32_t i = 0; i < kRoutes; ++i) own.starts[i] = start.routes[i];
  std::atomic_ref(own.words->epoch).store(static_cast<std::uint32_t>(start.epoch));
  write(r, &own.state->abort, 0);
  write_enabled_epoch(r, (own.enabled_epoch + 1) | 1);
  ASSERT_TRUE(comes([&] { return kernels::nothing_runs(now(own.lane->door[0])); }));
}

void CallWorld::halt(std::uint32_t r) {
  CallRank& own = ranks_[r];
  write(r, &ranks_[r].state->abort, 1);
  write_enabled_epoch(r, (own.enabled_epoch | 1) + 1);
  ASSERT_TRUE(comes([&] { return !inside(r); }));
}

void CallWorld::ring(std::uint32_t r, const abi::Call& call, const Ring& how) {
  CallRank& own = use(r);
  CUkernel kernel = nullptr;
  EPD_CU(cuLibraryGetKernel(&kernel, library_, stream_kernels::kKernelNames[0]));
  stream_kernels::Step step;
  step.calls = true;
  step.words = own.words;
  abi::Call its = call;
  its.num_tokens = how.num_tokens_at == nullptr ? how.num_tokens : 0;
  its.flagged = how.flagged;
  step.call = abi::halves_of(its);
  step.call_tokens_at = how.num_tokens_at;
  if (how.waits) step.wait = stream_kernels::Wait::kCall;
  step.limit_ns = kLong_ns;
  void* parameters[] = {&step};
  EPD_CU(cuLaunchKernel(reinterpret_cast<CUfunction>(kernel), 1, 1, 1, 1, 1, 1, 0, own.client, parameters,
                        nullptr));
  if (own.open) enqueue_pairs(r, kPairsOfACall);
}

void CallWorld::store(std::uint32_t r, const abi::Call& call) {
  const abi::PackedCall packed = abi::pack(call);
  abi::PackedCall& to = ranks_[r].words->calls[call.number % abi::kCallSlots];
  for (std::uint32_t i = abi::PackedCall::kWords; i-- > 0;)
    std::atomic_ref(to.words[i]).store(packed.words[i]);
  std::atomic_ref(ranks_[r].words->bell[0]).store(1);
  if (ranks_[r].open) enqueue_pairs(r, kPairsOfACall);
}

JournalEntry CallWorld::journal(std::uint32_t r) {
  CallRank& own = ranks_[r];
  const JournalEntry& entry = own.host->journal[own.read % kernels::kJournalEntries];
  if (!comes([&] { return now(entry.number) == own.read + 1; })) return {};
  ++own.read;
  return entry;
}

void CallWorld::tell_read(std::uint32_t r) {
  write(r, &ranks_[r].state->journal_read, ranks_[r].read);
  ring_bell(r);
}

}  // namespace epd::fake_cuda_test
