#include "layer.h"

#include "bench/kernel_arguments.h"

namespace epd::bench {
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
