#include "unit/fake_cuda_command_world.h"

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

}  // namespace

CommandWorld::CommandWorld(const kernels::cuda::Shape& shape, std::uint32_t max_tokens)
    : world_(shape, max_tokens, {}),
      max_tokens_(max_tokens),
      layout_(gpu_test::group_shape(shape, max_tokens, kDepth)),
      ranks_(shape.num_ranks) {
  EPD_CU(cuLibraryLoadData(&library_, "any", nullptr, nullptr, 0, nullptr, nullptr, 0));
  for (std::uint32_t r = 0; r < size(); ++r) make(r);
  for (std::uint32_t r = 0; r < size(); ++r) record(r, [](std::uint32_t, Operation&) {});
}

CommandWorld::~CommandWorld() {
  for (std::uint32_t r = 0; r < size(); ++r) {
    CommandRank& own = use(r);
    for (const CUstream stream : {own.kernel, own.client, own.control}) cuStreamDestroy(stream);
    cuMemFreeHost(own.host);
    cuMemFreeHost(own.starts);
    cuMemFreeHost(own.operations);
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
  own.arena = std::make_unique<Arena>(rank(r).device, layout_.block_bytes * kDepth +
                                                          layout_.half_bytes * 2 * kRoutes +
                                                          sizeof(Program) * abi::kMaxPrograms + (64 << 10));
  own.blocks = own.arena->take<std::uint8_t>(layout_.block_bytes * kDepth);
  own.halves = own.arena->take<std::uint8_t>(layout_.half_bytes * 2 * kRoutes);
  own.words = own.arena->take<CommandWords>(1);
  own.state = own.arena->take<CommandState>(1);
  own.routes = own.arena->take<RouteState>(kRoutes);
  own.programs = own.arena->take<Program>(abi::kMaxPrograms);
  own.resident = own.arena->take<ResidentState>(1);
  own.place = own.arena->take<Operation>(1);
  own.host = pinned<CommandHost>(1);
  own.starts = pinned<RouteState>(kRoutes);
  own.operations = pinned<Operation>(1);
  own.told = pinned<std::uint64_t>(kernels::cuda::kQueueEntries);
  own.round = pinned<std::uint32_t>(1);
}

kernels::cuda::Peer CommandWorld::peer(std::uint32_t r) {
  kernels::cuda::Peer peer = rank(r).peer;
  std::uint8_t* const block = ranks_[r].blocks;
  peer.ready = reinterpret_cast<abi::SignalLine*>(block + layout_.ready);
  peer.arrived = reinterpret_cast<abi::SignalLine*>(block + layout_.arrived);
  peer.announcement = reinterpret_cast<abi::OpAnnouncement*>(block + layout_.announcement);
  peer.rank_counts = reinterpret_cast<std::uint32_t*>(block + layout_.rank_counts);
  peer.expert_counts = reinterpret_cast<std::uint32_t*>(block + layout_.expert_counts);
  return peer;
}

void CommandWorld::record(std::uint32_t r,
                          const std::function<void(std::uint32_t program, Operation&)>& change) {
  const auto& s = world_.shape();
  for (std::uint32_t number = 0; number <= kNoop; ++number) {
    Program& program = ranks_[r].programs[number];
    program = {};
    program.task = Task::kNoop;
    if (number == kNoop) continue;
    const std::uint32_t kind = number % 3;
    program.route = number / 3;
    program.makes_routing = kind == 0;
    program.max_tokens = kind == 0 ? max_tokens_ : 0;
    program.task = kind != 2 ? Task::kDispatch : s.per_expert ? Task::kCombinePerExpert : Task::kCombine;
    Operation& op = program.op;
    op = world_.operation(r, 0, number);
    std::uint8_t* const half = ranks_[r].halves + layout_.half_bytes * 2 * program.route;
    op.routing = {reinterpret_cast<std::int32_t*>(half + layout_.topk),
                  reinterpret_cast<std::int32_t*>(half + layout_.rows),
                  reinterpret_cast<std::int32_t*>(half + layout_.placement)};
    if (kind == 0) op.routing.head = reinterpret_cast<abi::RoutingRecord*>(half);
    op.cached = kind == 1;
    op.num_tokens = 0;
    op.counts.host_placement = nullptr;
    op.counts.host_ready = nullptr;
    op.abort = nullptr;
    op.result = nullptr;
    for (std::uint32_t i = 0; i < size(); ++i) op.peers[i] = peer(i);
    change(number, op);
  }
}

void CommandWorld::start_kernel(std::uint32_t r) {
  CommandRank& own = use(r);
  kernels::cuda::ResidentArguments arguments{own.resident, own.place, own.operations, own.told, own.round,
                                             *own.round,   {}};
  arguments.commands = {own.words, own.state,           own.routes, own.programs,      own.host, kDepth,
                        r,         layout_.block_bytes, 0,          layout_.half_bytes};
  CUkernel kernel = nullptr;
  EPD_CU(cuLibraryGetKernel(&kernel, library_, kernels::cuda::kResidentKernel));
  void* parameters[] = {&arguments};
  EPD_CU(cuLaunchKernel(reinterpret_cast<CUfunction>(kernel), kCtas, 1, 1, 512, 1, 1, kShared, own.kernel,
                        parameters, nullptr));
}

void CommandWorld::stop_kernel(std::uint32_t r) {
  CommandRank& own = use(r);
  EPD_CU(cuStreamWriteValue64(own.control,
                              address(&own.resident->entries[own.next % kernels::cuda::kQueueEntries]),
                              kernels::cuda::queue_entry(own.next, Task::kStop, 0), 0));
  ++own.next;
  EPD_CU(cuStreamSynchronize(own.kernel));
}

void CommandWorld::queue_noop(std::uint32_t r) {
  CommandRank& own = use(r);
  Operation& op = *own.operations;
  ASSERT_TRUE(comes([&] { return now(rank(r).result->tag) == op.tag; }));  // it may be read until then
  op = {};
  op.tag = own.next + 1;
  op.result = rank(r).result;
  op.workspace = rank(r).workspace;
  op.workspace_bytes = 64;
  EPD_CU(cuStreamWriteValue64(own.control,
                              address(&own.resident->entries[own.next % kernels::cuda::kQueueEntries]),
                              kernels::cuda::queue_entry(own.next, Task::kNoop, 0), 0));
  ++own.next;
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

void CommandWorld::ring(std::uint32_t r, std::uint32_t program, const Ring& how) {
  CommandRank& own = use(r);
  CUkernel kernel = nullptr;
  EPD_CU(cuLibraryGetKernel(&kernel, library_, "epd_command"));
  std::uint32_t slot = 0;
  std::uint32_t tokens = how.num_tokens;
  const std::uint32_t* at = how.num_tokens_at;
  std::uint32_t flagged = how.flagged;
  std::uint32_t waits = how.waits;
  std::uint64_t limit_ns = kLong_ns;
  void* parameters[] = {&own.words, &slot, &program, &tokens, &at, &flagged, &waits, &limit_ns};
  EPD_CU(cuLaunchKernel(reinterpret_cast<CUfunction>(kernel), 1, 1, 1, 1, 1, 1, 0, own.client, parameters,
                        nullptr));
}

void CommandWorld::store(std::uint32_t r, std::uint32_t number, std::uint64_t word) {
  std::atomic_ref(ranks_[r].words->commands[number % abi::kCommandSlots]).store(word);
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
