#include "gpu_ceiling.h"

#include "bench/barrier_lines.h"
#include "bench/ceiling_kernels.h"
#include "gpu_image.h"
#include "kernels/routing.h"
#include "kit/ceiling.h"
#include "kit/error.h"
#include "kit/session.h"
#include "kit/shared_array.h"
#include "kit/statistics.h"
#include "kit/team.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <set>
#include <thread>

namespace epd::bench {
namespace {

using gpu_test::BarrierLines;
using gpu_test::kProbeRow;
using gpu_test::ProbeTargets;

constexpr std::chrono::seconds kLimit{90};
constexpr double kPatienceUs = 20e6;
constexpr std::uint32_t kWarmup = 3;
constexpr std::uint32_t kRounds = 15;
constexpr std::size_t kGateBytes = gpu_test::kMaxProbeTargets * sizeof(std::uint64_t);

// Of cuda.h.
constexpr int kNotReady = 600;
constexpr int kPeerAccessAlreadyEnabled = 704;
constexpr int kL2CacheSize = 38;
constexpr int kMaxDynamicShared = 8;
constexpr unsigned kHostPortableMapped = 3;
constexpr unsigned kStreamNonBlocking = 1;

// Functions of the driver that only this file uses.
struct ProbeDriver {
  int (*set_attribute)(int, int, void*, int) = nullptr;
  int (*enable_peer)(void*, unsigned) = nullptr;
  int (*copy_peer)(GpuAddress, void*, GpuAddress, void*, std::size_t, void*) = nullptr;
  int (*allocate_host)(void**, std::size_t, unsigned) = nullptr;

  explicit ProbeDriver(const GpuDriver& driver) {
    const auto find = [&driver](auto& function, const char* symbol) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(driver.find(symbol));
      if (function == nullptr) kit::fail(std::string("the driver has no ") + symbol);
    };
    find(set_attribute, "cuKernelSetAttribute");
    find(allocate_host, "cuMemHostAlloc");
  }
  // Not before it is known that there are kernels to launch.
  void find_copies(const GpuDriver& driver) {
    enable_peer = reinterpret_cast<decltype(enable_peer)>(driver.find("cuCtxEnablePeerAccess"));
    copy_peer = reinterpret_cast<decltype(copy_peer)>(driver.find("cuMemcpyPeerAsync"));
    if (enable_peer == nullptr || copy_peer == nullptr) kit::fail("the driver has no copies between peers");
  }
};

struct Gpu {
  int device = 0;
  void* context = nullptr;
  void* stream = nullptr;
  GpuAddress memory = 0;  // a segment for each GPU, and one that copies come from
  GpuAddress evict = 0;
  std::size_t evict_bytes = 0;
  GpuAddress start_barrier = 0;
  std::vector<void*> events;  // [rounds, 2]
};

// All GPUs in one process: they start together behind a start barrier, each with all that it is to do already
// queued.
class Probe {
 public:
  Probe(std::uint32_t gpus, std::size_t segment_bytes)
      : driver_(gpu_driver()), more_(driver_), image_(driver_) {
    more_.find_copies(driver_);
    segment_ = segment_bytes;
    for (std::uint32_t i = 0; i < gpus; ++i) add_gpu(i);
    join_peers();
    void* memory = nullptr;
    check(more_.allocate_host(&memory, 64, kHostPortableMapped), "cuMemHostAlloc");
    opened_ = static_cast<std::uint64_t*>(memory);
    *opened_ = 0;
  }

