// GB/s of the host kernels, one thread, against plain copies of the same bytes. H=7168, K=8, E=256, 4 ranks.
// Memory: up to 2 GiB.
//   kernels_bench --benchmark_filter=4096/packed/.*avx512
#include "host/row_kernels.h"
#include "kernels/numbers.h"
#include "kernels/routing.h"

#include <benchmark/benchmark.h>
#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include <cstdlib>
#include <cstring>
#include <ctime>
#include <initializer_list>
#include <memory>
#include <random>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

namespace {

using namespace epd::kernels;

constexpr std::uint32_t kRanks = 4;
constexpr std::uint32_t kExperts = 256;
constexpr std::size_t kTopk = 8;
constexpr std::uint32_t kHidden = 7168;
constexpr std::size_t kBlocks = kHidden / kScaleBlock;

// Shared memory, as arenas are; every page touched.
class Region {
 public:
  explicit Region(std::size_t bytes) : bytes_(bytes) {
    data_ = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (data_ == MAP_FAILED) std::abort();
    std::memset(data_, 0x11, bytes);
  }
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;
  ~Region() { munmap(data_, bytes_); }

  template <typename T>
  T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  void* data_ = nullptr;
  std::size_t bytes_;
};

std::vector<std::int32_t> random_choices(std::uint32_t tokens) {
  std::mt19937 random(1);
  std::vector<std::int32_t> choices;
  for (std::uint32_t i = 0; i < tokens * kTopk; ++i) choices.push_back(static_cast<int>(random() % kExperts));
  return choices;
}

RoutingInput routing_input(const std::vector<std::int32_t>& choices, std::uint32_t tokens, bool per_expert) {
  RoutingInput input;
  input.topk_idx = choices.data();
  input.per_expert = per_expert;
  input.num_tokens = tokens;
  input.topk = kTopk;
  input.num_ranks = kRanks;
  input.num_experts = kExperts;
  return input;
}

enum class Layout { kCompact, kPacked, kExpert };
enum class Rows { kBf16, kCast, kCastUe8m0, kFp8, kOpaque };

constexpr std::uint32_t kOpaqueBytes = kHidden + 4 * kBlocks + 16;  // not a multiple of a cache line

RowFormat row_format(Rows rows) {
  RowFormat format;
  format.hidden = kHidden;
  format.cast = rows == Rows::kCast || rows == Rows::kCastUe8m0;
  format.scales = rows == Rows::kCastUe8m0 ? ScaleFormat::kUe8m0 : ScaleFormat::kFloat32;
  const bool fp8 = format.cast || rows == Rows::kFp8;
  format.row_bytes = rows == Rows::kOpaque ? kOpaqueBytes : fp8 ? kHidden : 2 * kHidden;
  format.x_bytes = format.cast ? 2 * kHidden : format.row_bytes;
  if (fp8) format.scale_bytes = rows == Rows::kCastUe8m0 ? kBlocks : 4 * kBlocks;
  return format;
}

// One source rank and what it touches at four destinations. Rows are those of bf16, others use part of them.
class World {
 public:
  World(std::uint32_t num_tokens, Layout layout)
      : tokens(num_tokens),
        choices(random_choices(num_tokens)),
        x(std::size_t{num_tokens} * kHidden * 2),
        scales(std::size_t{num_tokens} * kBlocks * 4),
        out(std::size_t{num_tokens} * kHidden * 2) {
    std::mt19937 random(2);
    for (std::size_t i = 0; i < std::size_t{tokens} * kHidden; ++i) {
      x.as<std::uint16_t>()[i] =
          float_to_bf16(static_cast<float>(static_cast<int>(random() % 2001) - 1000) * 1e-3f);
    }
    weights.assign(choices.size(), 0.123f);
    build_routing_plan(routing_input(choices, tokens, layout != Layout::kCompact), plan);
    for (std::uint32_t rank = 0; rank < kRanks; ++rank) add_rank(place(layout, rank));
  }

  DispatchArgs dispatch_args(Rows kind) const {
    DispatchArgs args;
    args.plan = &plan;
    args.base = placement.base();
    args.x = x.as<void>();
    args.x_scales = scales.as<void>();
    args.topk_weights = weights.data();
    args.targets = targets;
    args.format = row_format(kind);
    args.topk = kTopk;
    args.experts_per_rank = kExperts / kRanks;
    return args;
  }
  CombineArgs combine_args(bool weighted, bool biases) const {
    CombineArgs args;
    args.plan = &plan;
    args.base = placement.base();
    args.sources = sources;
    args.topk_weights = weighted ? weights.data() : nullptr;
    for (auto& bias : args.bias) bias = biases ? x.as<std::uint16_t>() : nullptr;
    args.out = out.as<std::uint16_t>();
    args.hidden = kHidden;
    args.topk = kTopk;
    args.experts_per_rank = kExperts / kRanks;
    return args;
  }
  // Where the entry's row lies.
  char* row(const RouteEntry& entry, std::size_t row_bytes) const {
    const std::uint32_t rank = plan.per_expert ? entry.target / (kExperts / kRanks) : entry.target;
    const std::size_t index = static_cast<std::uint32_t>(placement.base()[entry.target]) + entry.position;
    return rows[rank]->as<char>() + index * row_bytes;
  }

