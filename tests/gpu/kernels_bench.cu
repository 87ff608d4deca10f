// Times of dispatch and combine beside what the links give in the same run. All ranks start together after a
// start barrier; a figure is the slowest rank's time between two events around the operation, fresh routing
// each time, L2 flushed. Usage: kernels_bench [full | few]
// few: layout expert and few tokens, with and without inboxes.
#include "bench/copy_kernels.cuh"
#include "gpu/launched.cuh"
#include "gpu/world.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <random>
#include <string>

namespace epd::gpu_test {
namespace {

constexpr std::uint32_t kRoutes = 8;

struct Times {
  std::vector<float> us;  // sorted
  float at(double q) const {
    return us[static_cast<std::size_t>(q * static_cast<double>(us.size() - 1) + 0.5)];
  }
};

// One stream for each device, on which everything measured runs.
class Bench {
 public:
  Bench(std::uint32_t devices, std::uint32_t iterations) : devices_(devices), iterations_(iterations) {
    EPD_CUDA(cudaHostAlloc(&opened_, 64, cudaHostAllocMapped | cudaHostAllocPortable));
    *opened_ = 0;
    lines_.count = devices;
    for (std::uint32_t d = 0; d < devices; ++d) {
      EPD_CUDA(cudaSetDevice(static_cast<int>(d)));
      EPD_CUDA(cudaMalloc(&lines_.at[d], 64 * sizeof(std::uint64_t)));
      EPD_CUDA(cudaMemset(lines_.at[d], 0, 64 * sizeof(std::uint64_t)));
      void* memory = nullptr;
      EPD_CUDA(cudaMalloc(&memory, kFlushBytes));
      flush_.push_back(memory);
      EPD_CUDA(cudaDeviceSynchronize());
    }
  }

  // prepare(i, device) is enqueued first; then measured(i, device, open), which calls open() where the start
  // barrier and the first event belong. On `streams`.
  using Enqueue = std::function<void(std::uint32_t, std::uint32_t)>;
  using Measured = std::function<void(std::uint32_t, std::uint32_t, const std::function<void()>&)>;
  Times time(const std::vector<cudaStream_t>& streams, const Enqueue& prepare, const Measured& measured) {
    const std::uint32_t warm = 3;
    std::vector<cudaEvent_t> events(std::size_t{2} * devices_ * (iterations_ + warm));
    for (std::uint32_t i = 0; i < iterations_ + warm; ++i) {
      ++times_;
      for (std::uint32_t d = 0; d < devices_; ++d) {
        EPD_CUDA(cudaSetDevice(static_cast<int>(d)));
        if (prepare) prepare(i, d);
        EPD_CUDA(cudaMemsetAsync(flush_[d], static_cast<int>(i), kFlushBytes, streams[d]));
        cudaEvent_t* const pair = &events[std::size_t{2} * (i * devices_ + d)];
        for (int e = 0; e < 2; ++e) EPD_CUDA(cudaEventCreate(&pair[e]));
        measured(i, d, [&] {
          start_barrier_kernel<<<1, kBarrierThreads, 0, streams[d]>>>(lines_, d, opened_);
          EPD_CUDA(cudaEventRecord(pair[0], streams[d]));
        });
        EPD_CUDA(cudaEventRecord(pair[1], streams[d]));
      }
    }
    *reinterpret_cast<volatile std::uint64_t*>(opened_) = times_;  // all is queued: the devices may start
    for (std::uint32_t d = 0; d < devices_; ++d) {
      EPD_CUDA(cudaSetDevice(static_cast<int>(d)));
      EPD_CUDA(cudaStreamSynchronize(streams[d]));
      EPD_CUDA(cudaGetLastError());
    }
    return slowest(events, warm);
  }

 private:
  static constexpr std::size_t kFlushBytes = 128u << 20;

