#include "worker.h"

#include "kit/error.h"
#include "kit/team.h"

#include <unistd.h>
#include <algorithm>
#include <cstdio>
#include <cstring>

namespace epd::bench {

// ---- worker

namespace {

constexpr std::chrono::seconds kAttachPatience{30};  // a GPU's engine takes seconds to start

constexpr std::int32_t kJoinPatienceMs = 30'000;  // and large arenas take long to make

}  // namespace

Worker::Worker(const RunContext& context, kit::TeamRank& self)
    : context_(context), plan_(context.plan), self_(self), params_(context.plan.params()) {}

void Worker::run() {
  make_device();
  if (plan_.layers != 0) make_layer();
  if (plan_.overlap) gemm_ = std::make_unique<Gemm>(*gpu_, plan_.tokens);
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
    if (context_.ceiling != nullptr && gpu_ == nullptr) context_.ceiling->warm(self_.rank());
    for (std::uint32_t i = 0; i < plan_.warmup + plan_.iterations; ++i) {
      plan_.layers != 0 ? iterate_layers(i) : iterate(i);
      end_pair(i);
      if (self_.rank() == 0) self_.set_progress(i + 1);
    }
  }
  self_.barrier();  // no rank leaves while others still measure
}

void Worker::make_device() {
  if (!plan_.on_gpus()) {
    device_ = std::make_unique<HostRank>(!plan_.warm_cache);
    return;
  }
  auto gpu = std::make_unique<GpuRank>(self_.rank() % plan_.gpus, !plan_.warm_cache);
  gpu_ = gpu.get();
  device_ = std::move(gpu);
  start_barrier_ = std::make_unique<StartBarrier>(*gpu_, *context_.start_barrier, self_.rank());
  if (self_.rank() != 0) return;
  const std::string name = gpu_->name() + (gpu_->mps() ? ", MPS" : ", no MPS");
  std::strncpy(context_.samples->gpu.data(), name.c_str(), context_.samples->gpu.size() - 1);
}

