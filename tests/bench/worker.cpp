#include "worker.h"

#include "kernels/reference.h"
#include "kit/compare.h"
#include "kit/error.h"
#include "kit/random.h"
#include "proto/arena.h"
#include "snapshot.h"

#include <algorithm>
#include <cstring>
#include <numeric>

namespace epd::bench {
namespace {

namespace reference = kernels::reference;

constexpr std::chrono::seconds kAttachPatience{30};  // a GPU's engine takes seconds to start

constexpr std::int32_t kJoinPatienceMs = 30'000;  // and large arenas take long to make

std::uint64_t x_seed(const RunPlan& plan, std::uint32_t rank) {
  return kit::derive(plan.seed, 0x10000 + rank);
}

std::uint64_t y_seed(const RunPlan& plan, std::uint32_t rank) {
  return kit::derive(plan.seed, 0x20000 + rank);
}

std::uint64_t bias_seed(const RunPlan& plan, std::uint32_t rank, std::uint32_t which) {
  return kit::derive(plan.seed, 0x30000 + 2 * rank + which);
}

// Any bits that are finite as bf16, e4m3 bytes, scales or float32, as many bytes as asked for.
template <typename T>
std::vector<T> any_data(std::uint64_t seed, std::size_t count) {
  std::vector<T> data(abi::align_up(count * sizeof(T), 8) / sizeof(T));
  kit::fill_bf16(seed, reinterpret_cast<std::uint16_t*>(data.data()), data.size() * sizeof(T) / 2);
  data.resize(count);
  return data;
}

// Of rows of bf16 values.
void keep_columns(std::uint32_t hidden, const RunPlan::Columns& columns, std::vector<std::uint8_t>& x) {
  if (columns.count == hidden) return;
  const std::size_t rows = x.size() / (2 * std::size_t{hidden});
  const std::size_t kept = 2 * std::size_t{columns.count};
  for (std::size_t row = 0; row < rows; ++row)
    std::memmove(x.data() + row * kept, x.data() + 2 * (row * hidden + columns.first), kept);
  x.resize(rows * kept);
}

// A rank that checks a combine needs the y of all; beyond this one rank checks, in turn.
bool oracle_is_large(const RunPlan& plan) {
  if (plan.layout == EPD_LAYOUT_COMPACT && !plan.on_gpus()) return false;
  return std::uint64_t{plan.ranks} * plan.tokens * plan.topk * plan.hidden * 2 > std::uint64_t{1} << 30;
}

}  // namespace

Worker::Worker(const RunContext& context, kit::TeamRank& self)
    : context_(context), plan_(context.plan), self_(self), params_(context.plan.params()) {}

void Worker::run() {
  make_device();
  if (plan_.overlap) gemm_ = std::make_unique<Gemm>(*gpu_, gemm_rows(plan_.tokens));
  connect();
  if (plan_.operation == Operation::kNoop) {
    self_.barrier();
    for (std::uint32_t i = 0; i < plan_.warmup + plan_.iterations; ++i) {
      const std::size_t at = i < plan_.warmup ? 0 : i - plan_.warmup;
      const std::size_t line = at * self_.size() + self_.rank();
      if (gpu_ != nullptr) run_stream_noops(line * kStreamNoopsPerIteration, kStreamNoopsPerIteration);
      if (gpu_ == nullptr) run_noops(line * kNoopsPerIteration, kNoopsPerIteration);
      if (self_.rank() == 0) self_.set_progress(i + 1);
    }
  } else {
    fill_slots();
    if (gpu_ == nullptr) context_.ceiling->warm(self_.rank());
    for (std::uint32_t i = 0; i < plan_.warmup + plan_.iterations; ++i) {
      iterate(i);
      if (self_.rank() == 0) self_.set_progress(i + 1);
    }
  }
  self_.barrier();  // nobody leaves while others still measure
}

void Worker::make_device() {
  if (!plan_.on_gpus()) {
    device_ = std::make_unique<HostRank>(!plan_.warm_cache);
    return;
  }
  auto gpu = std::make_unique<GpuRank>(self_.rank() % plan_.gpus, !plan_.warm_cache);
  gpu_ = gpu.get();
  device_ = std::move(gpu);
  if (self_.rank() != 0) return;
  const std::string name = gpu_->name() + (gpu_->mps() ? ", MPS" : ", no MPS");
  std::strncpy(context_.samples->gpu.data(), name.c_str(), context_.samples->gpu.size() - 1);
}

void Worker::connect() {
  session_ = kit::attach(context_.socket, plan_.device_of(self_.rank()), kAttachPatience);
  epd_group_config_t config = plan_.config();
  config.name = context_.group.c_str();
  config.rank = static_cast<std::int32_t>(self_.rank());
  if (gpu_ != nullptr) config.timeout_ms = kJoinPatienceMs;
  group_ = kit::join(session_.get(), config);
  if (self_.rank() == 0) {
    const std::string name = kit::daemon_name(session_.get());
    std::strncpy(context_.samples->daemon.data(), name.c_str(), context_.samples->daemon.size() - 1);
  }
}

template <typename T>
void Worker::put(void* region, const std::vector<T>& data) const {
  if (region != nullptr) device_->put(region, data.data(), data.size() * sizeof(T));
}

// x, y and biases stay as they are in all iterations: every rank can make every other rank's again for the
// oracle.
void Worker::fill_slots() {
  slots_.resize(plan_.depth);
  const std::size_t tokens = plan_.max_tokens();
  for (std::uint32_t i = 0; i < plan_.depth; ++i) {
    slots_[i].buffers = kit::buffers_of(group_.get(), i);
    const epd_buffers_t& buffers = slots_[i].buffers;
    put(buffers.x, any_data<std::uint8_t>(x_seed(plan_, self_.rank()), tokens * reference::x_bytes(params_)));
    put(buffers.x_scales,
        any_data<std::uint8_t>(~x_seed(plan_, self_.rank()), tokens * reference::scale_bytes(params_)));
    for (std::uint32_t b = 0; b < plan_.biases; ++b) {
      put(buffers.bias[b], any_data<std::uint16_t>(bias_seed(plan_, self_.rank(), b), tokens * plan_.hidden));
    }
    // Elsewhere the worst case is too much to touch, and the warm-up touches what is used.
    if (plan_.layout == EPD_LAYOUT_COMPACT) {
      const kernels::RowRange all{0, plan_.ranks * plan_.max_tokens()};
      kit::poison_dispatch(params_, {&all, 1}, buffers, filler());
    }
    kit::poison_combine(params_, plan_.max_tokens(), buffers, filler());
  }
  device_->settle();
}

// For the rows that this iteration's combine may read, and some more, so that it is seldom done again.
void Worker::fill_y(Slot& slot) const {
  const std::size_t end = end_of_rows(self_.rank());
  if (end <= slot.rows_of_y) return;
  const std::size_t room = plan_.shape().recv_rows();
  slot.rows_of_y = plan_.layout == EPD_LAYOUT_COMPACT ? room : std::min(room, end * 9 / 8);
  const std::size_t values = slot.rows_of_y * plan_.hidden;
  if (gpu_ == nullptr) {
    kit::fill_bf16(y_seed(plan_, self_.rank()), static_cast<std::uint16_t*>(slot.buffers.y), values);
  } else {
    put(slot.buffers.y, any_data<std::uint16_t>(y_seed(plan_, self_.rank()), values));
  }
  put(slot.buffers.y_weights,
      any_data<float>(~y_seed(plan_, self_.rank()), slot.rows_of_y * plan_.shape().choices_per_row()));
}

void Worker::run_noops(std::size_t first, std::uint32_t count) {
  for (std::uint32_t i = 0; i < count; ++i) {
    epd_ticket_t ticket = 0;
    const double begin = kit::now_us();
    kit::require(epd_noop(group_.get(), 0, &ticket), "noop");
    kit::finish(group_.get(), ticket, "noop");
    context_.samples->noop_us[first + i] = kit::now_us() - begin;
  }
}

void Worker::run_stream_noops(std::size_t first, std::uint32_t count) {
  for (std::uint32_t i = 0; i < count; ++i) {
    context_.samples->noop_ahead_us[first + i] = timed_noop(true).time_us;
    context_.samples->noop_us[first + i] = timed_noop(false).time_us;
    context_.samples->events_ahead_us[first + i] = time_of_no_work_us(true);
    context_.samples->events_us[first + i] = time_of_no_work_us(false);
  }
}

// One iteration, all ranks in step: prepare, (barrier, dispatch), check, (barrier, combine), check,
// ceilings, no-ops. Only what is between a barrier and the end of the wait is timed. On GPUs every operation
// is done twice, first with the host ahead of the stream; what is checked is the second one.
void Worker::iterate(std::uint32_t iteration) {
  const bool warm = iteration < plan_.warmup;
  const std::uint32_t measured = warm ? 0 : iteration - plan_.warmup;
  const std::size_t at = std::size_t{measured} * plan_.ranks + self_.rank();
  const std::uint32_t slot_index = iteration % plan_.depth;
  Slot& slot = slots_[slot_index];
  Samples& samples = *context_.samples;
  const bool check = !warm && plan_.checks(measured);

  prepare(iteration);
  if (plan_.cached) {
    epd_dispatch_args_t args = dispatch_args(slot_index);
    if (plan_.commands) args.on_stream = 1, args.stream = gpu_->stream(), args.wait_by = plan_.wait_by;
    const epd_ticket_t ticket = kit::submit(group_.get(), args, &slot.handle);
    finish(ticket, "dispatch");
  }
  if (gpu_ != nullptr && plan_.does_dispatch())
    samples.dispatch.ahead_us[at] = timed_dispatch(slot_index, true).time_us;
  if (check) poison(slot);
  const Timing dispatched = timed_dispatch(slot_index, false);
  record(samples.dispatch, at, dispatched);
  if (check && plan_.does_dispatch()) {
    check_dispatch(iteration, slot, plan_.commands ? num_recv_rows(slot) : dispatched.result.num_recv_rows);
  }
  if (plan_.does_combine()) {
    if (gpu_ != nullptr) {
      samples.combine.ahead_us[at] = timed_combine(slot_index, true).time_us;
      if (check) poison_combine(slot);
    }
    record(samples.combine, at, timed_combine(slot_index, false));
    if (check) check_combine(iteration, slot);
  }
  if (plan_.overlap) overlap(slot_index, at);
  if (gpu_ != nullptr) {
    const std::size_t line = std::size_t{measured} * plan_.ranks + self_.rank();
    return run_stream_noops(line * kStreamNoopsBetween, kStreamNoopsBetween);
  }
  if (plan_.does_dispatch()) measure_ceiling(samples.dispatch, measured, true);
  if (plan_.does_combine()) measure_ceiling(samples.combine, measured, false);
  self_.barrier();
  if (self_.rank() == 0) run_noops(std::size_t{measured} * kNoopsBetween, kNoopsBetween);
}

void Worker::prepare(std::uint32_t iteration) {
  Slot& slot = slots_[iteration % plan_.depth];
  const Choices choices = choices_of(self_.rank(), iteration);
  put(slot.buffers.topk_idx, choices.idx);
  put(slot.buffers.topk_weights, choices.weights);
  kernels::RoutingInput input;
  input.topk_idx = choices.idx.data();
  input.per_expert = plan_.layout != EPD_LAYOUT_COMPACT;
  input.num_tokens = plan_.tokens;
  input.topk = plan_.topk;
  input.num_ranks = plan_.ranks;
  input.num_experts = plan_.experts;
  const kernels::RoutingError error = kernels::build_routing_plan(input, route_);
  if (error.bad) kit::fail("the routing chose expert " + std::to_string(error.value));
  const std::vector<std::uint32_t>& own = input.per_expert ? route_.expert_counts : route_.rank_counts;
  self_.barrier();  // the previous iteration's counts are no longer read
  std::copy(own.begin(), own.end(), context_.samples->row_counts.data() + self_.rank() * own.size());
  self_.barrier();
  bases_ = kit::base_rows(counts(), self_.rank());
  if (plan_.does_combine()) fill_y(slot);
  device_->settle();
}

kit::TargetCounts Worker::counts() const {
  return {context_.samples->row_counts.data(), plan_.ranks, kit::targets_per_rank(params_)};
}

std::vector<kernels::RowRange> Worker::filled_rows(std::uint32_t rank) const {
  if (plan_.layout == EPD_LAYOUT_COMPACT) return {{0, kit::received_rows(counts(), rank)}};
  const kit::TargetCounts all = counts();
  const std::uint32_t experts = all.targets_per_rank;
  std::vector<kernels::RowRange> ranges(experts);
  std::uint32_t at = 0;
  for (std::uint32_t e = 0; e < experts; ++e) {
    ranges[e].begin = at;
    for (std::uint32_t source = 0; source < plan_.ranks; ++source)
      ranges[e].count += all.rows[(source * plan_.ranks + rank) * experts + e];
    at = plan_.layout == EPD_LAYOUT_EXPERT
             ? at + params_.expert_capacity
             : static_cast<std::uint32_t>(abi::align_up(at + ranges[e].count, plan_.alignment));
  }
  return ranges;
}

std::size_t Worker::end_of_rows(std::uint32_t rank) const {
  const kernels::RowRange last = filled_rows(rank).back();
  return std::size_t{last.begin} + last.count;
}

kit::FillMemory Worker::filler() const {
  return [this](void* region, int byte, std::size_t bytes) { device_->fill(region, byte, bytes); };
}

void Worker::poison(const Slot& slot) {
  kit::poison_dispatch(params_, filled_rows(self_.rank()), slot.buffers, filler());
  poison_combine(slot);
}

void Worker::poison_combine(const Slot& slot) {
  kit::poison_combine(params_, plan_.max_tokens(), slot.buffers, filler());
  device_->settle();
}

epd_dispatch_args_t Worker::dispatch_args(std::uint32_t slot_index) const {
  epd_dispatch_args_t args = EPD_DISPATCH_ARGS_INIT;
  args.slot = slot_index;
  args.num_tokens = plan_.tokens;
  args.zero_padding = plan_.zero_padding ? 1 : 0;
  args.mark_unused = plan_.mark_unused ? 1 : 0;
  return args;
}

epd_combine_args_t Worker::combine_args(std::uint32_t slot_index) const {
  epd_combine_args_t args = EPD_COMBINE_ARGS_INIT;
  args.slot = slot_index;
  args.handle = slots_[slot_index].handle;
  args.weighted = plan_.weighted ? 1 : 0;
  args.num_biases = plan_.biases;
  args.return_weights = plan_.return_weights ? 1 : 0;
  return args;
}

Worker::Timing Worker::timed(const Attempt& attempt) {
  return gpu_ != nullptr ? timed_in_stream(attempt) : timed_by_host(attempt);
}

Worker::Timing Worker::timed_by_host(const Attempt& attempt) {
  Timing timing;
  device_->flush_cache();
  self_.barrier();
  const double begin = kit::now_us();
  const epd_ticket_t ticket = attempt.submit();
  timing.result = kit::finish(group_.get(), ticket, attempt.what);
  timing.time_us = timing.host_us = kit::now_us() - begin;
  return timing;
}

Worker::Timing Worker::timed_in_stream(const Attempt& attempt) {
  Timing timing;
  const auto submit = replayable(attempt);
  begin_in_stream(attempt.ahead);
  const double begin = kit::now_us();
  const epd_ticket_t ticket = submit();
  timing.call_us = kit::now_us() - begin;
  gpu_->record_end();
  if (attempt.has_counts && !plan_.commands) {
    epd_counts_t counts = EPD_COUNTS_INIT;
    kit::require(epd_ticket_counts(group_.get(), ticket, EPD_FOREVER, &counts), "counts");
    timing.counts_us = kit::now_us() - begin;
  }
  if (plan_.commands) timing.time_us = gpu_->elapsed_us();  // there is no other news of the end
  timing.result = finish(ticket, attempt.what);
  timing.host_us = kit::now_us() - begin;
  timing.time_us = gpu_->elapsed_us();
  return timing;
}

// The stream is idle when the pair of events begins; or, ahead, it is kept busy meanwhile, as the work of an
// application would do.
void Worker::begin_in_stream(bool ahead) {
  if (!ahead) device_->flush_cache();
  device_->settle();
  self_.start_together();
  if (ahead) gpu_->keep_busy(plan_.busy_us);
  gpu_->record_begin();
}

double Worker::time_of_no_work_us(bool ahead) {
  begin_in_stream(ahead);
  gpu_->record_end();
  return gpu_->elapsed_us();
}

std::function<epd_ticket_t()> Worker::replayable(const Attempt& attempt) {
  if (!plan_.graph) return attempt.submit;
  void*& graph = graphs_[{attempt.what, attempt.slot}];
  if (graph == nullptr) graph = gpu_->capture([&] { attempt.submit(); });
  return [this, graph] {
    gpu_->launch(graph);
    return epd_ticket_t{0};
  };
}

epd_result_t Worker::finish(epd_ticket_t ticket, const char* what) {
  if (!plan_.commands) return kit::finish(group_.get(), ticket, what);
  device_->settle();
  kit::require(epd_group_check(group_.get(), nullptr), what);
  return EPD_RESULT_INIT;
}

std::uint32_t Worker::num_recv_rows(const Slot& slot) {
  const std::uint32_t experts = plan_.experts / plan_.ranks;
  std::vector<std::int32_t> rows(plan_.layout == EPD_LAYOUT_EXPERT ? experts : 1);
  const epd_buffers_t& b = slot.buffers;
  const std::int32_t* const at = plan_.layout == EPD_LAYOUT_COMPACT  ? b.rank_offsets + plan_.ranks
                                 : plan_.layout == EPD_LAYOUT_PACKED ? b.expert_offsets + experts
                                                                     : b.expert_counts;
  device_->get(rows.data(), at, rows.size() * sizeof(rows[0]));
  device_->settle();
  return static_cast<std::uint32_t>(std::accumulate(rows.begin(), rows.end(), 0));
}

Worker::Timing Worker::timed_dispatch(std::uint32_t slot_index, bool ahead) {
  Slot& slot = slots_[slot_index];
  epd_dispatch_args_t args = dispatch_args(slot_index);
  if (plan_.cached) args.handle = slot.handle;
  if (gpu_ != nullptr) args.on_stream = 1, args.stream = gpu_->stream(), args.wait_by = plan_.wait_by;
  return timed(
      {"dispatch", slot_index, [&] { return kit::submit(group_.get(), args, &slot.handle); }, true, ahead});
}

Worker::Timing Worker::timed_combine(std::uint32_t slot_index, bool ahead) {
  epd_combine_args_t args = combine_args(slot_index);
  if (gpu_ != nullptr) args.on_stream = 1, args.stream = gpu_->stream(), args.wait_by = plan_.wait_by;
  return timed({"combine", slot_index, [&] { return kit::submit(group_.get(), args); }, false, ahead});
}

Worker::Timing Worker::timed_noop(bool ahead) {
  return timed({"noop", 0,
                [this] {
                  epd_ticket_t ticket = 0;
                  kit::require(epd_noop_on_stream(group_.get(), 0, gpu_->stream(), plan_.wait_by, &ticket),
                               "noop");
                  return ticket;
                },
                false, ahead});
}

void Worker::overlap(std::uint32_t slot_index, std::size_t at) {
  Slot& slot = slots_[slot_index];
  if (plan_.does_dispatch()) {
    measure_overlap(context_.samples->dispatch, at, "dispatch", [&](bool deferred) {
      epd_dispatch_args_t args = dispatch_args(slot_index);
      if (plan_.cached) args.handle = slot.handle;
      args.on_stream = 1, args.stream = gpu_->stream(), args.wait_by = plan_.wait_by;
      args.defer_receive = deferred ? 1 : 0;
      return kit::submit(group_.get(), args, &slot.handle);
    });
  }
  if (plan_.does_combine()) {
    measure_overlap(context_.samples->combine, at, "combine", [&](bool deferred) {
      epd_combine_args_t args = combine_args(slot_index);
      args.on_stream = 1, args.stream = gpu_->stream(), args.wait_by = plan_.wait_by;
      args.defer_receive = deferred ? 1 : 0;
      return kit::submit(group_.get(), args);
    });
  }
}

// Each ahead: all that is timed has been enqueued when it begins.
void Worker::measure_overlap(OperationSamples& samples, std::size_t at, const char* what,
                             const Submit& submit) {
  const auto begin = [this] {
    device_->settle();
    self_.start_together();
    gpu_->keep_busy(plan_.busy_us);
    gpu_->record_begin();
  };
  const auto end = [this, what](epd_ticket_t ticket) {
    gpu_->record_end();
    if (ticket != 0) kit::finish(group_.get(), ticket, what);
    return gpu_->elapsed_us();
  };
  begin();
  gemm_->enqueue(gpu_->stream());
  samples.gemm_us[at] = end(0);
  begin();
  const epd_ticket_t first = submit(false);
  gemm_->enqueue(gpu_->stream());
  samples.serial_us[at] = end(first);
  begin();
  const epd_ticket_t second = submit(true);
  gpu_->record_inner_begin();
  gemm_->enqueue(gpu_->stream());
  gpu_->record_inner_end();
  kit::require(epd_ticket_wait_on_stream(group_.get(), second, gpu_->stream(), plan_.wait_by), what);
  samples.overlapped_us[at] = end(second);
  samples.gemm_beside_us[at] = gpu_->inner_us();
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

Worker::Choices Worker::choices_of(std::uint32_t rank, std::uint32_t iteration) const {
  Choices choices{std::vector<std::int32_t>(std::size_t{plan_.tokens} * plan_.topk),
                  std::vector<float>(std::size_t{plan_.tokens} * plan_.topk)};
  context_.routing.fill({rank, plan_.ranks, plan_.tokens, iteration}, choices.idx.data(),
                        choices.weights.data());
  return choices;
}

reference::RankInput Worker::input_of(std::uint32_t rank, std::uint32_t iteration, bool with_rows) const {
  const Choices choices = choices_of(rank, iteration);
  kit::InputView view{plan_.tokens, nullptr, choices.idx.data(), choices.weights.data()};
  std::vector<std::uint8_t> x, scales;
  if (with_rows) {
    x = any_data<std::uint8_t>(x_seed(plan_, rank),
                               std::size_t{plan_.max_tokens()} * reference::x_bytes(params_));
    scales = any_data<std::uint8_t>(~x_seed(plan_, rank),
                                    std::size_t{plan_.max_tokens()} * reference::scale_bytes(params_));
    view.x = x.data();
    if (plan_.payload == EPD_PAYLOAD_FP8) view.x_scales = scales.data();
  }
  return kit::make_input(params_, view);
}

reference::CombineInput Worker::answer_of(std::uint32_t rank) const {
  reference::CombineInput answer;
  // The oracle wants all blocks of layout expert; nobody reads beyond the last row that is filled.
  const std::size_t end = end_of_rows(rank);
  const std::size_t rows = plan_.layout == EPD_LAYOUT_EXPERT ? plan_.shape().recv_rows() : end;
  answer.y = any_data<std::uint16_t>(y_seed(plan_, rank), end * plan_.hidden);
  answer.y.resize(rows * plan_.hidden);
  if (plan_.return_weights) {
    answer.y_weights = any_data<float>(~y_seed(plan_, rank), end * plan_.shape().choices_per_row());
    answer.y_weights.resize(rows * plan_.shape().choices_per_row());
  }
  for (std::uint32_t i = 0; i < plan_.biases; ++i)
    answer.bias[i] =
        any_data<std::uint16_t>(bias_seed(plan_, rank, i), std::size_t{plan_.tokens} * plan_.hidden);
  return answer;
}

void Worker::check_dispatch(std::uint32_t iteration, const Slot& slot, std::uint32_t num_recv_rows) {
  const RunPlan::Columns columns = plan_.checked_columns(self_.rank());
  reference::GroupParams params = params_;
  params.hidden = columns.count;
  std::vector<reference::RankInput> inputs;
  for (std::uint32_t rank = 0; rank < plan_.ranks; ++rank) {
    inputs.push_back(input_of(rank, iteration, true));
    keep_columns(params_.hidden, columns, inputs.back().x);
  }
  const auto expected = reference::dispatch_to(params, inputs, self_.rank());
  Snapshot snapshot;
  if (gpu_ != nullptr || columns.count != params_.hidden) {
    snapshot = Snapshot::of_dispatch(params_, slot.buffers, end_of_rows(self_.rank()), *device_);
    snapshot.keep_columns(params_, columns.first, columns.count);
  }
  const epd_buffers_t& delivered = snapshot.buffers().recv_src != nullptr ? snapshot.buffers() : slot.buffers;
  add_verdict(context_.samples->dispatch, "dispatch, iteration " + std::to_string(iteration),
              kit::compare_dispatch(params, expected, num_recv_rows, delivered));
}

void Worker::check_combine(std::uint32_t iteration, const Slot& slot) {
  if (oracle_is_large(plan_) && iteration % plan_.ranks != self_.rank()) return;
  std::vector<reference::RankInput> inputs;
  std::vector<reference::CombineInput> answers;
  for (std::uint32_t rank = 0; rank < plan_.ranks; ++rank) {
    inputs.push_back(input_of(rank, iteration, false));
    answers.push_back(answer_of(rank));
  }
  const auto expected =
      reference::combine_to(params_, inputs, answers, {plan_.weighted, plan_.return_weights}, self_.rank());
  Snapshot snapshot;
  if (gpu_ != nullptr) snapshot = Snapshot::of_combine(params_, slot.buffers, plan_.tokens, *device_);
  const epd_buffers_t& delivered = gpu_ != nullptr ? snapshot.buffers() : slot.buffers;
  add_verdict(context_.samples->combine, "combine, iteration " + std::to_string(iteration),
              kit::compare_combine(params_, expected, delivered));
}

void Worker::add_verdict(const OperationSamples& samples, const std::string& what,
                         const std::string& difference) {
  Verdict& verdict = samples.verdicts[self_.rank()];
  ++verdict.checks;
  if (difference.empty()) return;
  if (verdict.failures++ != 0) return;
  const std::string text = "rank " + std::to_string(self_.rank()) + ": " + what + ": " + difference;
  std::strncpy(verdict.first, text.c_str(), sizeof(verdict.first) - 1);
}

}  // namespace epd::bench
