#include "worker.h"

#include "kernels/reference.h"
#include "kit/compare.h"
#include "kit/error.h"
#include "kit/random.h"
#include "proto/arena.h"

#include <algorithm>
#include <cstring>

#include <unistd.h>

namespace epd::bench {
namespace {

namespace reference = kernels::reference;

constexpr std::size_t kMinEvictBytes = std::size_t{8} << 20;

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

template <typename T>
void put(void* region, const std::vector<T>& data) {
  if (region != nullptr && !data.empty()) std::memcpy(region, data.data(), data.size() * sizeof(T));
}

// A rank that checks a combine needs the y of all; beyond this one rank checks, in turn.
bool oracle_is_large(const RunPlan& plan) {
  if (plan.layout == EPD_LAYOUT_COMPACT) return false;
  return std::uint64_t{plan.ranks} * plan.tokens * plan.topk * plan.hidden * 2 > std::uint64_t{1} << 30;
}

std::size_t evict_bytes() {
  const long l2 = ::sysconf(_SC_LEVEL2_CACHE_SIZE);
  return std::max(kMinEvictBytes, 2 * static_cast<std::size_t>(std::max(l2, 0L)));
}

}  // namespace

Worker::Worker(const RunContext& context, kit::TeamRank& self)
    : context_(context),
      plan_(context.plan),
      self_(self),
      params_(context.plan.params()),
      evict_(evict_bytes(), 1) {}

void Worker::run() {
  connect();
  if (plan_.operation == Operation::kNoop) {
    self_.barrier();
    for (std::uint32_t i = 0; i < plan_.warmup + plan_.iterations; ++i) {
      const std::size_t at = i < plan_.warmup ? 0 : i - plan_.warmup;
      run_noops((at * self_.size() + self_.rank()) * kNoopsPerIteration, kNoopsPerIteration);
      if (self_.rank() == 0) self_.set_progress(i + 1);
    }
  } else {
    fill_slots();
    context_.ceiling->warm(self_.rank());
    for (std::uint32_t i = 0; i < plan_.warmup + plan_.iterations; ++i) {
      iterate(i);
      if (self_.rank() == 0) self_.set_progress(i + 1);
    }
  }
  self_.barrier();  // nobody leaves while others still measure
}

void Worker::connect() {
  session_ = kit::attach(context_.socket, "host:" + std::to_string(self_.rank()));
  epd_group_config_t config = plan_.config();
  config.name = context_.group.c_str();
  config.rank = static_cast<std::int32_t>(self_.rank());
  group_ = kit::join(session_.get(), config);
  if (self_.rank() == 0) {
    const std::string name = kit::daemon_name(session_.get());
    std::strncpy(context_.samples->daemon.data(), name.c_str(), context_.samples->daemon.size() - 1);
  }
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
      kit::poison_dispatch(params_, {&all, 1}, buffers);
    }
    kit::poison_combine(params_, plan_.max_tokens(), buffers);
  }
}

// For the rows that this iteration's combine may read, and some more, so that it is seldom done again.
void Worker::fill_y(Slot& slot) const {
  const std::size_t end = end_of_rows(self_.rank());
  if (end <= slot.rows_of_y) return;
  const std::size_t room = plan_.shape().recv_rows();
  slot.rows_of_y = plan_.layout == EPD_LAYOUT_COMPACT ? room : std::min(room, end * 9 / 8);
  const std::size_t values = slot.rows_of_y * plan_.hidden;
  kit::fill_bf16(y_seed(plan_, self_.rank()), static_cast<std::uint16_t*>(slot.buffers.y), values);
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

// One iteration, all ranks in step: prepare, (barrier, dispatch), check, (barrier, combine), check,
// ceilings, no-ops. Only what is between a barrier and the end of the wait is timed.
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
    const epd_ticket_t ticket = kit::submit(group_.get(), dispatch_args(slot_index), &slot.handle);
    kit::finish(group_.get(), ticket, "dispatch");
  }
  if (check) poison(slot);
  epd_result_t result = EPD_RESULT_INIT;
  const double dispatch_us = timed_dispatch(slot, slot_index, result);
  if (!warm) record(samples.dispatch, at, dispatch_us);
  if (check && plan_.does_dispatch()) check_dispatch(iteration, slot, result.num_recv_rows);
  if (plan_.does_combine()) {
    const double combine_us = timed_combine(slot, slot_index);
    if (!warm) record(samples.combine, at, combine_us);
    if (check) check_combine(iteration, slot);
  }
  if (plan_.does_dispatch()) measure_ceiling(samples.dispatch, measured, true);
  if (plan_.does_combine()) measure_ceiling(samples.combine, measured, false);
  self_.barrier();
  if (self_.rank() == 0) run_noops(std::size_t{measured} * kNoopsBetween, kNoopsBetween);
}