void Worker::connect() {
  const std::uint32_t node = kit::place_of(self_.rank(), plan_.ranks, plan_.nodes).node;
  session_ =
      kit::attach(context_.sockets[node], plan_.device_of(self_.rank()), kAttachPatience, plan_.wait_by);
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
    put(buffers.x,
        any_data<std::uint8_t>(x_seed(plan_, self_.rank()), tokens * kernels::reference::x_bytes(params_)));
    put(buffers.x_scales, any_data<std::uint8_t>(~x_seed(plan_, self_.rank()),
                                                 tokens * kernels::reference::scale_bytes(params_)));
    for (std::uint32_t b = 0; b < plan_.biases; ++b) {
      put(buffers.bias[b], any_data<std::uint16_t>(bias_seed(plan_, self_.rank(), b), tokens * plan_.hidden));
    }
    // On other layouts the worst case is too large to touch. The warm-up touches what is used.
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

// One iteration, all ranks in step: prepare, (barrier, dispatch), check, (barrier, combine), check,
// ceilings, no-ops. Only what is between a barrier and the end of the wait is timed. In streams every
// operation is done twice, first behind the start barrier; what is checked is the second one.
void Worker::iterate(std::uint32_t iteration) {
  const bool warm = iteration < plan_.warmup;
  const std::uint32_t measured = warm ? 0 : iteration - plan_.warmup;
  const std::size_t at = std::size_t{measured} * plan_.ranks + self_.rank();
  const std::uint32_t slot_index = iteration % plan_.depth;
  Slot& slot = slots_[slot_index];
  Samples& samples = *context_.samples;
  const bool check = !warm && plan_.checks(measured);

  prepare(iteration, slot_index);
  if (plan_.cached) {
    epd_dispatch_args_t args = dispatch_args(slot_index);
    const epd_ticket_t ticket = kit::submit(group_.get(), args, EPD_NO_STREAM, &slot.handle);
    finish(ticket, "dispatch");
  }
  if (in_stream() && plan_.does_dispatch())
    samples.dispatch.ahead_us[at] = timed_dispatch(slot_index, true).time_us;
  if (check) poison(slot);
  const Timing dispatched =
      with_link_bytes(samples.dispatch, measured, [&] { return timed_dispatch(slot_index, false); });
  record(samples.dispatch, at, dispatched);
  if (check && plan_.does_dispatch()) check_dispatch(iteration, slot, dispatched.result.num_recv_rows);
  if (plan_.does_combine()) {
    if (in_stream()) {
      samples.combine.ahead_us[at] = timed_combine(slot_index, true).time_us;
      if (check) poison_combine(slot);
    }
    record(samples.combine, at,
           with_link_bytes(samples.combine, measured, [&] { return timed_combine(slot_index, false); }));
    if (check) check_combine(iteration, slot);
  }
  if (plan_.overlap) overlap(iteration, at, check);
  if (gpu_ != nullptr) {
    const std::size_t line = std::size_t{measured} * plan_.ranks + self_.rank();
    return run_stream_noops(line * kStreamNoopsBetween, kStreamNoopsBetween);
  }
  const bool ceiling = context_.ceiling != nullptr;
  if (ceiling && plan_.does_dispatch()) measure_ceiling(samples.dispatch, measured, true);
  if (ceiling && plan_.does_combine()) measure_ceiling(samples.combine, measured, false);
  self_.barrier();
  if (self_.rank() == 0) run_noops(std::size_t{measured} * kNoopsBetween, kNoopsBetween);
}

void Worker::prepare(std::uint32_t iteration, std::uint32_t slot_index) {
  Slot& slot = slots_[slot_index];
  const Choices choices = choices_of(self_.rank(), iteration);
  put(slot.buffers.topk_idx, choices.idx);
  put(slot.buffers.topk_weights, choices.weights);
  if (iteration >= plan_.warmup)
    note_far_bytes(std::size_t{iteration - plan_.warmup} * plan_.ranks + self_.rank(), choices);
  kernels::RoutingInput input;
  input.topk_idx = choices.idx.data();
  input.per_expert = plan_.layout != EPD_LAYOUT_COMPACT;
  input.num_tokens = plan_.tokens;
  input.topk = plan_.topk;
  input.num_ranks = plan_.ranks;
  input.num_experts = plan_.experts;
  bases_ = kit::exchange_rows(input, self_, context_.samples->row_counts.data(), route_);
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

Worker::Choices Worker::choices_of(std::uint32_t rank, std::uint32_t iteration) const {
  Choices choices{std::vector<std::int32_t>(std::size_t{plan_.tokens} * plan_.topk),
                  std::vector<float>(std::size_t{plan_.tokens} * plan_.topk)};
  context_.routing.fill({rank, plan_.ranks, plan_.tokens, iteration}, choices.idx.data(),
                        choices.weights.data());
  return choices;
}

// ---- coordinator

namespace {

constexpr std::chrono::seconds kRunLimit{900};

// A new name for each run: groups of earlier runs may still be ending.
std::string next_group_name() {
  static int number = 0;
  return "epbench-" + std::to_string(::getpid()) + "-" + std::to_string(number++);
}

std::size_t noop_count(const RunPlan& plan) {
  if (plan.on_gpus()) {
    const std::uint32_t each =
        plan.operation == Operation::kNoop ? kStreamNoopsPerIteration : kStreamNoopsBetween;
    return std::size_t{plan.iterations} * plan.ranks * each;
  }
  if (plan.operation != Operation::kNoop) return std::size_t{plan.iterations} * kNoopsBetween;
  return std::size_t{plan.iterations} * plan.ranks * kNoopsPerIteration;
}

}  // namespace

std::unique_ptr<Samples> run_ranks(const RunPlan& plan, const kit::OwnDaemon& daemon,
                                   const std::string& label) {
  validate(plan);
  const std::uint32_t targets = plan.ranks * kit::targets_per_rank(plan.params());
  auto samples = std::make_unique<Samples>(plan.iterations, plan.ranks, noop_count(plan), targets);
  const bool no_ceiling = plan.operation == Operation::kNoop || plan.on_gpus();
  kit::CopyCeiling ceiling(plan.params(), no_ceiling ? 0 : plan.tokens);
  const BarrierWords start_barrier(plan.ranks);
  RunContext context{plan, {daemon.socket()}, next_group_name(), kit::RoutingSource(plan.routing_spec())};
  context.ceiling = &ceiling;
  context.samples = samples.get();
  context.start_barrier = &start_barrier;
  const kit::ProgressLine progress(label, plan.warmup + plan.iterations);
  kit::Team team(plan.ranks);
  kit::Team::Options options;
  options.limit = kRunLimit;
  if (daemon.pid() > 0) options.daemons = {daemon.pid()};
  options.on_progress = [&](std::uint32_t done) { progress.show(done); };
  team.run([&context](kit::TeamRank& self) { Worker(context, self).run(); }, options);
  return samples;
}

}  // namespace epd::bench
