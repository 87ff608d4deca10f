// Worker: what is timed, and how.
#include "bench/kernel_arguments.h"
#include "kit/error.h"
#include "nodes_bench.h"
#include "worker.h"

#include <cstring>

namespace epd::bench {

void Worker::run_noops(std::size_t first, std::uint32_t count) {
  for (std::uint32_t i = 0; i < count; ++i) {
    epd_ticket_t ticket = 0;
    const double begin = kit::now_us();
    kit::require(epd_noop(group_.get(), 0, EPD_NO_STREAM, &ticket), "noop");
    kit::finish(group_.get(), ticket, "noop");
    context_.samples->noop_us[first + i] = kit::now_us() - begin;
  }
}

void Worker::run_stream_noops(std::size_t first, std::uint32_t count) {
  for (std::uint32_t i = 0; i < count; ++i) {
    if (in_stream()) context_.samples->noop_ahead_us[first + i] = timed_noop(true).time_us;
    context_.samples->noop_us[first + i] = timed_noop(false).time_us;
    if (!in_stream()) continue;
    context_.samples->events_ahead_us[first + i] = time_of_no_work_us(true);
    context_.samples->events_us[first + i] = time_of_no_work_us(false);
  }
}

Worker::Timing Worker::with_link_bytes(OperationSamples& samples, std::uint32_t measured,
                                       const std::function<Timing()>& body) {
  const std::uint64_t before = link_bytes();
  const Timing timing = body();
  const std::uint64_t sent = link_bytes() - before;
  if (self_.rank() == 0) samples.link_bytes[measured] = sent;
  return timing;
}

// While nothing is under way. On rank 0.
std::uint64_t Worker::link_bytes() {
  if (context_.nodes == nullptr) return 0;
  self_.barrier();
  const std::uint64_t bytes = self_.rank() == 0 ? context_.nodes->link_bytes() : 0;
  self_.barrier();
  return bytes;
}

void Worker::note_far_bytes(std::size_t at, const Choices& choices) {
  if (context_.nodes == nullptr) return;
  const FarBytes bytes = far_bytes(plan_, self_.rank(), choices.idx);
  Samples& samples = *context_.samples;
  samples.dispatch.record_bytes[at] = bytes.rows;
  samples.dispatch.request_bytes[at] = bytes.announcements;
  samples.dispatch.needed_bytes[at] = bytes.rows + bytes.announcements;
  samples.combine.record_bytes[at] = bytes.sums;
  samples.combine.request_bytes[at] = bytes.announcements + bytes.asks;
  samples.combine.needed_bytes[at] = bytes.sums + bytes.announcements;
}

void Worker::end_pair(std::uint32_t iteration) {
  if (!context_.after_pair || iteration < plan_.warmup) return;
  const std::uint32_t measured = iteration - plan_.warmup + 1;
  if (measured % context_.iterations_of_pair != 0) return;
  self_.barrier();
  if (self_.rank() == 0) context_.after_pair(measured / context_.iterations_of_pair - 1);
  self_.barrier();
}

epd_dispatch_args_t Worker::dispatch_args(std::uint32_t slot_index) const {
  epd_dispatch_args_t args;
  epd_dispatch_args_init(&args);
  args.slot = slot_index;
  args.num_tokens = plan_.tokens;
  args.zero_padding = plan_.zero_padding ? 1 : 0;
  args.mark_unused = plan_.mark_unused ? 1 : 0;
  return args;
}

epd_combine_args_t Worker::combine_args(std::uint32_t slot_index) const {
  epd_combine_args_t args;
  epd_combine_args_init(&args);
  args.slot = slot_index;
  args.handle = slots_[slot_index].handle;
  args.weighted = plan_.weighted ? 1 : 0;
  args.num_biases = plan_.biases;
  args.return_weights = plan_.return_weights ? EPD_RETURN_WEIGHTS_OWN : EPD_RETURN_WEIGHTS_NONE;
  return args;
}

Worker::Timing Worker::timed(const Attempt& attempt) {
  return in_stream() ? timed_in_stream(attempt) : timed_by_host(attempt);
}

Worker::Timing Worker::timed_by_host(const Attempt& attempt) {
  Timing timing;
  device_->flush_cache();
  device_->settle();
  self_.barrier();
  const double begin = kit::now_us();
  const epd_ticket_t ticket = attempt.submit();
  if (gpu_ != nullptr) {
    timing.call_us = kit::now_us() - begin;
    take_counts(attempt, ticket, begin, timing);
  }
  timing.result = kit::finish(group_.get(), ticket, attempt.what.c_str());
  timing.time_us = timing.host_us = kit::now_us() - begin;
  return timing;
}

void Worker::take_counts(const Attempt& attempt, epd_ticket_t ticket, double begin, Timing& timing) {
  if (!attempt.has_counts) return;
  epd_counts_t counts;
  epd_counts_init(&counts);
  kit::require(epd_ticket_counts(group_.get(), ticket, EPD_FOREVER, &counts), "counts");
  timing.counts_us = kit::now_us() - begin;
}

Worker::Timing Worker::timed_in_stream(const Attempt& attempt) {
  Timing timing;
  const auto submit = attempt.ahead ? replayable(behind_gate(attempt)) : replayable(attempt);
  device_->flush_cache();
  device_->settle();
  self_.start_together();
  if (!attempt.ahead) gpu_->record_begin();
  const double begin = kit::now_us();
  const epd_ticket_t ticket = submit();
  timing.call_us = kit::now_us() - begin;
  if (attempt.ahead) {
    start_barrier_->open();
  } else {
    gpu_->record_end();
  }
  take_counts(attempt, ticket, begin, timing);
  timing.result = finish(ticket, attempt.what);
  timing.host_us = kit::now_us() - begin;
  if (plan_.graph) device_->settle();  // so that its events have ended
  timing.time_us = gpu_->elapsed_us();
  constexpr double kGateUs = static_cast<double>(gpu_test::kGateNs) * 1e-3;
  if (attempt.ahead && timing.host_us > kGateUs)
    kit::fail(attempt.what + ": the streams of all ranks have not reached the start barrier within 20 s");
  return timing;
}

// Records both events too, so that they are part of a graph.
Worker::Attempt Worker::behind_gate(const Attempt& attempt) {
  Attempt all = attempt;
  all.what += " behind the start barrier";
  all.submit = [this, submit = attempt.submit] {
    start_barrier_->enqueue();
    gpu_->record_begin();
    const epd_ticket_t ticket = submit();
    gpu_->record_end();
    return ticket;
  };
  return all;
}

double Worker::time_of_no_work_us(bool ahead) {
  if (ahead) return timed_in_stream({"nothing", 0, [] { return epd_ticket_t{0}; }, false, true}).time_us;
  device_->flush_cache();
  device_->settle();
  self_.start_together();
  gpu_->record_begin();
  gpu_->record_end();
  return gpu_->elapsed_us();
}

std::function<epd_ticket_t()> Worker::replayable(const Attempt& attempt) {
  if (!plan_.graph) return attempt.submit;
  Graph& its = graphs_[{attempt.what, attempt.slot}];
  if (its.graph == nullptr) its.graph = gpu_->capture([&] { its.ticket = attempt.submit(); });
  return [this, its] {
    gpu_->launch(its.graph);
    return its.ticket;
  };
}

// In which operations are measured.
void* Worker::stream() const {
  return in_stream() ? gpu_->stream() : EPD_NO_STREAM;
}

epd_result_t Worker::finish(epd_ticket_t ticket, const std::string& what) {
  if (ticket != 0) return kit::finish(group_.get(), ticket, what.c_str());
  device_->settle();
  return {};
}

Worker::Timing Worker::timed_dispatch(std::uint32_t slot_index, bool ahead) {
  Slot& slot = slots_[slot_index];
  epd_dispatch_args_t args = dispatch_args(slot_index);
  if (plan_.cached) args.handle = slot.handle;
  return timed({"dispatch", slot_index,
                [&] { return kit::submit(group_.get(), args, stream(), &slot.handle); }, true, ahead});
}

Worker::Timing Worker::timed_combine(std::uint32_t slot_index, bool ahead) {
  epd_combine_args_t args = combine_args(slot_index);
  return timed(
      {"combine", slot_index, [&] { return kit::submit(group_.get(), args, stream()); }, false, ahead});
}

Worker::Timing Worker::timed_noop(bool ahead) {
  return timed({"noop", 0,
                [this] {
                  epd_ticket_t ticket = 0;
                  kit::require(epd_noop(group_.get(), 0, stream(), &ticket), "noop");
                  return ticket;
                },
                false, ahead});
}

// The results of the last time, beside the GEMM, are checked.
void Worker::overlap(std::uint32_t iteration, std::size_t at, bool check) {
  const std::uint32_t slot_index = iteration % plan_.depth;
  Slot& slot = slots_[slot_index];
  if (plan_.does_dispatch()) {
    epd_dispatch_args_t args = dispatch_args(slot_index);
    if (plan_.cached) args.handle = slot.handle;
    const auto submit = [&, args](bool deferred) mutable {
      args.defer_receive = deferred ? 1 : 0;
      return kit::submit(group_.get(), args, stream(), &slot.handle);
    };
    const Timing last = measure_overlap(context_.samples->dispatch, at, {"dispatch", slot_index, submit, [&] {
                                                                           if (check) poison(slot);
                                                                         }});
    if (check) check_dispatch(iteration, slot, last.result.num_recv_rows);
  }
  if (plan_.does_combine()) {
    epd_combine_args_t args = combine_args(slot_index);
    const auto submit = [&, args](bool deferred) mutable {
      args.defer_receive = deferred ? 1 : 0;
      return kit::submit(group_.get(), args, stream());
    };
    measure_overlap(context_.samples->combine, at, {"combine", slot_index, submit, [&] {
                                                      if (check) poison_combine(slot);
                                                    }});
    if (check) check_combine(iteration, slot);
  }
}

// Each behind the start barrier: all that is timed has been enqueued when it begins. The GEMM's own events
// would stand between it and the operation, so they are in a run of their own.
Worker::Timing Worker::measure_overlap(OperationSamples& samples, std::size_t at,
                                       const Overlapped& overlapped) {
  const auto timed_ahead = [&](const std::string& what, const std::function<epd_ticket_t()>& enqueue) {
    return timed_in_stream({what, overlapped.slot, enqueue, false, true}).time_us;
  };
  samples.gemm_us[at] = timed_ahead("a GEMM", [&] {
    gemm_->enqueue(gpu_->stream());
    return epd_ticket_t{0};
  });
  samples.serial_us[at] = timed_ahead(overlapped.what + ", then a GEMM", [&] {
    const epd_ticket_t ticket = overlapped.submit(false);
    gemm_->enqueue(gpu_->stream());
    return ticket;
  });
  timed_beside(overlapped, true);
  samples.gemm_beside_us[at] = gpu_->inner_us();
  overlapped.poison();
  const Timing last = timed_beside(overlapped, false);
  samples.overlapped_us[at] = last.time_us;
  return last;
}

Worker::Timing Worker::timed_beside(const Overlapped& overlapped, bool gemm_too) {
  const std::string what = overlapped.what + " beside a GEMM";
  const auto enqueue = [&] {
    const epd_ticket_t ticket = overlapped.submit(true);
    if (gemm_too) gpu_->record_inner_begin();
    gemm_->enqueue(gpu_->stream());
    if (gemm_too) gpu_->record_inner_end();
    kit::require(epd_ticket_wait_on_stream(group_.get(), ticket, gpu_->stream()), what);
    return ticket;
  };
  return timed_in_stream({what + (gemm_too ? ", timed too" : ""), overlapped.slot, enqueue, false, true});
}

void Worker::record(OperationSamples& samples, std::size_t at, const Timing& timing) const {
  const auto moved = static_cast<std::uint32_t>(route_.entries.size());
  samples.time_us[at] = timing.time_us;
  samples.host_us[at] = timing.host_us;
  samples.call_us[at] = timing.call_us;
  samples.counts_us[at] = timing.counts_us;
  samples.moved_rows[at] = moved;
  samples.wire_rows[at] = moved - kit::rows_between(counts(), self_.rank(), self_.rank());
  samples.logical_rows[at] = kit::received_rows(counts(), self_.rank());
}

void Worker::measure_ceiling(OperationSamples& samples, std::uint32_t measured, bool of_dispatch) {
  const std::size_t at = std::size_t{measured} * plan_.ranks + self_.rank();
  const kit::CopyKind kind = kit::copy_kind(measured);
  device_->flush_cache();
  self_.barrier();
  samples.ceiling_begin_us[at] = kit::now_us();
  if (of_dispatch) {
    context_.ceiling->copy_dispatch(self_.rank(), route_, bases_, kind);
  } else {
    context_.ceiling->copy_combine(self_.rank(), route_, bases_, kind);
  }
  samples.ceiling_end_us[at] = kit::now_us();
}

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
