#include "rank.h"

#include "kernels/numbers.h"
#include "kit/compare.h"
#include "kit/error.h"
#include "kit/random.h"
#include "model.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace epd::demo {

namespace reference = kernels::reference;

DemoRank::DemoRank(const DemoContext& context, kit::TeamRank& self)
    : context_(context), plan_(context.plan), self_(self) {}

void DemoRank::run() {
  for (std::uint32_t layer = 0; layer < plan_.model.num_layers; ++layer) {
    experts_.emplace_back(plan_.model, layer, self_.rank());
  }
  connect();
  context_.ceiling->warm(self_.rank());
  for (std::uint32_t pass = 0; pass < plan_.passes(); ++pass) {
    measuring_ = pass > 0;
    note_link_bytes(pass);
    load_text(pass);
    double pass_us = 0;
    for (std::uint32_t begin = 0; begin < plan_.model.num_layers; begin += plan_.segment()) {
      const std::uint32_t end = std::min(begin + plan_.segment(), plan_.model.num_layers);
      poison_slots();
      self_.barrier();
      if (measuring_) {
        pass_us += overlapped_layers(begin, end);
      } else {
        lone_layers(begin, end);
      }
      note_results(pass, begin, end);
      for (std::uint32_t layer = begin; layer < end; ++layer) {
        for (std::uint32_t m = 0; m < kMicroBatches; ++m) check(layer, m);
        if (self_.rank() == 0) self_.set_progress(pass * plan_.model.num_layers + layer + 1);
      }
    }
    context_.records->checksums[std::size_t{pass} * self_.size() + self_.rank()] = checksum();
    if (measuring_) {
      context_.records->step_us[std::size_t{pass - 1} * self_.size() + self_.rank()] = pass_us;
    }
  }
  note_link_bytes(plan_.passes());  // and no rank leaves while others still work
}

void DemoRank::connect() {
  const kit::RankPlace place = kit::place_of(self_.rank(), self_.size(), plan_.nodes);
  session_ = kit::attach(context_.sockets[place.node], "host:" + std::to_string(place.device));
  epd_group_config_t config;
  epd_group_config_init(&config);
  config.name = context_.group.c_str();
  config.rank = static_cast<std::int32_t>(self_.rank());
  config.num_ranks = self_.size();
  config.num_experts = plan_.model.gate.num_experts;
  config.max_tokens = plan_.max_tokens();
  config.hidden = plan_.model.hidden;
  config.topk = plan_.model.gate.topk;
  config.depth = plan_.segment() * kMicroBatches;
  config.payload = EPD_PAYLOAD_FP8_CAST;
  config.sum_ranks = plan_.sum_ranks;
  config.span = plan_.nodes > 1 ? EPD_SPAN_CLUSTER : EPD_SPAN_NODE;
  group_ = kit::join(session_.get(), config);
  plan_.sum_ranks = epd_group_sum_ranks(group_.get());
  slots_.resize(config.depth);
  for (std::uint32_t i = 0; i < config.depth; ++i) slots_[i].buffers = kit::buffers_of(group_.get(), i);
  if (self_.rank() == 0) {
    context_.records->sum_ranks[0] = plan_.sum_ranks;
    const std::string name = kit::daemon_name(session_.get());
    std::strncpy(context_.records->daemon.data(), name.c_str(), context_.records->daemon.size() - 1);
  }
}

// Call only when no operation is in flight.
void DemoRank::note_link_bytes(std::uint32_t pass) {
  self_.barrier();
  if (self_.rank() == 0 && context_.nodes != nullptr)
    context_.records->link_bytes[pass] = context_.nodes->link_bytes();
  self_.barrier();
}

// Each pass and rank reads on in the text, and begins again at its end.
void DemoRank::load_text(std::uint32_t pass) {
  const std::uint32_t hidden = plan_.model.hidden;
  std::size_t place = (std::size_t{pass} * self_.size() + self_.rank()) * plan_.tokens;
  for (std::uint32_t m = 0; m < kMicroBatches; ++m) {
    states_[m].resize(std::size_t{plan_.micro_batch(m)} * hidden);
    for (std::uint32_t t = 0; t < plan_.micro_batch(m); ++t, ++place) {
      embed(context_.pieces, place % context_.pieces.size(), hidden, &states_[m][std::size_t{t} * hidden]);
    }
  }
}

void DemoRank::poison_slots() {
  for (const Slot& slot : slots_) {
    const kernels::RowRange all{0, self_.size() * plan_.max_tokens()};
    kit::poison_dispatch(plan_.params(), {&all, 1}, slot.buffers);
    kit::poison_combine(plan_.params(), plan_.max_tokens(), slot.buffers);
  }
}

