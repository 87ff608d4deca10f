#include "operation_report.h"

#include "bench/kernel_arguments.h"
#include "gpu_driver.h"
#include "kernels/routing.h"
#include "kit/ceiling.h"
#include "kit/error.h"
#include "kit/report.h"
#include "kit/team.h"
#include "rank_device.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <set>

namespace epd::bench {
namespace {

using gpu_test::BarrierLines;
using gpu_test::kProbeRow;
using gpu_test::ProbeTargets;

constexpr std::chrono::seconds kLimit{90};
constexpr std::uint32_t kWarmup = 3;
constexpr std::uint32_t kRounds = 15;
constexpr std::size_t kGateBytes = gpu_test::kMaxProbeTargets * sizeof(std::uint64_t);

// Values from cuda.h.
constexpr int kPeerAccessAlreadyEnabled = 704;
constexpr int kMaxDynamicShared = 8;
constexpr unsigned kHostPortableMapped = 3;

// All GPUs in one process: they start together behind a start barrier, each with all that it is to do already
// queued. Memory is given back when the process ends.
class Probe {
 public:
  // `segment`: bytes of each GPU from each other one.
  Probe(std::uint32_t gpus, std::size_t segment) : segment_(segment) {
    find(set_attribute_, "cuKernelSetAttribute");
    find(allocate_host_, "cuMemHostAlloc");
    find(enable_peer_, "cuCtxEnablePeerAccess");
    find(copy_peer_, "cuMemcpyPeerAsync");
    void* memory = nullptr;
    for (std::uint32_t i = 0; i < gpus; ++i) add_gpu(i);
    join_peers();
    check(allocate_host_(&memory, sizeof(*opened_), kHostPortableMapped), "cuMemHostAlloc");
    opened_ = static_cast<std::uint64_t*>(memory);
    *opened_ = 0;
  }

  // The rate of the first `gpus` GPUs when each sends about `bytes` to all others together, with `ctas` CTAs.
  double push(std::uint32_t gpus, std::uint64_t bytes, std::uint32_t ctas) {
    return rate(gpus, bytes, [&](std::uint32_t i, std::uint32_t rows) {
      ProbeTargets targets = peers(i, gpus, rows);
      void* arguments[] = {&targets};
      launch(push_, i, ctas, arguments);
    });
  }
  double pull(std::uint32_t gpus, std::uint64_t bytes, std::uint32_t ctas) {
    return rate(gpus, bytes, [&](std::uint32_t i, std::uint32_t rows) {
      ProbeTargets targets = peers(i, gpus, rows);
      std::uint32_t piece = gpu_test::kPullPiece;
      void* arguments[] = {&targets, &piece};
      launch(pull_, i, ctas, arguments);
    });
  }
  double copy_engine(std::uint32_t gpus, std::uint64_t bytes) {
    return rate(gpus, bytes, [&](std::uint32_t i, std::uint32_t rows) {
      for (std::uint32_t next = 1; next < gpus; ++next) {
        const std::uint32_t to = (i + next) % gpus;
        check(copy_peer_(segment_of(to, i), gpus_[to].rank->context(), segment_of(i, gpus_.size()),
                         gpus_[i].rank->context(), std::size_t{rows} * kProbeRow, gpus_[i].rank->stream()),
              "cuMemcpyPeerAsync");
      }
    });
  }

 private:
  using Enqueue = std::function<void(std::uint32_t gpu, std::uint32_t rows)>;
  struct Gpu {
    std::unique_ptr<GpuRank> rank;
    GpuAddress memory = 0;  // a segment for each GPU, and one that copies come from
    GpuAddress start_barrier = 0;
  };

  template <typename Function>
  void find(Function& function, const char* symbol) const {
    function = reinterpret_cast<Function>(driver_.find(symbol));
    if (function == nullptr) kit::fail(std::string("the driver has no ") + symbol);
  }
  void check(int result, const char* what) const { driver_.require(result, what); }
  GpuAddress segment_of(std::uint32_t gpu, std::size_t source) const {
    return gpus_[gpu].memory + source * segment_;
  }

  void add_gpu(std::uint32_t ordinal) {
    Gpu& gpu = gpus_.emplace_back();
    gpu.rank = std::make_unique<GpuRank>(ordinal, true);
    check(driver_.allocate(&gpu.start_barrier, kGateBytes), "cuMemAlloc");
    check(driver_.fill(gpu.start_barrier, 0, kGateBytes, gpu.rank->stream()), "cuMemsetD8Async");
    for (void* const kernel : {push_, pull_}) {
      check(set_attribute_(kMaxDynamicShared, gpu_test::kProbeShared, kernel, gpu.rank->device()),
            "the ceiling's kernels need more shared memory than there is");
    }
  }