  // Of the first `gpus`, with about `bytes` to all others together. By `ctas`.
  double push(std::uint32_t gpus, std::uint64_t bytes, std::uint32_t ctas) {
    return rate(gpus, bytes, [&](std::uint32_t i, std::uint32_t rows) {
      ProbeTargets targets = peers(i, gpus, rows);
      void* arguments[] = {&targets};
      launch(push_, gpus_[i], ctas, arguments);
    });
  }
  double pull(std::uint32_t gpus, std::uint64_t bytes, std::uint32_t ctas) {
    return rate(gpus, bytes, [&](std::uint32_t i, std::uint32_t rows) {
      ProbeTargets targets = peers(i, gpus, rows);
      std::uint32_t piece = gpu_test::kPullPiece;
      void* arguments[] = {&targets, &piece};
      launch(pull_, gpus_[i], ctas, arguments);
    });
  }
  double copy_engine(std::uint32_t gpus, std::uint64_t bytes) {
    return rate(gpus, bytes, [&](std::uint32_t i, std::uint32_t rows) {
      for (std::uint32_t next = 1; next < gpus; ++next) {
        const Gpu& from = gpus_[i];
        const Gpu& to = gpus_[(i + next) % gpus];
        check(more_.copy_peer(segment_of(to, i), to.context, segment_of(from, gpus_.size()), from.context,
                              std::size_t{rows} * kProbeRow, from.stream),
              "cuMemcpyPeerAsync");
      }
    });
  }

 private:
  using Enqueue = std::function<void(std::uint32_t gpu, std::uint32_t rows)>;

  void check(int result, const char* what) const { driver_.require(result, what); }
  void use(const Gpu& gpu) const { check(driver_.set_current(gpu.context), "cuCtxSetCurrent"); }
  GpuAddress segment_of(const Gpu& gpu, std::size_t source) const { return gpu.memory + source * segment_; }

  void add_gpu(std::uint32_t ordinal) {
    Gpu& gpu = gpus_.emplace_back();
    check(driver_.device(&gpu.device, static_cast<int>(ordinal)), "cuDeviceGet");
    check(driver_.retain_primary(&gpu.context, gpu.device), "cuDevicePrimaryCtxRetain");
    use(gpu);
    check(driver_.create_stream(&gpu.stream, kStreamNonBlocking), "cuStreamCreate");
    int l2 = 0;
    check(driver_.attribute(&l2, kL2CacheSize, gpu.device), "cuDeviceGetAttribute");
    gpu.evict_bytes = 2 * static_cast<std::size_t>(l2);
    check(driver_.allocate(&gpu.evict, gpu.evict_bytes), "cuMemAlloc");
    check(driver_.allocate(&gpu.start_barrier, kGateBytes), "cuMemAlloc");
    check(driver_.fill(gpu.start_barrier, 0, kGateBytes, gpu.stream), "cuMemsetD8Async");
    for (std::uint32_t i = 0; i < 2 * (kWarmup + kRounds); ++i) {
      gpu.events.push_back(nullptr);
      check(driver_.create_event(&gpu.events.back(), 0), "cuEventCreate");
    }
    for (void* const kernel : {push_, pull_}) {
      check(more_.set_attribute(kMaxDynamicShared, gpu_test::kProbeShared, kernel, gpu.device),
            "the ceiling's kernels need more shared memory than there is");
    }
  }

  void join_peers() {
    const std::size_t bytes = segment_ * (gpus_.size() + 1);
    for (std::size_t i = 0; i < gpus_.size(); ++i) {
      use(gpus_[i]);
      check(driver_.allocate(&gpus_[i].memory, bytes), "cuMemAlloc");
      check(driver_.fill(gpus_[i].memory, 1, bytes, gpus_[i].stream), "cuMemsetD8Async");
      for (std::size_t peer = 0; peer < gpus_.size(); ++peer) {
        const int result = peer == i ? 0 : more_.enable_peer(gpus_[peer].context, 0);
        if (result != kPeerAccessAlreadyEnabled) check(result, "cuCtxEnablePeerAccess");
      }
    }
    for (const Gpu& gpu : gpus_) {
      use(gpu);
      check(driver_.record_event(gpu.events[0], gpu.stream), "cuEventRecord");
      wait_for(gpu.events[0]);
    }
  }

  ProbeTargets peers(std::uint32_t i, std::uint32_t gpus, std::uint32_t rows) const {
    ProbeTargets targets{};
    targets.rows_each = rows;
    for (std::uint32_t next = 1; next < gpus; ++next) {
      const GpuAddress at = segment_of(gpus_[(i + next) % gpus], i);
      targets.at[targets.count++] = reinterpret_cast<std::uint8_t*>(static_cast<std::uintptr_t>(at));
    }
    return targets;
  }

