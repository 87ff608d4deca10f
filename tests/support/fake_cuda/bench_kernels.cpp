#include "fake_cuda/bench_kernels.h"

#include "fake_cuda/memory.h"

#include "bench/kernel_arguments.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <vector>

namespace epd::fake_cuda {
namespace {

template <typename T>
T parameter(void** parameters, std::size_t index) {
  T value;
  std::memcpy(&value, parameters[index], sizeof(T));
  return value;
}

using GateWord = std::uint64_t;

GateWord load(const GateWord* word) {
  return std::atomic_ref(*const_cast<GateWord*>(word)).load(std::memory_order_acquire);
}

bool reaches(const Stream& stream, const GateWord* words, std::uint32_t count) {
  return memory().accessible(stream.device().ordinal, words, count * sizeof(GateWord));
}

struct Span {
  const void* begin;
  std::size_t bytes;
};

bool reaches_all(const Stream& stream, const auto& ranges) {
  return std::all_of(ranges.begin(), ranges.end(), [&](const Span& range) {
    return memory().accessible(stream.device().ordinal, range.begin, range.bytes);
  });
}

bool fault(Stream& stream, const std::string& what) {
  return stream.fault(what + " not mapped for device " + std::to_string(stream.device().machine));
}

}  // namespace

Stream::Work gemm_kernel(const unsigned (&ctas)[3], void** parameters) {
  const std::size_t rows = std::size_t{ctas[1]} * bench::kGemmTile;
  const std::size_t columns = std::size_t{ctas[0]} * bench::kGemmTile;
  const std::size_t behind = ctas[2] - 1;  // the last product's
  const auto n = parameter<std::uint32_t>(parameters, 3);
  const auto k = parameter<std::uint32_t>(parameters, 4);
  const auto strides = parameter<bench::GemmStrides>(parameters, 5);
  const std::array<Span, 3> matrices{
      Span{parameter<const void*>(parameters, 0), (behind * strides.a + rows * k) * 2},
      Span{parameter<const void*>(parameters, 1), (behind * strides.b + std::size_t{k} * n) * 2},
      Span{parameter<const void*>(parameters, 2), (behind * strides.c + rows * n) * 4}};
  return [matrices, tiled = columns == n && k % bench::kGemmDepth == 0](Stream& stream) {
    if (tiled && reaches_all(stream, matrices)) return true;
    return fault(stream, std::string(kGemmKernel) + ": a matrix is no whole number of tiles, or");
  };
}

bool is_layer_kernel(const std::string& kernel) {
  return std::find(std::begin(kLayerKernels), std::end(kLayerKernels), kernel) != std::end(kLayerKernels);
}

Stream::Work layer_kernel(const std::string& kernel, const unsigned (&ctas)[3], void** parameters) {
  std::vector<Span> ranges{{parameter<const void*>(parameters, 0), 0}};
  if (kernel == kLayerKernels[0]) {
    ranges[0].bytes = 2 * parameter<std::uint64_t>(parameters, 1);
  } else {
    const bool decode = kernel == kLayerKernels[1];
    const std::size_t step = decode ? bench::kSplitTokens : bench::kQueries;
    const std::size_t rows = std::size_t{ctas[0]} * ctas[1] * step * bench::kHeadSize;
    const std::size_t queries = decode ? std::size_t{ctas[1]} * bench::kHeadSize : rows;
    const std::size_t sums = decode ? rows / step : rows;
    ranges = {{parameter<const void*>(parameters, 0), 2 * rows},
              {parameter<const void*>(parameters, 1), 2 * rows},
              {parameter<const void*>(parameters, 2), 2 * (decode ? queries : rows)},
              {parameter<const void*>(parameters, 3), 4 * sums}};
  }
  return [kernel, ranges](Stream& stream) {
    return reaches_all(stream, ranges) || fault(stream, kernel + ": memory");
  };
}

bool is_probe_kernel(const std::string& kernel) {
  return std::find(std::begin(kProbeKernels), std::end(kProbeKernels), kernel) != std::end(kProbeKernels);
}

Stream::Work probe_kernel(const std::string& kernel, void** parameters) {
  const auto targets = parameter<gpu_test::ProbeTargets>(parameters, 0);
  const bool pushes = kernel == kProbeKernels[0];
  return [targets, pushes, kernel](Stream& stream) {
    std::vector<std::uint8_t> own(gpu_test::kProbeRow);
    bool good = targets.count <= gpu_test::kMaxProbeTargets;
    for (std::uint32_t t = 0; good && t < targets.count; ++t) {
      const std::size_t bytes = std::size_t{targets.rows_each} * gpu_test::kProbeRow;
      good = memory().with(stream.device().ordinal, targets.at[t], bytes, [&] {
        for (std::size_t at = 0; at < bytes; at += gpu_test::kProbeRow) {
          if (pushes) std::memcpy(targets.at[t] + at, own.data(), own.size());
          if (!pushes) std::memcpy(own.data(), targets.at[t] + at, own.size());
        }
      });
    }
    return good || fault(stream, kernel + ": a row");
  };
}

Stream::Work start_barrier_kernel(void** parameters) {
  const auto lines = parameter<gpu_test::BarrierLines>(parameters, 0);
  const auto device = parameter<std::uint32_t>(parameters, 1);
  const auto* const opened = parameter<const GateWord*>(parameters, 2);
  return [lines, device, opened](Stream& stream) {
    bool good =
        lines.count <= gpu_test::kMaxBarrierDevices && device < lines.count && reaches(stream, opened, 1);
    for (std::uint32_t d = 0; good && d < lines.count; ++d) good = reaches(stream, lines.at[d], lines.count);
    if (!good) return fault(stream, std::string(kStartBarrierKernel) + ": words");
    const GateWord times = load(lines.at[device] + device) + 1;
    if (!stream.wait_until([&] { return load(opened) >= times; })) return false;
    for (std::uint32_t d = 0; d < lines.count; ++d)
      std::atomic_ref(lines.at[d][device]).store(times, std::memory_order_release);
    return stream.wait_until([&] {
      bool all = true;
      for (std::uint32_t d = 0; d < lines.count; ++d) all = all && load(lines.at[device] + d) >= times;
      return all;
    });
  };
}

}  // namespace epd::fake_cuda
