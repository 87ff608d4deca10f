// GB/s of the host kernels, one thread, against plain copies of the same bytes. H=7168, K=8, E=256, 4 ranks.
//   kernels_bench --benchmark_filter=avx512
#include "host/row_kernels.h"
#include "kernels/numbers.h"
#include "kernels/routing.h"

#include <benchmark/benchmark.h>
#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <ctime>
#include <memory>
#include <random>
#include <string>
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

// One source rank and what it touches at four destinations.
struct World {
  explicit World(std::uint32_t num_tokens)
      : tokens(num_tokens),
        choices(random_choices(num_tokens)),
        x(std::size_t{num_tokens} * kHidden * 2),
        out(std::size_t{num_tokens} * kHidden * 2) {
    std::mt19937 random(2);
    for (std::size_t i = 0; i < std::size_t{tokens} * kHidden; ++i) {
      x.as<std::uint16_t>()[i] =
          float_to_bf16(static_cast<float>(static_cast<int>(random() % 2001) - 1000) * 1e-3f);
    }
    weights.assign(choices.size(), 0.125f);
    build_routing_plan({choices.data(), false, tokens, kTopk, kRanks, kExperts}, plan);
    for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
      rows.push_back(std::make_unique<Region>(std::size_t{tokens} * kHidden * 2));
      std::memcpy(rows[rank]->as<char>(), x.as<char>(), std::size_t{tokens} * kHidden * 2);
      metadata.push_back(std::make_unique<Region>(std::size_t{tokens} * (kBlocks * 4 + kTopk * 8 + 8)));
      char* place = metadata[rank]->as<char>();
      DispatchTarget target;
      target.recv_x = rows[rank]->as<void>();
      target.recv_scales = reinterpret_cast<float*>(place);
      target.recv_topk_idx = place + std::size_t{tokens} * kBlocks * 4;
      target.recv_topk_weights =
          reinterpret_cast<float*>(place + std::size_t{tokens} * (kBlocks * 4 + kTopk * 4));
      target.recv_src =
          reinterpret_cast<std::int32_t*>(place + std::size_t{tokens} * (kBlocks * 4 + kTopk * 8));
      targets.push_back(target);
      sources.push_back({rows[rank]->as<std::uint16_t>(), 0});
    }
  }

  DispatchArgs dispatch_args(bool fp8) const {
    return {&plan,   x.as<std::uint16_t>(), weights.data(),    targets, 0,
            kHidden, std::uint32_t{kTopk},  kExperts / kRanks, fp8,     false};
  }
  CombineArgs combine_args(bool weighted) const {
    return {&plan, sources,          weighted ? weights.data() : nullptr, out.as<std::uint16_t>(), kHidden,
            kTopk, kExperts / kRanks};
  }

  std::uint32_t tokens;
  std::vector<std::int32_t> choices;
  std::vector<float> weights;
  Region x;
  Region out;
  std::vector<std::unique_ptr<Region>> rows;
  std::vector<std::unique_ptr<Region>> metadata;
  RoutingPlan plan;
  std::vector<DispatchTarget> targets;
  std::vector<CombineSource> sources;
};

void count_bytes(benchmark::State& state, std::size_t rows, std::size_t row_bytes) {
  state.SetBytesProcessed(static_cast<std::int64_t>(state.iterations() * rows * row_bytes));
}

void bench_dispatch(benchmark::State& state, host::Choice choice, bool fp8) {
  const World world(static_cast<std::uint32_t>(state.range(0)));
  for (auto _ : state) host::dispatch_rows_with(choice, world.dispatch_args(fp8), 0, world.tokens);
  count_bytes(state, world.plan.entries.size(), fp8 ? kHidden + 4 * kBlocks : std::size_t{2} * kHidden);
}

void bench_combine(benchmark::State& state, host::Choice choice, bool weighted) {
  const World world(static_cast<std::uint32_t>(state.range(0)));
  for (auto _ : state) host::combine_rows_with(choice, world.combine_args(weighted), 0, world.tokens);
  count_bytes(state, world.plan.entries.size(), std::size_t{2} * kHidden);
}

