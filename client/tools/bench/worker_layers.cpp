// Worker: whole layers, the client's kernels and operations in one graph.
#include "kit/error.h"
#include "worker.h"

#include <cstring>

namespace epd::bench {

void Worker::make_layer() {
  layer_ = std::make_unique<Layer>(*gpu_, plan_);
  if (self_.rank() != 0) return;
  std::strncpy(context_.samples->gemm.data(), layer_->gemm_name().c_str(), context_.samples->gemm.size() - 1);
}

// One graph of all layers, one without operations, and one of operations alone. What is checked are the
// results of the last layer.
void Worker::iterate_layers(std::uint32_t iteration) {
  const bool warm = iteration < plan_.warmup;
  const std::uint32_t measured = warm ? 0 : iteration - plan_.warmup;
  const std::size_t at = std::size_t{measured} * plan_.ranks + self_.rank();
  const bool check = !warm && plan_.checks(measured);
  Samples& samples = *context_.samples;
  for (std::uint32_t slot = 0; slot < plan_.micro_batches; ++slot) {
    prepare(iteration, slot);
    if (check) poison(slots_[slot]);
  }
  if (iteration == 0) {  // before they are captured, as cuBLAS loads and chooses at first
    layer_->enqueue_attention(0);
    layer_->enqueue_experts(slots_[0].buffers.recv_x);
  }
  samples.layers_us[at] = timed_layers("layers", true, true);
  for (Slot& slot : slots_) {
    const epd_result_t result = kit::finish(group_.get(), slot.dispatch, "dispatch");
    if (!check) continue;
    check_dispatch(iteration, slot, result.num_recv_rows);
    check_combine(iteration, slot);
  }
  samples.computing_us[at] = timed_layers("layers without operations", true, false);
  samples.moving_us[at] = timed_layers("operations of layers", false, true);
}

double Worker::timed_layers(const std::string& what, bool computes, bool moves) {
  const auto enqueue = [&]() -> epd_ticket_t {
    const bool deferred = plan_.micro_batches > 1 && computes;
    std::vector<epd_ticket_t> dispatch(plan_.micro_batches), combine(plan_.micro_batches);
    const auto wait = [&](epd_ticket_t ticket) {
      if (deferred) kit::require(epd_ticket_wait_on_stream(group_.get(), ticket, stream()), what.c_str());
    };
    const auto begin_dispatch = [&](std::uint32_t slot) {
      epd_dispatch_args_t args = dispatch_args(slot);
      args.defer_receive = deferred ? 1 : 0;
      dispatch[slot] = kit::submit(group_.get(), args, stream(), &slots_[slot].handle);
      if (computes) slots_[slot].dispatch = dispatch[slot];
    };
    const auto begin_combine = [&](std::uint32_t slot) {
      epd_combine_args_t args = combine_args(slot);
      args.defer_receive = deferred ? 1 : 0;
      combine[slot] = kit::submit(group_.get(), args, stream());
    };
    const auto nothing = [](std::uint32_t) {};
    LayerParts parts{nothing, nothing};
    if (computes) {
      parts.attention = [&](std::uint32_t slot) { layer_->enqueue_attention(slot); };
      parts.experts = [&](std::uint32_t slot) { layer_->enqueue_experts(slots_[slot].buffers.recv_x); };
    }
    LayerMoves between{nothing, nothing, nothing, nothing};
    if (moves) {
      between = {begin_dispatch, [&](std::uint32_t slot) { wait(dispatch[slot]); }, begin_combine,
                 [&](std::uint32_t slot) { wait(combine[slot]); }};
    }
    enqueue_layers(plan_.layers, plan_.micro_batches, parts, between);
    return combine.back();
  };
  return timed_in_stream({what, 0, enqueue, false, true}).time_us;
}

}  // namespace epd::bench
