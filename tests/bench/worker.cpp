#include "worker.h"

#include "kernels/reference.h"
#include "kit/compare.h"
#include "kit/error.h"
#include "kit/random.h"

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

std::size_t evict_bytes() {
  const long l2 = ::sysconf(_SC_LEVEL2_CACHE_SIZE);
  return std::max(kMinEvictBytes, 2 * static_cast<std::size_t>(std::max(l2, 0L)));
}

}  // namespace

Worker::Worker(const RunContext& context, kit::TeamRank& self)
    : context_(context), plan_(context.plan), self_(self), evict_(evict_bytes(), 1) {}

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
  epd_group_config_t config = EPD_GROUP_CONFIG_INIT;
  config.name = context_.group.c_str();
  config.rank = static_cast<std::int32_t>(self_.rank());
  config.num_ranks = plan_.ranks;
  config.num_experts = plan_.experts;
  config.max_tokens = std::max(plan_.tokens, 1u);
  config.hidden = plan_.hidden;
  config.topk = plan_.topk;
  config.depth = plan_.depth;
  config.payload = plan_.fp8 ? EPD_PAYLOAD_FP8_CAST : EPD_PAYLOAD_BF16;
  config.sms = plan_.sms;
  group_ = kit::join(session_.get(), config);
  if (self_.rank() == 0) {
    const std::string name = kit::daemon_name(session_.get());
    std::strncpy(context_.samples->daemon.data(), name.c_str(), context_.samples->daemon.size() - 1);
  }
}

// x and y stay as they are in all iterations: every rank can make every other rank's again for the oracle.
void Worker::fill_slots() {
  slots_.resize(plan_.depth);
  const std::size_t tokens = std::max(plan_.tokens, 1u);
  for (std::uint32_t i = 0; i < plan_.depth; ++i) {
    slots_[i].buffers = kit::buffers_of(group_.get(), i);
    const epd_buffers_t& buffers = slots_[i].buffers;
    kit::fill_bf16(x_seed(plan_, self_.rank()), static_cast<std::uint16_t*>(buffers.x),
                   tokens * plan_.hidden);
    kit::fill_bf16(y_seed(plan_, self_.rank()), static_cast<std::uint16_t*>(buffers.y),
                   tokens * plan_.ranks * plan_.hidden);
    kit::poison_dispatch(plan_.params(), static_cast<std::uint32_t>(tokens), buffers);
    kit::poison_combine(plan_.params(), static_cast<std::uint32_t>(tokens), buffers);
  }
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
  if (check) {
    kit::poison_dispatch(plan_.params(), std::max(plan_.tokens, 1u), slot.buffers);
    kit::poison_combine(plan_.params(), std::max(plan_.tokens, 1u), slot.buffers);
  }
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
  const Slot& slot = slots_[iteration % plan_.depth];
  const kit::RoutingRequest request{self_.rank(), plan_.ranks, plan_.tokens, iteration};
  auto* idx = static_cast<std::int32_t*>(slot.buffers.topk_idx);
  context_.routing.fill(request, idx, slot.buffers.topk_weights);
  const kernels::RoutingInput input{idx, false, plan_.tokens, plan_.topk, plan_.ranks, plan_.experts};
  const kernels::RoutingError error = kernels::build_routing_plan(input, route_);
  if (error.bad) kit::fail("the routing chose expert " + std::to_string(error.value));
  std::uint32_t* counts = context_.samples->row_counts.data();
  self_.barrier();  // the previous iteration's counts are no longer read
  std::copy(route_.rank_counts.begin(), route_.rank_counts.end(),
            counts + std::size_t{self_.rank()} * plan_.ranks);
  self_.barrier();
  bases_ = kit::base_rows(counts, plan_.ranks, self_.rank());
}

double Worker::timed_dispatch(Slot& slot, std::uint32_t slot_index, epd_result_t& result) {
  flush_cache();
  self_.barrier();
  const double begin = kit::now_us();
  const epd_ticket_t ticket = kit::submit_dispatch(group_.get(), {slot_index, plan_.tokens}, &slot.handle);
  result = kit::finish(group_.get(), ticket, "dispatch");
  return kit::now_us() - begin;
}

double Worker::timed_combine(Slot& slot, std::uint32_t slot_index) {
  flush_cache();
  self_.barrier();
  const double begin = kit::now_us();
  const epd_ticket_t ticket = kit::submit_combine(group_.get(), slot_index, slot.handle, plan_.weighted);
  kit::finish(group_.get(), ticket, "combine");
  return kit::now_us() - begin;
}

void Worker::record(OperationSamples& samples, std::size_t at, double time_us) const {
  const std::uint32_t* counts = context_.samples->row_counts.data();
  const auto moved = static_cast<std::uint32_t>(route_.entries.size());
  samples.time_us[at] = time_us;
  samples.moved_rows[at] = moved;
  samples.wire_rows[at] = moved - counts[self_.rank() * plan_.ranks + self_.rank()];
  samples.logical_rows[at] = kit::received_rows(counts, plan_.ranks, self_.rank());
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

void Worker::check_dispatch(std::uint32_t iteration, const Slot& slot, std::uint32_t num_recv_rows) {
  std::vector<reference::RankInput> inputs;
  std::vector<std::uint16_t> x(std::size_t{plan_.tokens} * plan_.hidden);
  for (std::uint32_t rank = 0; rank < plan_.ranks; ++rank) {
    const Choices choices = choices_of(rank, iteration);
    kit::fill_bf16(x_seed(plan_, rank), x.data(), x.size());
    inputs.push_back(kit::make_input(plan_.params(),
                                     {plan_.tokens, x.data(), choices.idx.data(), choices.weights.data()}));
  }
  const auto expected = reference::dispatch_to(plan_.params(), inputs, self_.rank());
  add_verdict("dispatch, iteration " + std::to_string(iteration),
              kit::compare_dispatch(plan_.params(), expected, num_recv_rows, slot.buffers));
}

void Worker::check_combine(std::uint32_t iteration, const Slot& slot) {
  std::vector<reference::RankInput> inputs;
  std::vector<std::vector<std::uint16_t>> y;
  for (std::uint32_t rank = 0; rank < plan_.ranks; ++rank) {
    const Choices choices = choices_of(rank, iteration);
    inputs.push_back(
        kit::make_input(plan_.params(), {plan_.tokens, nullptr, choices.idx.data(), choices.weights.data()}));
    const std::uint32_t* counts = context_.samples->row_counts.data();
    y.emplace_back(std::size_t{kit::received_rows(counts, plan_.ranks, rank)} * plan_.hidden);
    kit::fill_bf16(y_seed(plan_, rank), y.back().data(), y.back().size());
  }
  const auto expected = reference::combine_to(plan_.params(), inputs, y, plan_.weighted, self_.rank());
  add_verdict("combine, iteration " + std::to_string(iteration),
              kit::compare_combine(plan_.params(), expected, slot.buffers));
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
