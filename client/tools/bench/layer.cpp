#include "layer.h"

#include "bench/kernel_arguments.h"
#include "kit/error.h"

#include <dlfcn.h>
#include <type_traits>

namespace epd::bench {

// ---- gemm runner

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

// ---- layer

namespace {

constexpr std::uint32_t kSequences = 64;  // decode, of all micro-batches
constexpr std::uint32_t kHeads = 8;       // decode: heads of keys and values of each sequence
constexpr std::uint32_t kPrefillHeads = 32;
constexpr std::uint32_t kProjected = 16384;  // values of a token before the projection
constexpr std::uint32_t kWidth = 2048;       // of an expert, of which gate and up have each as many

}  // namespace

Layer::Layer(const GpuRank& gpu, const RunPlan& plan)
    : gpu_(gpu), plan_(plan), driver_(gpu_driver()), image_(driver_), runner_(driver_, image_) {
  const bool decode = plan.layer_shape == LayerShape::kDecode;
  heads_ = decode ? kSequences / plan.micro_batches * kHeads : kPrefillHeads;
  const std::uint64_t length = decode ? plan.context : plan.tokens;
  const std::uint64_t values = std::uint64_t{heads_} * length * kHeadSize;
  const std::uint64_t all = decode ? values * plan.micro_batches : values;
  keys_ = make_random(all);
  values_ = make_random(all);
  queries_ = decode ? make_random(std::uint64_t{heads_} * kHeadSize) : make_random(values);
  sums_ = allocate(4 * (decode ? values / kSplitTokens : values));
  make_products();
}

Layer::~Layer() {
  for (const GpuAddress address : memory_) driver_.free(address);
}

GpuAddress Layer::allocate(std::size_t bytes) {
  GpuAddress address = 0;
  driver_.require(driver_.allocate(&address, bytes), "cuMemAlloc for a layer");
  memory_.push_back(address);
  return address;
}

GpuAddress Layer::make_random(std::uint64_t values) {
  GpuAddress address = allocate(2 * values);
  void* arguments[] = {&address, &values};
  image_.launch(image_.kernel("bench_random"), {.ctas = {kRandomCtas, 1}, .threads = kRandomThreads},
                gpu_.stream(), arguments);
  return address;
}

// Results are not passed on, so that values stay as they are. An expert's second product reads what its
// first one wrote, which is at least as wide.
void Layer::make_products() {
  projection_ = {.rows = plan_.tokens, .columns = plan_.hidden, .depth = kProjected};
  up_ = {.rows = plan_.tokens, .columns = 2 * kWidth, .depth = plan_.hidden, .batch = kLayerExperts};
  down_ = {.rows = plan_.tokens, .columns = plan_.hidden, .depth = kWidth, .batch = kLayerExperts};
  if (plan_.layout == EPD_LAYOUT_EXPERT)
    up_.stride_a = std::uint64_t{plan_.shape().expert_capacity()} * plan_.hidden;
  down_.stride_a = std::uint64_t{plan_.tokens} * 2 * kWidth;
  projection_.a = make_random(std::uint64_t{plan_.tokens} * kProjected);
  for (Product* const product : {&projection_, &up_, &down_}) {
    product->b = make_random(product->b_values());
    product->c = allocate(4 * product->c_values());
  }
  down_.a = up_.c;
}

void Layer::enqueue_attention(std::uint32_t micro_batch) {
  if (plan_.layer_shape == LayerShape::kDecode) {
    const std::uint64_t behind = 2 * std::uint64_t{micro_batch} * heads_ * plan_.context * kHeadSize;
    GpuAddress keys = keys_ + behind;
    GpuAddress values = values_ + behind;
    void* arguments[] = {&keys, &values, &queries_, &sums_};
    image_.launch(image_.kernel("bench_attention_decode"),
                  {.ctas = {plan_.context / kSplitTokens, heads_}, .threads = kAttentionThreads},
                  gpu_.stream(), arguments);
  } else {
    void* arguments[] = {&queries_, &keys_, &values_, &sums_};
    image_.launch(image_.kernel("bench_attention_prefill"),
                  {.ctas = {plan_.tokens / kQueries, heads_}, .threads = kAttentionThreads}, gpu_.stream(),
                  arguments);
  }
  runner_.enqueue(projection_, gpu_.stream());
}

void Layer::enqueue_experts(const void* rows) {
  up_.a = static_cast<GpuAddress>(reinterpret_cast<std::uintptr_t>(rows));
  runner_.enqueue(up_, gpu_.stream());
  runner_.enqueue(down_, gpu_.stream());
}

void enqueue_layers(std::uint32_t layers, std::uint32_t micro_batches, const LayerParts& parts,
                    const LayerMoves& moves) {
  for (std::uint32_t layer = 0; layer < layers; ++layer) {
    parts.attention(0);
    moves.begin_dispatch(0);
    if (micro_batches == 2) {
      if (layer != 0) moves.end_combine(1);
      parts.attention(1);
      moves.end_dispatch(0);
      moves.begin_dispatch(1);
    } else {
      moves.end_dispatch(0);
    }
    parts.experts(0);
    moves.begin_combine(0);
    if (micro_batches == 2) {
      moves.end_dispatch(1);
      parts.experts(1);
      moves.begin_combine(1);
    }
    moves.end_combine(0);
  }
  if (micro_batches == 2) moves.end_combine(1);
}

}  // namespace epd::bench