void Worker::prepare(std::uint32_t iteration) {
  Slot& slot = slots_[iteration % plan_.depth];
  const kit::RoutingRequest request{self_.rank(), plan_.ranks, plan_.tokens, iteration};
  auto* idx = static_cast<std::int32_t*>(slot.buffers.topk_idx);
  context_.routing.fill(request, idx, slot.buffers.topk_weights);
  kernels::RoutingInput input;
  input.topk_idx = idx;
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

void Worker::poison(const Slot& slot) {
  kit::poison_dispatch(params_, filled_rows(self_.rank()), slot.buffers);
  kit::poison_combine(params_, plan_.max_tokens(), slot.buffers);
}

epd_dispatch_args_t Worker::dispatch_args(std::uint32_t slot_index) const {
  epd_dispatch_args_t args = EPD_DISPATCH_ARGS_INIT;
  args.slot = slot_index;
  args.num_tokens = plan_.tokens;
  args.zero_padding = plan_.zero_padding ? 1 : 0;
  args.mark_unused = plan_.mark_unused ? 1 : 0;
  return args;
}

double Worker::timed_dispatch(Slot& slot, std::uint32_t slot_index, epd_result_t& result) {
  flush_cache();
  self_.barrier();
  epd_dispatch_args_t args = dispatch_args(slot_index);
  if (plan_.cached) args.handle = slot.handle;
  const double begin = kit::now_us();
  const epd_ticket_t ticket = kit::submit(group_.get(), args, &slot.handle);
  result = kit::finish(group_.get(), ticket, "dispatch");
  return kit::now_us() - begin;
}

double Worker::timed_combine(Slot& slot, std::uint32_t slot_index) {
  flush_cache();
  self_.barrier();
  epd_combine_args_t args = EPD_COMBINE_ARGS_INIT;
  args.slot = slot_index;
  args.handle = slot.handle;
  args.weighted = plan_.weighted ? 1 : 0;
  args.num_biases = plan_.biases;
  args.return_weights = plan_.return_weights ? 1 : 0;
  const double begin = kit::now_us();
  const epd_ticket_t ticket = kit::submit(group_.get(), args);
  kit::finish(group_.get(), ticket, "combine");
  return kit::now_us() - begin;
}

void Worker::record(OperationSamples& samples, std::size_t at, double time_us) const {
  const auto moved = static_cast<std::uint32_t>(route_.entries.size());
  samples.time_us[at] = time_us;
  samples.moved_rows[at] = moved;
  samples.wire_rows[at] = moved - kit::rows_between(counts(), self_.rank(), self_.rank());
  samples.logical_rows[at] = kit::received_rows(counts(), self_.rank());
}

void Worker::measure_ceiling(OperationSamples& samples, std::uint32_t measured, bool of_dispatch) {
  const std::size_t at = std::size_t{measured} * plan_.ranks + self_.rank();
  const kit::CopyKind kind = kit::copy_kind(measured);
  flush_cache();
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
  std::vector<reference::RankInput> inputs;
  for (std::uint32_t rank = 0; rank < plan_.ranks; ++rank) inputs.push_back(input_of(rank, iteration, true));
  const auto expected = reference::dispatch_to(params_, inputs, self_.rank());
  add_verdict("dispatch, iteration " + std::to_string(iteration),
              kit::compare_dispatch(params_, expected, num_recv_rows, slot.buffers));
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
  add_verdict("combine, iteration " + std::to_string(iteration),
              kit::compare_combine(params_, expected, slot.buffers));
}

void Worker::add_verdict(const std::string& what, const std::string& difference) {
  Verdict& verdict = context_.samples->verdicts[self_.rank()];
  ++verdict.checks;
  if (difference.empty()) return;
  if (verdict.failures++ != 0) return;
  const std::string text = "rank " + std::to_string(self_.rank()) + ": " + what + ": " + difference;
  std::strncpy(verdict.first, text.c_str(), sizeof(verdict.first) - 1);
}

// More than the core's own caches hold, so that inputs and outputs are not in them.
void Worker::flush_cache() {
  constexpr std::size_t kLine = 64;
  volatile char* bytes = evict_.data();
  for (std::size_t i = 0; i < evict_.size(); i += kLine) bytes[i] = static_cast<char>(bytes[i] + 1);
}

}  // namespace epd::bench