  std::uint32_t tokens;
  std::vector<std::int32_t> choices;
  std::vector<float> weights;
  Region x;
  Region scales;
  Region out;
  std::vector<std::unique_ptr<Region>> rows;
  std::vector<std::unique_ptr<Region>> metadata;
  RoutingPlan plan;
  Placement placement;  // of the source, which is alone
  std::vector<DispatchTarget> targets;
  std::vector<CombineSource> sources;

 private:
  // Rows that `rank` needs space for.
  std::size_t place(Layout layout, std::uint32_t rank) {
    PlacementRules rules;
    rules.num_ranks = kRanks;
    rules.num_experts = kExperts;
    rules.per_expert = layout != Layout::kCompact;
    rules.expert_blocks = layout == Layout::kExpert;
    rules.alignment = layout == Layout::kPacked ? 128 : 1;
    rules.expert_capacity = tokens / 8;
    rules.recv_rows = 1 << 30;
    const std::vector<const std::uint32_t*> alone = {plan.rank_counts.data(), nullptr, nullptr, nullptr};
    const std::vector<const std::uint32_t*> experts = {plan.expert_counts.data(), nullptr, nullptr, nullptr};
    Placement theirs;
    if (place_rows(rules, {alone, experts}, 0, placement).bad) std::abort();
    if (place_rows(rules, {alone, experts}, rank, theirs).bad) std::abort();
    return layout == Layout::kExpert ? kExperts / kRanks * rules.expert_capacity : theirs.num_recv_rows;
  }

  void add_rank(std::size_t room) {
    rows.push_back(std::make_unique<Region>(room * kHidden * 2));
    // Ordinary numbers, as an expert would answer.
    char* to = rows.back()->as<char>();
    const std::size_t row = std::size_t{kHidden} * 2;
    for (std::size_t i = 0; i < room; ++i) std::memcpy(to + i * row, x.as<char>() + i % tokens * row, row);
    metadata.push_back(std::make_unique<Region>(room * (kBlocks * 4 + kTopk * 8 + 8)));
    char* place = metadata.back()->as<char>();
    DispatchTarget target;
    target.recv_x = to;
    target.recv_scales = place;
    target.recv_topk_idx = place + room * kBlocks * 4;
    target.recv_topk_weights = reinterpret_cast<float*>(place + room * (kBlocks * 4 + kTopk * 4));
    target.recv_src = reinterpret_cast<std::int32_t*>(place + room * (kBlocks * 4 + kTopk * 8));
    targets.push_back(target);
    sources.push_back({rows.back()->as<std::uint16_t>(), nullptr});
  }
};

// The world of the benchmark at hand; the next one often wants the same.
const World& world_of(std::uint32_t tokens, Layout layout) {
  static std::unique_ptr<World> world;
  static Layout its_layout;
  if (world == nullptr || world->tokens != tokens || its_layout != layout) {
    world.reset();
    world = std::make_unique<World>(tokens, layout);
    its_layout = layout;
  }
  return *world;
}

void count_bytes(benchmark::State& state, std::size_t rows, std::size_t row_bytes) {
  state.SetBytesProcessed(static_cast<std::int64_t>(state.iterations() * rows * row_bytes));
}

void bench_dispatch(benchmark::State& state, host::Choice choice, Layout layout, Rows kind) {
  const World& world = world_of(static_cast<std::uint32_t>(state.range(0)), layout);
  const DispatchArgs args = world.dispatch_args(kind);
  for (auto _ : state) host::dispatch_rows_with(choice, args, 0, world.tokens);
  count_bytes(state, world.plan.entries.size(), args.format.row_bytes + args.format.scale_bytes);
}

void bench_combine(benchmark::State& state, host::Choice choice, Layout layout, bool weighted, bool biases) {
  const World& world = world_of(static_cast<std::uint32_t>(state.range(0)), layout);
  const CombineArgs args = world.combine_args(weighted, biases);
  for (auto _ : state) host::combine_rows_with(choice, args, 0, world.tokens);
  count_bytes(state, world.plan.entries.size(), std::size_t{2} * kHidden);
}

// Uses the processor's bypassing stores if `streaming`, where there are any.
void copy_row(char* to, const char* from, std::size_t bytes, bool streaming) {
#if defined(__SSE2__)
  for (std::size_t i = 0; streaming && i < bytes; i += 16) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(to + i),
                     _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i)));
  }
  if (streaming) return;