  Times slowest(std::vector<cudaEvent_t>& events, std::uint32_t warm) const {
    Times times;
    for (std::uint32_t i = 0; i < iterations_ + warm; ++i) {
      float most = 0;
      for (std::uint32_t d = 0; d < devices_; ++d) {
        cudaEvent_t* const pair = &events[std::size_t{2} * (i * devices_ + d)];
        float ms = 0;
        EPD_CUDA(cudaEventElapsedTime(&ms, pair[0], pair[1]));
        most = std::max(most, ms * 1000);
        for (int e = 0; e < 2; ++e) EPD_CUDA(cudaEventDestroy(pair[e]));
      }
      if (i >= warm) times.us.push_back(most);
    }
    std::sort(times.us.begin(), times.us.end());
    return times;
  }

  std::uint32_t devices_;
  std::uint32_t iterations_;
  std::uint64_t* opened_ = nullptr;  // how often, to all devices
  std::uint64_t times_ = 0;
  BarrierLines lines_{};
  std::vector<void*> flush_;
};

// Buffers and streams of the ceilings.
class Ceilings {
 public:
  Ceilings(std::uint32_t devices, Bench& bench) : devices_(devices), bench_(bench) {
    for (std::uint32_t d = 0; d < devices; ++d) {
      EPD_CUDA(cudaSetDevice(static_cast<int>(d)));
      cudaStream_t stream = nullptr;
      EPD_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
      streams_.push_back(stream);
      std::uint8_t* memory = nullptr;
      EPD_CUDA(cudaMalloc(&memory, std::size_t{kRows} * kProbeRow * (devices + 1)));
      memory_.push_back(memory);
      const int bytes = static_cast<int>(kProbeShared);
      EPD_CUDA(cudaFuncSetAttribute(push_probe, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
      EPD_CUDA(cudaFuncSetAttribute(pull_probe, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
      EPD_CUDA(cudaDeviceSynchronize());
    }
  }

  void measure(bool full) {
    std::printf("-- ceilings, GB/s per GPU (p50)\n");
    best_push_ = best_pull_ = 1;
    for (const std::uint32_t sms : {8u, 24u, 64u}) {
      const double pushed = rate([&](std::uint32_t d) { push(d, sms, peers(d, false)); }, devices_ - 1);
      const double pulled = rate([&](std::uint32_t d) { pull(d, sms, kPullPiece); }, devices_ - 1);
      const double both = rate([&](std::uint32_t d) { push(d, sms, peers(d, true)); }, devices_);
      std::printf("   %2u SMs: push %.0f  pull %.0f  push to peers and self %.0f\n", sms, pushed, pulled,
                  both);
      best_push_ = std::max(best_push_, pushed);
      best_pull_ = std::max(best_pull_, pulled);
    }
    const double engine = rate([&](std::uint32_t d) { copy_engine(d); }, devices_ - 1);
    std::printf("   copy engine, all to all: %.0f\n", engine);
    if (!full) return;
    for (const std::uint32_t sms : {1u, 2u, 8u, 24u}) {
      const auto own = [&](std::uint32_t d) { return ProbeTargets{{memory_[d]}, 1, kRows}; };
      const double bulk = rate([&](std::uint32_t d) { push(d, sms, own(d)); }, 1);
      const double plain = rate([&](std::uint32_t d) { plain_push(d, sms, own(d)); }, 1);
      const double plain_peers =
          rate([&](std::uint32_t d) { plain_push(d, sms, peers(d, false)); }, devices_ - 1);
      const double pull_small = rate([&](std::uint32_t d) { pull(d, sms, 14336 / 8); }, devices_ - 1);
      std::printf("   %2u SMs: own memory bulk %.0f plain %.0f; peers plain %.0f; pull of 1792 bytes %.0f\n",
                  sms, bulk, plain, plain_peers, pull_small);
    }
  }
  double push_rate() const { return best_push_; }
  double pull_rate() const { return best_pull_; }
  Times empty() {
    return bench_.time(streams_, nullptr, [](std::uint32_t, std::uint32_t, const auto& open) { open(); });
  }

 private:
  static constexpr std::uint32_t kRows = 4096;

  ProbeTargets peers(std::uint32_t d, bool self) const {
    ProbeTargets targets{};
    targets.rows_each = kRows;
    for (std::uint32_t i = self ? 0 : 1; i < devices_; ++i) {
      const std::uint32_t to = (d + i) % devices_;
      targets.at[targets.count++] = memory_[to] + std::size_t{kRows} * kProbeRow * d;
    }
    return targets;
  }
  void push(std::uint32_t d, std::uint32_t sms, const ProbeTargets& targets) {
    push_probe<<<sms, kProbeThreads, kProbeShared, streams_[d]>>>(targets);
  }
  void plain_push(std::uint32_t d, std::uint32_t sms, const ProbeTargets& targets) {
    push_plain_probe<<<sms, kProbeThreads, 0, streams_[d]>>>(targets);
  }
  void pull(std::uint32_t d, std::uint32_t sms, std::uint32_t piece) {
    pull_probe<<<sms, kProbeThreads, kProbeShared, streams_[d]>>>(peers(d, false), piece);
  }
  void copy_engine(std::uint32_t d) {
    for (std::uint32_t i = 1; i < devices_; ++i) {
      const std::uint32_t to = (d + i) % devices_;
      EPD_CUDA(cudaMemcpyPeerAsync(memory_[to] + std::size_t{kRows} * kProbeRow * d, static_cast<int>(to),
                                   memory_[d] + std::size_t{kRows} * kProbeRow * devices_,
                                   static_cast<int>(d), std::size_t{kRows} * kProbeRow, streams_[d]));
    }
  }
  double rate(const std::function<void(std::uint32_t)>& run, std::uint32_t targets) {
    if (targets == 0) return 1;
    const Times times = bench_.time(streams_, nullptr, [&](std::uint32_t, std::uint32_t d, const auto& open) {
      open();
      run(d);
    });
    return 1e-3 * kRows * kProbeRow * targets / times.at(0.5);
  }

  std::uint32_t devices_;
  Bench& bench_;
  std::vector<cudaStream_t> streams_;
  std::vector<std::uint8_t*> memory_;
  double best_push_ = 1;
  double best_pull_ = 1;
};

struct Setup {
  const char* name;
  bool per_expert;
  bool cast;
  std::uint32_t tokens;
  bool zipf = false;
  bool inbox = false;
};

// A group with inputs in place and routings to choose from.
class Group {
 public:
  Group(const Setup& setup, std::uint32_t ranks, Bench& bench) : setup_(setup), bench_(bench), random_(7) {
    kernels::Shape s;
    s.num_ranks = ranks;
    s.num_experts = 256;
    s.topk = 8;
    s.hidden = 7168;
    s.per_expert = s.expert_blocks = setup.per_expert;
    s.index64 = true;
    s.expert_capacity = std::uint64_t{ranks} * setup.tokens;
    s.recv_rows = setup.per_expert ? 256 / ranks * s.expert_capacity : s.expert_capacity;
    s.format = {setup.cast, kernels::ScaleFormat::kFloat32, 7168,
                14336,      setup.cast ? 7168u : 14336u,    setup.cast ? 224u : 0u};
    world_ =
        std::make_unique<World>(WorldShape{s, setup.tokens, {}, setup.inbox, 2, false, launch_operation});
    for (std::uint32_t r = 0; r < ranks; ++r) make_inputs(r);
  }

  // p50, p99 in us and the share of the ceiling.
  void report(Kind kind, std::uint32_t sms, std::uint32_t stages, double ceiling) {
    std::vector<cudaStream_t> streams;
    for (std::uint32_t r = 0; r < world_->size(); ++r) streams.push_back(world_->rank(r).stream);
    const std::uint64_t first = tag_;
    const auto dispatch = [&](std::uint32_t i, std::uint32_t r, const std::function<void()>& open) {
      Operation op = world_->operation(r, first + (kind == Kind::kDispatch ? i : 2 * i) + 1, 1);
      op.topk_idx = routes_[r] + std::size_t{i % kRoutes} * setup_.tokens * 8;
      op.topk_weights = world_->rank(r).topk_weights;
      world_->start(Kind::kDispatch, op, sms, kind == Kind::kDispatch ? stages : 1, open);
    };
    const auto combine = [&](std::uint32_t i, std::uint32_t r, const std::function<void()>& open) {
      Operation op = world_->operation(r, first + 2 * i + 2, 2);
      op.topk_weights = world_->rank(r).topk_weights;
      world_->start(Kind::kCombine, op, sms, stages, open);
    };
    const auto dispatch_before = [&](std::uint32_t i, std::uint32_t r) { dispatch(i, r, nullptr); };
    const Times times = kind == Kind::kDispatch ? bench_.time(streams, nullptr, dispatch)
                                                : bench_.time(streams, dispatch_before, combine);
    tag_ += 1000;
    for (std::uint32_t r = 0; r < world_->size(); ++r) {
      const OpResult result = world_->result(r);
      if (result.error != kernels::OpError::kNone) {
        std::printf("   rank %u failed: error %u failed_rank %d\n", r, static_cast<unsigned>(result.error),
                    result.failed_rank);
        std::exit(1);
      }
    }
    const kernels::RowFormat& f = world_->shape().format;
    const double row = kind == Kind::kDispatch ? f.row_bytes + f.scale_bytes : 14336.0;
    const double wire = remote_rows_ * row;
    const double rate = 1e-3 * wire / times.at(0.5);
    std::printf(
        "   %-8s %-26s %3u SMs x%u: p50 %7.1f us  p99 %7.1f  wire %6.1f MB  %4.0f GB/s  %3.0f%% of ceiling\n",
        kind == Kind::kDispatch ? "dispatch" : "combine", setup_.name, sms, stages, times.at(0.5),
        times.at(0.99), wire * 1e-6, rate, 100 * rate / ceiling);
    std::fflush(stdout);
  }

 private:
  std::int64_t draw() {
    if (!setup_.zipf) return static_cast<std::int64_t>(random_() % 256);
    const double u = static_cast<double>(random_() % 1000000) / 1000000.0;
    return static_cast<std::int64_t>(std::pow(257.0, u)) - 1;  // density falls as 1 / expert
  }

  // Distinct choices; counts rows that leave the rank.
  void make_inputs(std::uint32_t r) {
    std::vector<std::int64_t> choices;
    double remote = 0;
    for (std::uint32_t t = 0; t < kRoutes * setup_.tokens; ++t) {
      std::vector<std::int64_t> token;
      while (token.size() < 8) {
        const std::int64_t e = draw();
        if (std::find(token.begin(), token.end(), e) == token.end()) token.push_back(e);
      }
      std::vector<bool> sent(256, false);
      for (const std::int64_t e : token) {
        const auto rank = static_cast<std::uint32_t>(e) / (256 / world_->size());
        const bool every_row = setup_.per_expert && !setup_.inbox;
        const std::size_t key = every_row ? static_cast<std::size_t>(e) : rank;
        if (rank != r && !sent[key]) ++remote;
        sent[key] = true;
      }
      choices.insert(choices.end(), token.begin(), token.end());
    }
    remote_rows_ = std::max(remote_rows_, remote / kRoutes);
    Rank& rank = world_->rank(r);
    rank.num_tokens = setup_.tokens;
    EPD_CUDA(cudaSetDevice(rank.device));
    std::int64_t* memory = nullptr;
    EPD_CUDA(cudaMalloc(&memory, choices.size() * 8));
    routes_.push_back(memory);
    EPD_CUDA(cudaMemcpy(memory, choices.data(), choices.size() * 8, cudaMemcpyDefault));
    std::vector<std::uint16_t> row(std::size_t{setup_.tokens} * 7168);
    for (auto& value : row) value = static_cast<std::uint16_t>((random_() & 0x80ff) | 0x3f00);
    EPD_CUDA(cudaMemcpy(rank.x, row.data(), row.size() * 2, cudaMemcpyDefault));
    const std::vector<float> weights(std::size_t{setup_.tokens} * 8, 0.125f);
    EPD_CUDA(cudaMemcpy(rank.topk_weights, weights.data(), weights.size() * 4, cudaMemcpyDefault));
    for (std::size_t at = 0; at + row.size() <= world_->shape().recv_rows * 7168; at += row.size()) {
      EPD_CUDA(cudaMemcpy(rank.y + at, row.data(), row.size() * 2, cudaMemcpyDefault));
    }
    EPD_CUDA(cudaDeviceSynchronize());
  }

  Setup setup_;
  Bench& bench_;
  std::mt19937_64 random_;
  std::unique_ptr<World> world_;
  std::vector<std::int64_t*> routes_;
  double remote_rows_ = 0;
  std::uint64_t tag_ = 0;
};

// Layout expert, few tokens.
void run_few(std::uint32_t devices, Bench& bench, double push, double pull) {
  for (const std::uint32_t tokens : {1u, 16u, 64u, 128u, 512u}) {
    for (const bool inbox : {false, true}) {
      for (const bool cast : {true, false}) {
        char name[64];
        std::snprintf(name, sizeof(name), "expert %s %u%s", cast ? "fp8-cast" : "bf16", tokens,
                      inbox ? " inbox" : "");
        Group group({name, true, cast, tokens, false, inbox}, devices, bench);
        for (const std::uint32_t sms : {16u, 24u, 32u}) {
          group.report(Kind::kDispatch, sms, 1, push);
          if (!cast) group.report(Kind::kCombine, sms, 2, inbox ? push : pull);
        }
      }
    }
  }
}

int run(int argc, char** argv) {
  const bool few = argc > 1 && std::string(argv[1]) == "few";
  const bool full = argc > 1 && std::string(argv[1]) == "full";
  enable_peers();
  const auto devices = static_cast<std::uint32_t>(num_devices());
  Bench bench(devices, 40);
  Ceilings ceilings(devices, bench);
  ceilings.measure(full);
  std::printf("   an empty pair of events: %.1f us\n", ceilings.empty().at(0.5));
  const double push = ceilings.push_rate();
  const double pull = ceilings.pull_rate();
  if (few) {
    run_few(devices, bench, push, pull);
    return 0;
  }
  {
    Group fp8({"compact fp8-cast 4096", false, true, 4096}, devices, bench);
    for (const std::uint32_t sms : {24u, 16u, 8u}) fp8.report(Kind::kDispatch, sms, 1, push);
  }
  {
    Group bf16({"compact bf16 4096", false, false, 4096}, devices, bench);
    for (const std::uint32_t sms : {24u, 16u, 8u}) bf16.report(Kind::kDispatch, sms, 1, push);
    for (const std::uint32_t sms : {24u, 16u, 8u}) bf16.report(Kind::kCombine, sms, 2, pull);
  }
  {
    Group expert({"expert fp8-cast 128", true, true, 128}, devices, bench);
    for (const std::uint32_t sms : {16u, 24u, 32u, 64u, 128u}) {
      expert.report(Kind::kDispatch, sms, 1, push);
      expert.report(Kind::kCombine, sms, 2, pull);
    }
  }
  if (!full) return 0;
  Group zipf({"compact bf16 4096 zipf", false, false, 4096, true}, devices, bench);
  zipf.report(Kind::kDispatch, 24, 1, push);
  zipf.report(Kind::kCombine, 24, 2, pull);
  Group large({"compact bf16 8192", false, false, 8192}, devices, bench);
  large.report(Kind::kDispatch, 24, 1, push);
  large.report(Kind::kCombine, 24, 2, pull);
  return 0;
}

}  // namespace
}  // namespace epd::gpu_test

int main(int argc, char** argv) {
  return epd::gpu_test::run(argc, argv);
}
