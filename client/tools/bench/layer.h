// A client's work in a layer is attention, a projection and experts, as in a model like DeepSeek-V3.
#pragma once

#include "gemm_runner.h"
#include "gpu_driver.h"
#include "plan.h"
#include "rank_device.h"

#include <cstdint>
#include <functional>
#include <string>

namespace epd::bench {

inline constexpr std::uint32_t kLayerExperts = 8;  // of each rank, and chosen by each token

class Layer {
 public:
  // Makes its memory and fills it. Throws kit::ToolError, as everything here.
  Layer(const GpuRank& gpu, const RunPlan& plan);
  ~Layer();
  Layer(const Layer&) = delete;
  Layer& operator=(const Layer&) = delete;

  // Decode: reads the keys and values of all sequences of the micro-batch. Prefill: of one sequence of
  // `tokens`, causal. Then the projection.
  void enqueue_attention(std::uint32_t micro_batch);
  // Two products for each expert, of `tokens` rows. `rows`: what dispatch delivered, [experts, tokens,
  // hidden] in layout expert, else [tokens, hidden], which all experts read.
  void enqueue_experts(const void* rows);
  std::string gemm_name() const { return runner_.name(); }
  // Memory with so many random values of bfloat16.
  GpuAddress make_random(std::uint64_t values);

 private:
  GpuAddress allocate(std::size_t bytes);
  void make_products();

  const GpuRank& gpu_;
  const RunPlan& plan_;
  const GpuDriver& driver_;
  const GpuImage image_;
  GemmRunner runner_;
  std::vector<GpuAddress> memory_;
  std::uint32_t heads_;  // of all sequences of a micro-batch
  GpuAddress queries_ = 0, keys_ = 0, values_ = 0, sums_ = 0;
  Product projection_, up_, down_;
};

// These functions enqueue the operations of a micro-batch. An operation that is begun and not ended may run
// beside what follows.
struct LayerMoves {
  using Move = std::function<void(std::uint32_t micro_batch)>;
  Move begin_dispatch, end_dispatch, begin_combine, end_combine;
};
struct LayerParts {
  std::function<void(std::uint32_t micro_batch)> attention, experts;
};

// `layers` layers. With two micro-batches one computes while the other's rows move.
void enqueue_layers(std::uint32_t layers, std::uint32_t micro_batches, const LayerParts& parts,
                    const LayerMoves& moves);

}  // namespace epd::bench
