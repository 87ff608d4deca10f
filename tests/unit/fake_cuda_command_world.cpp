#include "unit/fake_cuda_command_world.h"

#include "enqueued.h"

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

}  // namespace

CommandWorld::CommandWorld(const kernels::cuda::Shape& shape, std::uint32_t max_tokens)
    : world_(shape, max_tokens, {}),
      max_tokens_(max_tokens),
      layout_(gpu_test::group_shape(shape, max_tokens, kDepth)),
      results_layout_(gpu_test::group_shape(shape, max_tokens, kDepth)),
      ranks_(shape.num_ranks) {
  EPD_CU(cuLibraryLoadData(&library_, "any", nullptr, nullptr, 0, nullptr, nullptr, 0));
  for (std::uint32_t r = 0; r < size(); ++r) make(r);
  for (std::uint32_t r = 0; r < size(); ++r) describe(r);
}

CommandWorld::~CommandWorld() {
  for (std::uint32_t r = 0; r < size(); ++r) {
    CommandRank& own = use(r);
    for (const CUstream stream : {own.kernel, own.client, own.control}) cuStreamDestroy(stream);
    cuMemFreeHost(own.host);
    cuMemFreeHost(own.starts);
    cuMemFreeHost(own.results);
    cuMemFreeHost(own.round);
  }
  cuLibraryUnload(library_);
}

void CommandWorld::make(std::uint32_t r) {
  CommandRank& own = use(r);
  CUkernel kernel = nullptr;
  EPD_CU(cuLibraryGetKernel(&kernel, library_, kernels::cuda::kResidentKernel));
  EPD_CU(
      cuKernelSetAttribute(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, kShared, kernel, rank(r).device));
  for (CUstream* stream : {&own.kernel, &own.client, &own.control})
    EPD_CU(cuStreamCreate(stream, CU_STREAM_NON_BLOCKING));
  constexpr std::size_t kMovers = std::size_t{kernels::cuda::kMoverKinds} * kCtas;
  own.arena = std::make_unique<Arena>(
      rank(r).device, layout_.total_bytes + sizeof(DeviceView) + sizeof(Movers) * kMovers + (256 << 10));
  own.exchange = own.arena->take<std::uint8_t>(layout_.total_bytes);
  own.words = own.arena->take<CommandWords>(1);
  own.state = own.arena->take<CommandState>(1);
  own.routes = own.arena->take<RouteState>(kRoutes);
  own.view = own.arena->take<DeviceView>(1);
  own.movers = own.arena->take<Movers>(kMovers);
  own.resident = own.arena->take<ResidentState>(1);
  own.runs = own.arena->take<kernels::cuda::ResultRuns>(abi::kReplayedResults);
  own.host = pinned<CommandHost>(1);
  own.starts = pinned<RouteState>(kRoutes);
  own.results = reinterpret_cast<abi::Results*>(pinned<std::byte>(results_layout_.total_bytes));
  own.round = pinned<std::uint32_t>(1);
}

// As an engine does. Every slot has the same regions.
void CommandWorld::describe(std::uint32_t r) {
  using abi::Region;
  CommandRank& own = use(r);
  const Rank& its = rank(r);
  const auto place = [](const void* at) {
    return kernels::cuda::RegionPlace{static_cast<std::uint8_t*>(const_cast<void*>(at)), 0};  // NOLINT
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
    const kernels::cuda::Peer& peer = rank(i).peer;
    kernels::cuda::PeerView& to = view.peers[i];
    to.exchange = ranks_[i].exchange;
    to.recv_x = place(peer.target.recv_x);
    to.recv_scales = place(peer.target.recv_scales);
    to.recv_topk_idx = place(peer.target.recv_topk_idx);
    to.recv_topk_weights = place(peer.target.recv_topk_weights);
    to.recv_src = place(peer.target.recv_src);
    to.y = place(peer.source.y);
    to.y_weights = place(peer.source.y_weights);
  }
  for (std::uint32_t i = 0; i < kernels::cuda::kMoverKinds * kCtas; ++i) {
    own.movers[i].ctas = i % kCtas + 1;
    own.movers[i].threads = 512;
    own.movers[i].shared_bytes = kShared;
  }
}

abi::Call CommandWorld::noop() {
  abi::Call call;
  call.op = abi::Op::kNoop;
  return call;
}

abi::Call CommandWorld::dispatch(std::uint32_t route) const {
  abi::Call call;
  call.op = abi::Op::kDispatch;
  call.slot = call.route = route;
  call.flags = dispatch_flags;
  return call;
}

abi::Call CommandWorld::cached(std::uint32_t route) const {
  abi::Call call = dispatch(route);
  call.flags |= abi::kFlagCached;
  return call;
}

abi::Call CommandWorld::combine(std::uint32_t route) const {
  abi::Call call;
  call.op = abi::Op::kCombine;
  call.slot = call.route = route;
  call.flags = combine_flags;
  return call;
}