#endif
  std::memcpy(to, from, bytes);
}

// The time that dispatch would take if it did nothing but copy the same rows to the same places; or that
// combine would take to copy the rows over one another.
void bench_plain_rows(benchmark::State& state, Layout layout, std::size_t row_bytes, bool streaming,
                      bool pull) {
  const World& world = world_of(static_cast<std::uint32_t>(state.range(0)), layout);
  for (auto _ : state) {
    for (std::uint32_t token = 0; token < world.tokens; ++token) {
      for (std::uint32_t i = world.plan.begin[token]; i < world.plan.begin[token + 1]; ++i) {
        char* there = world.row(world.plan.entries[i], row_bytes);
        if (pull) {
          copy_row(world.out.as<char>() + token * row_bytes, there, row_bytes, streaming);
        } else {
          copy_row(there, world.x.as<char>() + token * row_bytes, row_bytes, streaming);
        }
      }
    }
    benchmark::ClobberMemory();
  }
  count_bytes(state, world.plan.entries.size(), row_bytes);
}

// Moves this thread to another processor than `avoid`, where there is one.
void leave(int avoid) {
  cpu_set_t others;
  pthread_getaffinity_np(pthread_self(), sizeof(others), &others);
  if (CPU_COUNT(&others) > 1) CPU_CLR(avoid, &others);
  pthread_setaffinity_np(pthread_self(), sizeof(others), &others);
}

void read_all(const World& world) {
  for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
    const auto* words = world.rows[rank]->as<std::uint64_t>();
    const std::size_t count = world.plan.rank_counts[rank] * (std::size_t{kHidden} * 2 / sizeof(*words));
    std::uint64_t sum = 0;
    for (std::size_t i = 0; i < count; ++i) sum += words[i];
    benchmark::DoNotOptimize(sum);
  }
}

double thread_cpu_seconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

// Dispatch as its receivers see it: another processor reads the rows between the iterations, so that they
// must be taken from its caches again. The time is the writer's; reader_GiBps is how fast the other one read.
void bench_handover(benchmark::State& state, host::Choice choice) {
  const World& world = world_of(static_cast<std::uint32_t>(state.range(0)), Layout::kCompact);
  const double bytes = static_cast<double>(world.plan.entries.size()) * kHidden * 2;
  double read_seconds = 0;
  for (auto _ : state) {
    const double start = thread_cpu_seconds();
    host::dispatch_rows_with(choice, world.dispatch_args(Rows::kBf16), 0, world.tokens);
    state.SetIterationTime(thread_cpu_seconds() - start);
    std::thread([&world, &read_seconds, cpu = sched_getcpu()] {
      leave(cpu);
      const double read_start = thread_cpu_seconds();
      read_all(world);
      read_seconds += thread_cpu_seconds() - read_start;
    }).join();
  }
  count_bytes(state, world.plan.entries.size(), std::size_t{2} * kHidden);
  state.counters["reader_GiBps"] = static_cast<double>(state.iterations()) * bytes / read_seconds / (1 << 30);
}

// One long copy of as many bytes as dispatch delivers to one rank.
void bench_memcpy(benchmark::State& state) {
  const World& world = world_of(static_cast<std::uint32_t>(state.range(0)), Layout::kCompact);
  const std::size_t bytes = std::size_t{world.tokens} * kHidden * 2;
  for (auto _ : state) {
    std::memcpy(world.rows[0]->as<char>(), world.x.as<char>(), bytes);
    benchmark::ClobberMemory();
  }
  count_bytes(state, 1, bytes);
}

void bench_routing(benchmark::State& state, bool per_expert) {
  const auto tokens = static_cast<std::uint32_t>(state.range(0));
  const std::vector<std::int32_t> choices = random_choices(tokens);
  RoutingPlan plan;
  for (auto _ : state) {
    benchmark::DoNotOptimize(build_routing_plan(routing_input(choices, tokens, per_expert), plan));
  }
}

// Everybody's places in a group of `ranks`, E=256, from counts in memory.
void bench_placement(benchmark::State& state, bool per_expert) {
  const auto ranks = static_cast<std::uint32_t>(state.range(0));
  const std::vector<std::uint32_t> row(kExperts, 3);
  const std::vector<const std::uint32_t*> rows(ranks, row.data());
  PlacementRules rules;
  rules.num_ranks = ranks;
  rules.num_experts = kExperts;
  rules.per_expert = per_expert;
  rules.alignment = 128;
  rules.recv_rows = 1 << 30;
  Placement placement;
  for (auto _ : state) benchmark::DoNotOptimize(place_rows(rules, {rows, rows}, 1, placement));
}

