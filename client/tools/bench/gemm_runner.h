// Runs a client's matrix products: by cuBLAS where it is installed, else by epbench's own kernel.
#pragma once

#include "gpu_driver.h"
#include "rank_device.h"

#include <cstdint>
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

class GemmRunner {
 public:
  // In the current context. Throws kit::ToolError, as everything here. `own`: epbench's kernel, whatever
  // there is.
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

}  // namespace epd::bench