void CommandWorld::start_kernel(std::uint32_t r) {
  CommandRank& own = use(r);
  kernels::cuda::ResidentArguments arguments{own.resident, own.round, *own.round, ++own.kernels, {}};
  arguments.commands.words = own.words;
  arguments.commands.state = own.state;
  arguments.commands.routes = own.routes;
  arguments.commands.view = own.view;
  arguments.commands.movers = own.movers;
  arguments.commands.most_ctas = kCtas;
  arguments.commands.host = own.host;
  arguments.commands.results = own.results;
  arguments.commands.counts_stride = static_cast<std::uint32_t>(results_layout_.counts_stride);
  arguments.commands.runs = own.runs;
  arguments.commands.limits = {kDepth, max_tokens_, kRoutes, 0};
  arguments.commands.per_expert = world_.shape().per_expert;
  CUkernel kernel = nullptr;
  EPD_CU(cuLibraryGetKernel(&kernel, library_, kernels::cuda::kResidentKernel));
  void* parameters[] = {&arguments};
  EPD_CU(cuLaunchKernel(reinterpret_cast<CUfunction>(kernel), kCtas, 1, 1, 512, 1, 1, kShared, own.kernel,
                        parameters, nullptr));
}

void CommandWorld::stop_kernel(std::uint32_t r) {
  CommandRank& own = use(r);
  EPD_CU(cuStreamWriteValue32(own.control, address(&own.state->stop), own.kernels, 0));
  EPD_CU(cuStreamSynchronize(own.kernel));
}

void CommandWorld::call_by_host(std::uint32_t r, abi::Call call) {
  CommandRank& own = use(r);
  call.number = own.host_tail++;
  call.epoch = now(own.words->epoch);
  const abi::PackedCall packed = abi::pack(call);
  EPD_CU(cuMemcpyHtoDAsync(address(&own.words->host_calls[call.number % abi::kCommandSlots]), &packed,
                           sizeof(packed), own.control));
}

abi::CallEnd CommandWorld::result(std::uint32_t r, std::uint32_t result, std::uint32_t runs) {
  const abi::CallResult& place = ranks_[r].results->places[abi::place_of(result)];
  abi::CallEnd end;
  EXPECT_TRUE(comes([&] {
    std::uint64_t words[abi::CallResult::kWords];
    for (std::uint32_t i = 0; i < abi::CallResult::kWords; ++i) words[i] = now(place.words[i]);
    return abi::read_result(words, end) && end.result == result && end.runs == runs;
  }));
  return end;
}

void CommandWorld::write(std::uint32_t r, const void* word, std::uint32_t value) {
  EPD_CU(cuStreamWriteValue32(use(r).control, address(word), value, 0));
  EPD_CU(cuStreamSynchronize(ranks_[r].control));
}

void CommandWorld::say_turn(std::uint32_t r, std::uint32_t turn) {
  ranks_[r].turn = turn;
  write(r, &ranks_[r].state->turn, turn);
}

void CommandWorld::abort(std::uint32_t r, std::uint32_t word) {
  write(r, &ranks_[r].state->abort, word);
}

void CommandWorld::resume(std::uint32_t r, const Start& start) {
  CommandRank& own = ranks_[r];
  kernels::cuda::CommandStart& to = own.host->start;
  to.epoch = start.epoch;
  to.index = start.index;
  to.changed_epoch = start.changed_epoch;
  to.num_routes = kRoutes;
  to.routes = own.starts;
  own.state->timeout_ms = kTimeout_ms;
  for (std::uint32_t i = 0; i < kRoutes; ++i) own.starts[i] = start.routes[i];
  std::atomic_ref(own.words->epoch).store(static_cast<std::uint32_t>(start.epoch));
  abort(r, 0);
  say_turn(r, (own.turn + 1) | 1);
  ASSERT_TRUE(comes([&] { return now(own.host->turn) == own.turn; }));
}

void CommandWorld::halt(std::uint32_t r) {
  CommandRank& own = ranks_[r];
  say_turn(r, (own.turn | 1) + 1);
  abort(r, 1);
  ASSERT_TRUE(comes([&] { return now(own.host->turn) == own.turn; }));
}

void CommandWorld::ring(std::uint32_t r, const abi::Call& call, const Ring& how) {
  CommandRank& own = use(r);
  CUkernel kernel = nullptr;
  EPD_CU(cuLibraryGetKernel(&kernel, library_, "epd_command"));
  stream_kernels::Enqueued its{call, how.waits ? 1u : 0u, how.num_tokens_at, kLong_ns};
  its.call.num_tokens = how.num_tokens;
  its.call.flagged = how.flagged;
  void* parameters[] = {&own.words, &its};
  EPD_CU(cuLaunchKernel(reinterpret_cast<CUfunction>(kernel), 1, 1, 1, 1, 1, 1, 0, own.client, parameters,
                        nullptr));
}

void CommandWorld::store(std::uint32_t r, const abi::Call& call) {
  const abi::PackedCall packed = abi::pack(call);
  abi::PackedCall& to = ranks_[r].words->calls[call.number % abi::kCommandSlots];
  for (std::uint32_t i = abi::PackedCall::kWords; i-- > 0;)
    std::atomic_ref(to.words[i]).store(packed.words[i]);
}

JournalEntry CommandWorld::journal(std::uint32_t r) {
  CommandRank& own = ranks_[r];
  const JournalEntry& entry = own.host->journal[own.read % kernels::cuda::kJournalEntries];
  if (!comes([&] { return now(entry.number) == own.read + 1; })) return {};
  ++own.read;
  return entry;
}

void CommandWorld::tell_read(std::uint32_t r) {
  write(r, &ranks_[r].state->journal_read, ranks_[r].read);
}

}  // namespace epd::fake_cuda_test