// The cast alone, rows in the nearest cache.
void bench_cast(benchmark::State& state, const host::RowKernels* kernels, bool pow2) {
  const World& world = world_of(128, Layout::kCompact);
  std::vector<std::uint8_t> q(kHidden);
  void* const destination = q.data();
  std::vector<float> scales(kBlocks);
  for (auto _ : state) {
    kernels->cast_row({world.x.as<std::uint16_t>(), kHidden, scales.data(), pow2}, {&destination, 1},
                      host::Stores::kCached);
    benchmark::ClobberMemory();
  }
  count_bytes(state, 1, std::size_t{2} * kHidden);
}

constexpr struct {
  const char* name;
  Layout layout;
} kLayouts[] = {{"compact", Layout::kCompact}, {"packed", Layout::kPacked}, {"expert", Layout::kExpert}};

constexpr struct {
  const char* name;
  Rows rows;
} kRowKinds[] = {{"bf16", Rows::kBf16},
                 {"fp8_cast", Rows::kCast},
                 {"fp8_cast_ue8m0", Rows::kCastUe8m0},
                 {"fp8_given", Rows::kFp8},
                 {"opaque", Rows::kOpaque}};

using Size = std::int64_t;

std::string joined(std::initializer_list<std::string_view> parts) {
  std::string name;
  for (const std::string_view part : parts) name.append(part);
  return name;
}

// TOKENS/LAYOUT/OPERATION/PATH/STORES, so that benchmarks of one world follow one another.
void register_kernels(Size tokens, const std::string& prefix, Layout layout, host::Choice choice) {
  const std::string way =
      joined({"/", choice.kernels->name, choice.stores == host::Stores::kCached ? "/cached" : "/streaming"});
  for (const auto& kind : kRowKinds) {
    benchmark::RegisterBenchmark(joined({prefix, "dispatch_", kind.name, way}).c_str(), bench_dispatch,
                                 choice, layout, kind.rows)
        ->Arg(tokens);
  }
  for (const bool weighted : {false, true}) {
    for (const bool biases : {false, true}) {
      const std::string name =
          joined({prefix, "combine", weighted ? "_weighted" : "", biases ? "_bias" : "", way});
      benchmark::RegisterBenchmark(name.c_str(), bench_combine, choice, layout, weighted, biases)
          ->Arg(tokens);
    }
  }
  if (layout != Layout::kCompact) return;
  benchmark::RegisterBenchmark(joined({prefix, "handover_bf16", way}).c_str(), bench_handover, choice)
      ->Arg(tokens)
      ->UseManualTime();
}

void register_world(Size tokens, const std::string& prefix, Layout layout) {
  for (const bool streaming : {false, true}) {
    const std::string way = streaming ? "/streaming" : "/memcpy";
    const auto add = [&](const char* name, std::size_t row_bytes, bool pull) {
      benchmark::RegisterBenchmark(joined({prefix, name, way}).c_str(), bench_plain_rows, layout, row_bytes,
                                   streaming, pull)
          ->Arg(tokens);
    };
    add("push_bf16", std::size_t{2} * kHidden, false);
    add("push_fp8", kHidden, false);
    add("push_opaque", kOpaqueBytes, false);
    add("pull_bf16", std::size_t{2} * kHidden, true);
  }
  for (const host::RowKernels* kernels : host::available_row_kernels()) {
    register_kernels(tokens, prefix, layout, {kernels, host::Stores::kCached});
    if (kernels != &host::kPlainRowKernels) {  // which has no streaming stores
      register_kernels(tokens, prefix, layout, {kernels, host::Stores::kStreaming});
    }
  }
}

const bool kRegistered = [] {
  for (const bool per_expert : {false, true}) {
    const std::string name = per_expert ? "/per_expert" : "/compact";
    benchmark::RegisterBenchmark(("routing" + name).c_str(), bench_routing, per_expert)->Arg(128)->Arg(4096);
    benchmark::RegisterBenchmark(("placement" + name).c_str(), bench_placement, per_expert)->Arg(4)->Arg(64);
  }
  for (const host::RowKernels* kernels : host::available_row_kernels()) {
    for (const bool pow2 : {false, true}) {
      const std::string name = std::string(pow2 ? "cast_pow2/" : "cast/") + kernels->name;
      benchmark::RegisterBenchmark(name.c_str(), bench_cast, kernels, pow2);
    }
  }
  for (const Size tokens : {8, 128, 1024, 4096}) {
    benchmark::RegisterBenchmark("memcpy", bench_memcpy)->Arg(tokens);
    for (const auto& layout : kLayouts) {
      register_world(tokens, std::to_string(tokens) + "/" + layout.name + "/", layout.layout);
    }
  }
  return true;
}();

}  // namespace