// What dispatch would take if nothing but memcpy of the same rows to the same places were done.
void bench_plain_rows(benchmark::State& state, bool fp8) {
  const World world(static_cast<std::uint32_t>(state.range(0)));
  const std::size_t row_bytes = fp8 ? kHidden : 2 * kHidden;
  for (auto _ : state) {
    for (std::uint32_t token = 0; token < world.tokens; ++token) {
      for (std::uint32_t i = world.plan.begin[token]; i < world.plan.begin[token + 1]; ++i) {
        const RouteEntry& entry = world.plan.entries[i];
        std::memcpy(world.rows[entry.rank]->as<char>() + entry.position * row_bytes,
                    world.x.as<char>() + token * row_bytes, row_bytes);
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
    std::uint64_t sum = 0;
    for (std::size_t i = 0; i < world.plan.rank_counts[rank] * (std::size_t{kHidden} * 2 / sizeof(*words));
         ++i)
      sum += words[i];
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
  const World world(static_cast<std::uint32_t>(state.range(0)));
  const double bytes = static_cast<double>(world.plan.entries.size()) * kHidden * 2;
  double read_seconds = 0;
  for (auto _ : state) {
    const double start = thread_cpu_seconds();
    host::dispatch_rows_with(choice, world.dispatch_args(false), 0, world.tokens);
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
  const World world(static_cast<std::uint32_t>(state.range(0)));
  const std::size_t bytes = std::size_t{world.tokens} * kHidden * 2;
  for (auto _ : state) {
    std::memcpy(world.rows[0]->as<char>(), world.x.as<char>(), bytes);
    benchmark::ClobberMemory();
  }
  count_bytes(state, 1, bytes);
}

void bench_routing(benchmark::State& state) {
  const auto tokens = static_cast<std::uint32_t>(state.range(0));
  const std::vector<std::int32_t> choices = random_choices(tokens);
  RoutingPlan plan;
  for (auto _ : state) {
    benchmark::DoNotOptimize(
        build_routing_plan({choices.data(), false, tokens, kTopk, kRanks, kExperts}, plan));
  }
}

// The cast alone, rows in the nearest cache.
void bench_cast(benchmark::State& state, const host::RowKernels* kernels) {
  const World world(1);
  std::vector<std::uint8_t> q(kHidden);
  void* const destination = q.data();
  std::vector<float> scales(kBlocks);
  for (auto _ : state) {
    kernels->cast_row(world.x.as<std::uint16_t>(), kHidden, {&destination, 1}, scales.data(),
                      host::Stores::kCached);
    benchmark::ClobberMemory();
  }
  count_bytes(state, 1, std::size_t{2} * kHidden);
}

const bool kRegistered = [] {
  const auto sizes = [](benchmark::internal::Benchmark* bench) { bench->Arg(128)->Arg(1024)->Arg(4096); };
  sizes(benchmark::RegisterBenchmark("memcpy", bench_memcpy));
  sizes(benchmark::RegisterBenchmark("plain_rows/bf16", bench_plain_rows, false));
  sizes(benchmark::RegisterBenchmark("plain_rows/fp8", bench_plain_rows, true));
  benchmark::RegisterBenchmark("routing", bench_routing)->Arg(128)->Arg(4096);
  for (const host::RowKernels* kernels : host::available_row_kernels()) {
    benchmark::RegisterBenchmark((std::string("cast/") + kernels->name).c_str(), bench_cast, kernels);
    for (const host::Stores stores : {host::Stores::kCached, host::Stores::kStreaming}) {
      if (kernels == &host::kPlainRowKernels && stores == host::Stores::kStreaming) continue;  // has none
      const host::Choice choice{kernels, stores};
      const std::string way =
          std::string("/") + kernels->name + (stores == host::Stores::kCached ? "/cached" : "/streaming");
      sizes(benchmark::RegisterBenchmark(("dispatch_bf16" + way).c_str(), bench_dispatch, choice, false));
      sizes(benchmark::RegisterBenchmark(("handover_bf16" + way).c_str(), bench_handover, choice)
                ->UseManualTime());
      sizes(benchmark::RegisterBenchmark(("dispatch_fp8" + way).c_str(), bench_dispatch, choice, true));
      sizes(benchmark::RegisterBenchmark(("combine" + way).c_str(), bench_combine, choice, false));
      sizes(benchmark::RegisterBenchmark(("combine_weighted" + way).c_str(), bench_combine, choice, true));
    }
  }
  return true;
}();

}  // namespace