  void join_peers() {
    const std::size_t bytes = segment_ * (gpus_.size() + 1);
    for (std::size_t i = 0; i < gpus_.size(); ++i) {
      gpus_[i].rank->use();
      check(driver_.allocate(&gpus_[i].memory, bytes), "cuMemAlloc");
      check(driver_.fill(gpus_[i].memory, 1, bytes, gpus_[i].rank->stream()), "cuMemsetD8Async");
      for (std::size_t peer = 0; peer < gpus_.size(); ++peer) {
        const int result = peer == i ? 0 : enable_peer_(gpus_[peer].rank->context(), 0);
        if (result != kPeerAccessAlreadyEnabled) check(result, "cuCtxEnablePeerAccess");
      }
      gpus_[i].rank->settle();
    }
  }

  ProbeTargets peers(std::uint32_t i, std::uint32_t gpus, std::uint32_t rows) const {
    ProbeTargets targets{};
    targets.rows_each = rows;
    for (std::uint32_t next = 1; next < gpus; ++next) {
      const GpuAddress at = segment_of((i + next) % gpus, i);
      targets.at[targets.count++] = reinterpret_cast<std::uint8_t*>(static_cast<std::uintptr_t>(at));
    }
    return targets;
  }

  void launch(void* kernel, std::uint32_t i, std::uint32_t ctas, void** arguments) const {
    image_.launch(
        kernel,
        {.ctas = {ctas, 1}, .threads = gpu_test::kProbeThreads, .shared_bytes = gpu_test::kProbeShared},
        gpus_[i].rank->stream(), arguments);
  }

  // For all GPUs, because each counts its own waits.
  void close_gate(std::uint32_t i) {
    BarrierLines lines{};
    lines.count = static_cast<std::uint32_t>(gpus_.size());
    for (std::uint32_t g = 0; g < lines.count; ++g)
      lines.at[g] = reinterpret_cast<std::uint64_t*>(static_cast<std::uintptr_t>(gpus_[g].start_barrier));
    void* arguments[] = {&lines, &i, &opened_};
    image_.launch(start_barrier_, {.threads = gpu_test::kBarrierThreads}, gpus_[i].rank->stream(), arguments);
  }

  // The slowest GPU's time of one round, us.
  double round_us(std::uint32_t gpus, const std::function<void(std::uint32_t gpu)>& enqueue) {
    for (std::uint32_t i = 0; i < gpus_.size(); ++i) {
      GpuRank& gpu = *gpus_[i].rank;
      gpu.use();
      if (i < gpus) gpu.flush_cache();
      close_gate(i);
      if (i >= gpus) continue;
      gpu.record_begin();
      enqueue(i);
      gpu.record_end();
    }
    std::atomic_ref(*opened_).store(++times_,
                                    std::memory_order_release);  // all is queued: the devices may start
    double most = 0;
    for (std::uint32_t i = 0; i < gpus; ++i) {
      gpus_[i].rank->use();
      most = std::max(most, gpus_[i].rank->elapsed_us());
    }
    return most;
  }

  double rate(std::uint32_t gpus, std::uint64_t bytes, const Enqueue& enqueue) {
    const std::uint64_t each = (bytes / (gpus - 1) + kProbeRow - 1) / kProbeRow;
    const auto rows = static_cast<std::uint32_t>(std::clamp<std::uint64_t>(each, 1, segment_ / kProbeRow));
    std::vector<double> times;
    for (std::size_t round = 0; round < kWarmup + kRounds; ++round) {
      const double us = round_us(gpus, [&](std::uint32_t i) { enqueue(i, rows); });
      if (round >= kWarmup) times.push_back(us);
    }
    return 1e-3 * rows * kProbeRow * (gpus - 1) / kit::quantile(times, 0.5);
  }