// While the rows of one micro-batch travel, this process computes on the other:
//   gate 0 | gate 1 | experts 0 | experts 1 | next layer's gate 0 | ...
//        d0 ========|       c0 ============ |
//                 d1 ==========|        c1 ==============|
double DemoRank::overlapped_layers(std::uint32_t begin, std::uint32_t end) {
  const double started = kit::now_us();
  for (std::uint32_t layer = begin; layer <= end; ++layer) {
    for (std::uint32_t m = 0; m < kMicroBatches; ++m) {
      if (layer > begin) {
        wait(layer - 1, m, "combine");
        add_output(layer - 1, m);
      }
      if (layer == end) continue;
      choose_experts(layer, m);
      Slot& at = slot(layer, m);
      at.ticket = kit::submit_dispatch(group_.get(), slot_index(layer, m), plan_.micro_batch(m), &at.handle);
    }
    for (std::uint32_t m = 0; m < kMicroBatches && layer < end; ++m) {
      Slot& at = slot(layer, m);
      at.num_recv_rows = wait(layer, m, "dispatch").num_recv_rows;
      run_experts(layer, m);
      at.ticket = kit::submit_combine(group_.get(), slot_index(layer, m), at.handle);
    }
  }
  return kit::now_us() - started;
}

// The same layers with each operation alone, several times, next to copies of the same bytes.
void DemoRank::lone_layers(std::uint32_t begin, std::uint32_t end) {
  for (std::uint32_t layer = begin; layer < end; ++layer) {
    for (std::uint32_t m = 0; m < kMicroBatches; ++m) {
      choose_experts(layer, m);
      exchange_counts(layer, m);
      probe_dispatch(layer, m);
      run_experts(layer, m);
      probe_combine(layer, m);
      add_output(layer, m);
    }
  }
}

// RMSNorm, then the gate on what will be sent: the values rounded to bf16.
void DemoRank::choose_experts(std::uint32_t layer, std::uint32_t m) {
  const std::uint32_t hidden = plan_.model.hidden;
  const std::uint32_t tokens = plan_.micro_batch(m);
  const Slot& at = slot(layer, m);
  auto* x = static_cast<std::uint16_t*>(at.buffers.x);
  normed_ = states_[m];
  for (std::uint32_t t = 0; t < tokens; ++t) rms_normalize(&normed_[std::size_t{t} * hidden], hidden);
  for (std::size_t i = 0; i < normed_.size(); ++i) {
    x[i] = kernels::float_to_bf16(normed_[i]);
    normed_[i] = kernels::bf16_to_float(x[i]);
  }
  context_.gates[layer].select(normed_.data(), tokens, static_cast<std::int32_t*>(at.buffers.topk_idx),
                               at.buffers.topk_weights);
}

void DemoRank::run_experts(std::uint32_t layer, std::uint32_t m) {
  const Slot& at = slot(layer, m);
  const ExpertInput input{at.num_recv_rows, static_cast<const std::uint8_t*>(at.buffers.recv_x),
                          static_cast<const float*>(at.buffers.recv_scales),
                          static_cast<const std::int32_t*>(at.buffers.recv_topk_idx),
                          at.buffers.recv_topk_weights};
  experts_[layer].run(input, static_cast<std::uint16_t*>(at.buffers.y));
}

void DemoRank::add_output(std::uint32_t layer, std::uint32_t m) {
  const auto* out = static_cast<const std::uint16_t*>(slot(layer, m).buffers.out);
  for (std::size_t i = 0; i < states_[m].size(); ++i) states_[m][i] += kernels::bf16_to_float(out[i]);
}

epd_result_t DemoRank::wait(std::uint32_t layer, std::uint32_t m, const char* what) {
  const double begin = kit::now_us();
  const epd_result_t result = kit::finish(group_.get(), slot(layer, m).ticket, what);
  if (measuring_) {
    record(layer).blocked_us += kit::now_us() - begin;
    record(layer).operation_us += result.done_us;
  }
  return result;
}

void DemoRank::exchange_counts(std::uint32_t layer, std::uint32_t m) {
  kernels::RoutingInput input;
  input.topk_idx = slot(layer, m).buffers.topk_idx;
  input.num_tokens = plan_.micro_batch(m);
  input.topk = plan_.model.gate.topk;
  input.num_ranks = self_.size();
  input.num_experts = plan_.model.gate.num_experts;
  bases_ = kit::exchange_rows(input, self_, context_.records->row_counts.data(), route_);
  record(layer).moved_rows[m] = static_cast<double>(route_.entries.size());
}

void DemoRank::probe_dispatch(std::uint32_t layer, std::uint32_t m) {
  Slot& at = slot(layer, m);
  for (std::uint32_t i = m * kProbes; i < (m + 1) * kProbes; ++i) {
    self_.barrier();
    const double begin = kit::now_us();
    at.ticket = kit::submit_dispatch(group_.get(), slot_index(layer, m), plan_.micro_batch(m), &at.handle);
    at.num_recv_rows = kit::finish(group_.get(), at.ticket, "dispatch").num_recv_rows;
    record(layer).dispatch_us[i] = kit::now_us() - begin;
    self_.barrier();
    record(layer).dispatch_ceiling_us[0][i] = kit::now_us();
    context_.ceiling->copy_dispatch(self_.rank(), route_, bases_, kit::copy_kind(i));
    record(layer).dispatch_ceiling_us[1][i] = kit::now_us();
  }
}

