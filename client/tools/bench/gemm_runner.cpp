#include "gemm_runner.h"

#include "bench/kernel_arguments.h"
#include "kit/error.h"

#include <dlfcn.h>
#include <type_traits>

namespace epd::bench {
namespace {

constexpr char kLibrary[] = "libcublas.so.13";

// These values are from cublas_api.h and library_types.h.
constexpr int kNoTranspose = 0;
constexpr int kTranspose = 1;
constexpr int kBf16 = 14;
constexpr int kComputeFloat = 68;
constexpr int kAnyAlgorithm = -1;
constexpr std::size_t kWorkspace = std::size_t{64} << 20;

void require(int status, const char* what) {
  if (status != 0) kit::fail(std::string(what) + ": cuBLAS status " + std::to_string(status));
}

void* pointer(GpuAddress address) {
  return reinterpret_cast<void*>(static_cast<std::uintptr_t>(address));
}

}  // namespace

GemmRunner::GemmRunner(const GpuDriver& driver, const GpuImage& image, bool own)
    : driver_(driver), image_(image), own_(image.kernel("bench_gemm")) {
  if (!own) load_cublas();
}

void GemmRunner::load_cublas() {
  void* const library = ::dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);  // never closed, as it has threads
  if (library == nullptr) return;
  const auto find = [library](auto& function, const char* symbol) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(::dlsym(library, symbol));
    if (function == nullptr) kit::fail(std::string(kLibrary) + " has no " + symbol);
  };
  int (*create)(void**) = nullptr;
  int (*get_version)(void*, int*) = nullptr;
  find(create, "cublasCreate_v2");
  find(get_version, "cublasGetVersion_v2");
  find(set_stream_, "cublasSetStream_v2");
  find(set_workspace_, "cublasSetWorkspace_v2");
  find(multiply_, "cublasGemmStridedBatchedEx");
  if (const int status = create(&handle_); status != 0) {
    handle_ = nullptr;
    why_not_ = " (cuBLAS did not start: status " + std::to_string(status) + ")";
    return;
  }
  require(get_version(handle_, &version_), "cublasGetVersion");
  driver_.require(driver_.allocate(&workspace_, kWorkspace), "cuMemAlloc for cuBLAS");
}

// cuBLAS has matrices by columns, so it makes C's transpose of those of B and A. B is read as [columns,
// depth], as weights mostly lie.
void GemmRunner::enqueue(const Product& product, void* stream) {
  const std::uint64_t stride_b = std::uint64_t{product.columns} * product.depth;
  const std::uint64_t stride_c = std::uint64_t{product.rows} * product.columns;
  if (handle_ == nullptr) {
    Product its = product;
    GemmStrides strides{product.stride_a, stride_b, stride_c};
    void* arguments[] = {&its.a, &its.b, &its.c, &its.columns, &its.depth, &strides};
    image_.launch(own_,
                  {.ctas = {product.columns / kGemmTile, product.rows / kGemmTile},
                   .batch = product.batch,
                   .threads = kGemmThreads},
                  stream, arguments);
    return;
  }
  require(set_stream_(handle_, stream), "cublasSetStream");
  require(set_workspace_(handle_, pointer(workspace_), kWorkspace), "cublasSetWorkspace");
  const float one = 1;
  const float zero = 0;
  const auto rows = static_cast<int>(product.rows);
  const auto columns = static_cast<int>(product.columns);
  const auto depth = static_cast<int>(product.depth);
  require(multiply_(handle_, kTranspose, kNoTranspose, columns, rows, depth, &one, pointer(product.b), kBf16,
                    depth, static_cast<long long>(stride_b), pointer(product.a), kBf16, depth,
                    static_cast<long long>(product.stride_a), &zero, pointer(product.c), kBf16, columns,
                    static_cast<long long>(stride_c), static_cast<int>(product.batch), kComputeFloat,
                    kAnyAlgorithm),
          "cublasGemmStridedBatchedEx");
}

std::string GemmRunner::name() const {
  if (handle_ == nullptr) return "epbench's own GEMM" + why_not_;
  return "cuBLAS " + std::to_string(version_ / 10000) + "." + std::to_string(version_ / 100 % 100) + "." +
         std::to_string(version_ % 100);
}

Gemm::Gemm(const GpuRank& gpu, std::uint32_t tokens)
    : image_(gpu_driver()),
      runner_(gpu_driver(), image_, true),
      product_{.rows = tokens < 1024 ? 512u : 4096u, .columns = 4096, .depth = 7168} {
  const GpuDriver& driver = gpu_driver();
  const std::size_t bytes = 2 * (product_.a_values() + product_.b_values()) + 4 * product_.c_values();
  driver.require(driver.allocate(&product_.a, bytes), "cuMemAlloc for the GEMM");
  driver.require(driver.fill(product_.a, 0, bytes, gpu.stream()), "cuMemsetD8Async");
  product_.b = product_.a + 2 * product_.a_values();
  product_.c = product_.b + 2 * product_.b_values();
}

Gemm::~Gemm() {
  gpu_driver().free(product_.a);
}

}  // namespace epd::bench
