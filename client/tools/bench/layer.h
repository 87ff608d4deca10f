// A client's work in a layer: attention, a projection and experts, as in a model like DeepSeek-V3.
#pragma once

#include "gpu_driver.h"
#include "plan.h"
#include "rank_device.h"

#include <cstdint>
#include <functional>
#include <string>

namespace epd::bench {

// C = A * B, `batch` of them: A [rows, depth], B [depth, columns], C [rows, columns], bf16 (C in float by
// epbench's own kernel).
struct Product {
  std::uint32_t rows = 0;
  std::uint32_t columns = 0;
  std::uint32_t depth = 0;
  std::uint32_t batch = 1;
  std::uint64_t stride_a = 0;  // in values; B and C lie one behind the other
  GpuAddress a = 0;
  GpuAddress b = 0;
  GpuAddress c = 0;

  std::uint64_t a_values() const { return std::uint64_t{rows} * depth * batch; }
  std::uint64_t b_values() const { return std::uint64_t{columns} * depth * batch; }
  std::uint64_t c_values() const { return std::uint64_t{rows} * columns * batch; }
};

// Runs a client's matrix products: with cuBLAS where it is installed, else with epbench's own kernel.
class GemmRunner {
 public:
  // Works in the current context. Throws kit::ToolError, as everything here. `own` asks for epbench's kernel
  // even if cuBLAS is there.
  GemmRunner(const GpuDriver& driver, const GpuImage& image, bool own = false);
  // Rows and columns are multiples of kGemmTile, the depth of kGemmDepth.
  void enqueue(const Product& product, void* stream);
  // "cuBLAS 13.0.2", "epbench's own GEMM"
  std::string name() const;

 private:
  void load_cublas();

  const GpuDriver& driver_;
  const GpuImage& image_;
  void* const own_;
  void* handle_ = nullptr;  // of cuBLAS; null: there is none, or
  std::string why_not_;
  int (*set_stream_)(void*, void*) = nullptr;
  int (*set_workspace_)(void*, void*, std::size_t) = nullptr;
  int (*multiply_)(void* handle, int op_a, int op_b, int m, int n, int k, const void* alpha, const void* a,
                   int type_a, int lda, long long stride_a, const void* b, int type_b, int ldb,
                   long long stride_b, const void* beta, void* c, int type_c, int ldc, long long stride_c,
                   int batch, int compute, int algorithm) = nullptr;
  GpuAddress workspace_ = 0;  // given back when the process ends
  int version_ = 0;
};

// A product beside operations of so many tokens, by epbench's own kernel: it takes somewhat longer than they
// do.
class Gemm {
 public:
  Gemm(const GpuRank& gpu, std::uint32_t tokens);
  ~Gemm();
  Gemm(const Gemm&) = delete;
  Gemm& operator=(const Gemm&) = delete;
  void enqueue(void* stream) { runner_.enqueue(product_, stream); }

 private:
  const GpuImage image_;
  GemmRunner runner_;
  Product product_;
};

// A client's work in a layer is attention, a projection and experts, as in a model like DeepSeek-V3.
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