  void launch(void* kernel, const Gpu& gpu, std::uint32_t ctas, void** arguments) const {
    image_.launch(
        kernel,
        {.ctas = {ctas, 1}, .threads = gpu_test::kProbeThreads, .shared_bytes = gpu_test::kProbeShared},
        gpu.stream, arguments);
  }

  // For all GPUs, because each counts its own waits.
  void close_gate(std::uint32_t i) {
    BarrierLines lines{};
    lines.count = static_cast<std::uint32_t>(gpus_.size());
    for (std::uint32_t g = 0; g < lines.count; ++g)
      lines.at[g] = reinterpret_cast<std::uint64_t*>(static_cast<std::uintptr_t>(gpus_[g].start_barrier));
    void* arguments[] = {&lines, &i, &opened_};
    image_.launch(start_barrier_, {.threads = gpu_test::kBarrierThreads}, gpus_[i].stream, arguments);
  }

  double rate(std::uint32_t gpus, std::uint64_t bytes, const Enqueue& enqueue) {
    const std::uint64_t each = (bytes / (gpus - 1) + kProbeRow - 1) / kProbeRow;
    const auto rows = static_cast<std::uint32_t>(std::clamp<std::uint64_t>(each, 1, segment_ / kProbeRow));
    for (std::size_t round = 0; round < kWarmup + kRounds; ++round) {
      ++times_;
      for (std::uint32_t i = 0; i < gpus_.size(); ++i) {
        const Gpu& gpu = gpus_[i];
        use(gpu);
        if (i >= gpus) {
          close_gate(i);
          continue;
        }
        check(driver_.fill(gpu.evict, static_cast<unsigned char>(round), gpu.evict_bytes, gpu.stream),
              "cuMemsetD8Async");
        close_gate(i);
        check(driver_.record_event(gpu.events[2 * round], gpu.stream), "cuEventRecord");
        enqueue(i, rows);
        check(driver_.record_event(gpu.events[2 * round + 1], gpu.stream), "cuEventRecord");
      }
    }
    std::atomic_ref(*opened_).store(times_,
                                    std::memory_order_release);  // all is queued: the devices may start
    return 1e-3 * rows * kProbeRow * (gpus - 1) / kit::quantile(slowest_times(gpus), 0.5);
  }

  std::vector<double> slowest_times(std::uint32_t gpus) const {
    std::vector<double> times;
    for (std::size_t round = 0; round < kWarmup + kRounds; ++round) {
      double most = 0;
      for (std::uint32_t i = 0; i < gpus; ++i) {
        use(gpus_[i]);
        float milliseconds = 0;
        wait_for(gpus_[i].events[2 * round + 1]);
        check(driver_.elapsed(&milliseconds, gpus_[i].events[2 * round], gpus_[i].events[2 * round + 1]),
              "cuEventElapsedTime");
        most = std::max(most, 1e3 * static_cast<double>(milliseconds));
      }
      if (round >= kWarmup) times.push_back(most);
    }
    return times;
  }

  void wait_for(void* event) const {
    const double begin = kit::now_us();
    for (;;) {
      const int result = driver_.query_event(event);
      if (result == 0) return;
      if (result != kNotReady) check(result, "waiting for copies");
      if (kit::now_us() - begin > kPatienceUs) kit::fail("copies have not come to an end");
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
  }

  const GpuDriver& driver_;
  ProbeDriver more_;
  const GpuImage image_;
  void* const push_ = image_.kernel("push_probe");
  void* const pull_ = image_.kernel("pull_probe");
  void* const start_barrier_ = image_.kernel("start_barrier_kernel");
  std::vector<Gpu> gpus_;  // given back when the process ends
  std::size_t segment_ = 0;
  std::uint64_t* opened_ = nullptr;  // gates, to all GPUs
  std::uint64_t times_ = 0;
};

struct WireBytes {
  std::uint64_t push = 0;
  std::uint64_t pull = 0;
};

// Of the busiest rank in the first iteration.
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