  const GpuDriver& driver_ = gpu_driver();
  const GpuImage image_{driver_};
  int (*set_attribute_)(int, int, void*, int) = nullptr;
  int (*enable_peer_)(void*, unsigned) = nullptr;
  int (*copy_peer_)(GpuAddress, void*, GpuAddress, void*, std::size_t, void*) = nullptr;
  int (*allocate_host_)(void**, std::size_t, unsigned) = nullptr;
  void* const push_ = image_.kernel("push_probe");
  void* const pull_ = image_.kernel("pull_probe");
  void* const start_barrier_ = image_.kernel("start_barrier_kernel");
  std::vector<Gpu> gpus_;
  std::size_t segment_ = 0;
  std::uint64_t* opened_ = nullptr;  // gates, to all GPUs
  std::uint64_t times_ = 0;
};

struct WireBytes {
  std::uint64_t push = 0;
  std::uint64_t pull = 0;
};

// The bytes of the busiest rank in the first iteration.
WireBytes wire_bytes(const RunPlan& plan) {
  const kit::RoutingSource source(plan.routing_spec());
  std::uint64_t rows = 0;
  for (std::uint32_t rank = 0; rank < plan.ranks; ++rank) {
    std::vector<std::int32_t> idx(std::size_t{plan.tokens} * plan.topk);
    std::vector<float> weights(idx.size());
    source.fill({rank, plan.ranks, plan.tokens, 0}, idx.data(), weights.data());
    kernels::RoutingInput input;
    input.topk_idx = idx.data();
    input.per_expert = plan.layout != EPD_LAYOUT_COMPACT;
    input.num_tokens = plan.tokens;
    input.topk = plan.topk;
    input.num_ranks = plan.ranks;
    input.num_experts = plan.experts;
    kernels::RoutingPlan route;
    if (kernels::build_routing_plan(input, route).bad)
      kit::fail("the routing chose an expert that is not there");
    const std::uint32_t targets = kit::targets_per_rank(plan.params());
    const auto leaves = [&](const kernels::RouteEntry& entry) { return entry.target / targets != rank; };
    rows = std::max<std::uint64_t>(
        rows, static_cast<std::uint64_t>(std::count_if(route.entries.begin(), route.entries.end(), leaves)));
  }
  return {rows * kit::dispatch_row_bytes(plan.params()), rows * kit::combine_row_bytes(plan.hidden)};
}

std::string unfit(const RunPlan& plan) {
  if (plan.operation == Operation::kNoop || plan.ranks == 1) return "nothing crosses the links";
  if (plan.gpus < plan.ranks) return "ranks share GPUs";
  if (plan.ranks > gpu_test::kMaxProbeTargets) return "measured for up to 8 GPUs";
  return "";
}

// In shared memory: what the child found for one plan.
struct Found {
  double push, pull, copy_engine;
};
struct Failure {
  char text[256];
};

void measure(const std::vector<RunPlan>& plans, const kit::SharedArray<Found>& found) {
  std::uint32_t gpus = 0;
  std::vector<WireBytes> bytes(plans.size());
  std::uint64_t segment = kProbeRow;
  for (std::size_t i = 0; i < plans.size(); ++i) {
    if (!unfit(plans[i]).empty()) continue;
    gpus = std::max(gpus, plans[i].ranks);
    bytes[i] = wire_bytes(plans[i]);
    segment = std::max(segment, std::max(bytes[i].push, bytes[i].pull) / (plans[i].ranks - 1) + kProbeRow);
  }
  Probe probe(gpus, (segment + kProbeRow - 1) / kProbeRow * kProbeRow);
  for (std::size_t i = 0; i < plans.size(); ++i) {
    if (!unfit(plans[i]).empty()) continue;
    const std::uint32_t ranks = plans[i].ranks;
    for (const std::uint32_t ctas : std::set<std::uint32_t>{plans[i].sms, kDefaultGpuSms}) {
      found[i].push = std::max(found[i].push, probe.push(ranks, bytes[i].push, ctas));
      found[i].pull = std::max(found[i].pull, probe.pull(ranks, bytes[i].pull, ctas));
    }
    found[i].copy_engine = probe.copy_engine(ranks, bytes[i].push);
  }
}

}  // namespace

std::vector<GpuCeiling> measure_ceilings(const std::vector<RunPlan>& plans) {
  std::vector<GpuCeiling> ceilings(plans.size());
  const bool any =
      std::any_of(plans.begin(), plans.end(), [](const RunPlan& plan) { return unfit(plan).empty(); });
  const kit::SharedArray<Found> found(plans.size());
  const kit::SharedArray<Failure> failure(1);
  const auto body = [&](kit::TeamRank&) {
    try {
      measure(plans, found);
    } catch (const kit::ToolError& error) {
      std::strncpy(failure[0].text, error.what(), sizeof(failure[0].text) - 1);
    }
  };
  try {
    kit::Team team(1);
    kit::Team::Options options;
    options.limit = kLimit;
    if (any) team.run(body, options);
  } catch (const kit::ToolError& error) {  // it was killed
    std::strncpy(failure[0].text, error.what(), sizeof(failure[0].text) - 1);
  }
  for (std::size_t i = 0; i < plans.size(); ++i) {
    ceilings[i] = {found[i].push, found[i].pull, found[i].copy_engine, unfit(plans[i])};
    if (ceilings[i].why_not.empty()) ceilings[i].why_not = failure[0].text;
  }
  return ceilings;
}

}  // namespace epd::bench