void DemoRank::probe_combine(std::uint32_t layer, std::uint32_t m) {
  Slot& at = slot(layer, m);
  for (std::uint32_t i = m * kProbes; i < (m + 1) * kProbes; ++i) {
    self_.barrier();
    const double begin = kit::now_us();
    at.ticket = kit::submit_combine(group_.get(), slot_index(layer, m), at.handle);
    kit::finish(group_.get(), at.ticket, "combine");
    record(layer).combine_us[i] = kit::now_us() - begin;
    self_.barrier();
    record(layer).combine_ceiling_us[0][i] = kit::now_us();
    context_.ceiling->copy_combine(self_.rank(), route_, bases_, kit::copy_kind(i));
    record(layer).combine_ceiling_us[1][i] = kit::now_us();
  }
}

void DemoRank::publish(const Slot& at, std::uint32_t m) {
  Publication& mine = context_.records->published[self_.rank()];
  const std::size_t tokens = plan_.micro_batch(m);
  const std::size_t hidden = plan_.model.hidden;
  const std::size_t topk = plan_.model.gate.topk;
  std::copy_n(static_cast<const std::uint16_t*>(at.buffers.x), tokens * hidden, mine.x.data());
  std::copy_n(static_cast<const std::int32_t*>(at.buffers.topk_idx), tokens * topk, mine.topk_idx.data());
  std::copy_n(at.buffers.topk_weights, tokens * topk, mine.topk_weights.data());
  std::copy_n(static_cast<const std::uint16_t*>(at.buffers.y), at.num_recv_rows * hidden, mine.y.data());
  mine.received[0] = at.num_recv_rows;
}

// Every rank publishes its inputs and y. Then it compares what it received and combined with the oracle.
void DemoRank::check(std::uint32_t layer, std::uint32_t m) {
  const Slot& at = slot(layer, m);
  publish(at, m);
  self_.barrier();
  std::vector<reference::RankInput> inputs;
  std::vector<reference::CombineInput> answers;
  for (const Publication& rank : context_.records->published) {
    inputs.push_back(kit::make_input(plan_.params(), {plan_.micro_batch(m), rank.x.data(),
                                                      rank.topk_idx.data(), rank.topk_weights.data()}));
    answers.emplace_back().y.assign(rank.y.data(),
                                    rank.y.data() + std::size_t{rank.received[0]} * plan_.model.hidden);
  }
  const auto received = reference::dispatch_to(plan_.params(), inputs, self_.rank());
  add_verdict(layer, "dispatch",
              kit::compare_dispatch(plan_.params(), received, at.num_recv_rows, at.buffers));
  const auto out = reference::combine_to(plan_.params(), inputs, answers, {}, self_.rank());
  add_verdict(layer, "combine", kit::compare_combine(plan_.params(), out, at.buffers));
  self_.barrier();  // what is published may change
}

void DemoRank::add_verdict(std::uint32_t layer, const std::string& what, const std::string& difference) {
  record(layer).verdict.add(
      "layer " + std::to_string(layer) + ", rank " + std::to_string(self_.rank()) + ", " + what, difference);
}

void DemoRank::note_results(std::uint32_t pass, std::uint32_t begin, std::uint32_t end) {
  const std::uint32_t topk = plan_.model.gate.topk;
  const std::uint32_t local = plan_.model.experts_per_rank();
  DemoRecords& records = *context_.records;
  for (std::uint32_t layer = begin; layer < end; ++layer) {
    const std::size_t block = (std::size_t{pass} * plan_.model.num_layers + layer) * self_.size();
    std::int32_t* routing = &records.routing[(block + self_.rank()) * plan_.tokens * topk];
    for (std::uint32_t m = 0; m < kMicroBatches; ++m) {
      const Slot& at = slot(layer, m);
      const std::size_t choices = std::size_t{plan_.micro_batch(m)} * topk;
      routing = std::copy_n(static_cast<const std::int32_t*>(at.buffers.topk_idx), choices, routing);
      if (!measuring_) continue;
      record(layer).received_rows += at.num_recv_rows;
      std::uint64_t* counts = &records.expert_counts[std::size_t{layer} * plan_.model.gate.num_experts +
                                                     std::size_t{self_.rank()} * local];
      for (std::uint32_t e = 0; e < local; ++e) {
        counts[e] += static_cast<std::uint64_t>(at.buffers.expert_counts[e]);
      }
    }
  }
}

std::uint64_t DemoRank::checksum() const {
  std::uint64_t sum = 0;
  for (const std::vector<float>& states : states_) {
    for (const float value : states) sum = kit::mix64(sum ^ std::bit_cast<std::uint32_t>(value));
  }
  return sum;
}

}  // namespace epd::demo
