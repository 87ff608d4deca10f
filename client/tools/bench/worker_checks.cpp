// Worker: what was delivered, against the reference.
#include "kernels/reference.h"
#include "kit/compare.h"
#include "worker.h"

#include <cstring>
#include <vector>

namespace epd::bench {
namespace {

namespace reference = kernels::reference;

// The output of an operation, in memory of this process, for the comparison.
class Snapshot {
 public:
  // Copies of the group's regions `from`: rows [0, rows) that dispatch delivers, with row-major scales, or
  // the tokens' rows that combine delivers. The regions have room for `recv_rows`.
  static Snapshot of_dispatch(const reference::GroupParams& params, const epd_buffers_t& from,
                              std::size_t rows, std::size_t recv_rows, RankDevice& device);
  static Snapshot of_combine(const reference::GroupParams& params, const epd_buffers_t& from,
                             std::size_t tokens, RankDevice& device);

  // Keeps only these values and their scales of dispatched bf16 or cast rows, as if the rows had no others.
  void keep_columns(const reference::GroupParams& params, std::uint32_t first, std::uint32_t count);

  // Only regions of that operation; the others are null.
  const epd_buffers_t& buffers() const { return buffers_; }

 private:
  void take_scales(const reference::GroupParams& params, const epd_buffers_t& from, std::size_t recv_rows,
                   RankDevice& device);
  template <typename T>
  void take(T* epd_buffers_t::*region, const epd_buffers_t& from, std::size_t bytes, RankDevice& device);

  std::vector<std::vector<char>> memory_;
  std::size_t rows_ = 0;
  epd_buffers_t buffers_{};
};

template <typename T>
void Snapshot::take(T* epd_buffers_t::*region, const epd_buffers_t& from, std::size_t bytes,
                    RankDevice& device) {
  if (from.*region == nullptr) return;
  std::vector<char>& copy = memory_.emplace_back(bytes);
  device.get(copy.data(), from.*region, bytes);
  buffers_.*region = reinterpret_cast<T*>(copy.data());
}

// Those that lie in columns, by rows.
void Snapshot::take_scales(const reference::GroupParams& params, const epd_buffers_t& from,
                           std::size_t recv_rows, RankDevice& device) {
  if (from.recv_scales == nullptr) return;
  std::vector<char> columns(reference::num_scale_words(params, recv_rows) * 4);
  device.get(columns.data(), from.recv_scales, columns.size());
  device.settle();
  const std::vector<std::uint8_t> rows = reference::scales_by_row(params, recv_rows, columns.data());
  buffers_.recv_scales = memory_.emplace_back(rows.begin(), rows.end()).data();
}

Snapshot Snapshot::of_dispatch(const reference::GroupParams& params, const epd_buffers_t& from,
                               std::size_t rows, std::size_t recv_rows, RankDevice& device) {
  Snapshot made;
  made.rows_ = rows;
  const auto take = [&](auto region, std::size_t bytes) { made.take(region, from, bytes, device); };
  const std::size_t choices = params.layout == reference::Layout::kCompact ? params.topk : 1;
  const std::size_t experts = params.num_experts / params.num_ranks;
  take(&epd_buffers_t::recv_x, rows * reference::row_bytes(params));
  if (params.scale_layout == abi::ScaleLayout::kRowMajor) {
    take(&epd_buffers_t::recv_scales, rows * reference::scale_bytes(params));
  } else {
    made.take_scales(params, from, recv_rows, device);
  }
  take(&epd_buffers_t::recv_topk_idx, rows * choices * sizeof(std::int32_t));
  take(&epd_buffers_t::recv_topk_weights, rows * choices * sizeof(float));
  take(&epd_buffers_t::recv_src, rows * 2 * sizeof(std::int32_t));
  take(&epd_buffers_t::rank_offsets, (params.num_ranks + 1) * sizeof(std::int32_t));
  take(&epd_buffers_t::expert_counts, experts * sizeof(std::int32_t));
  take(&epd_buffers_t::expert_offsets, (experts + 1) * sizeof(std::int32_t));
  take(&epd_buffers_t::source_ranges, experts * params.num_ranks * 2 * sizeof(std::int32_t));
  device.settle();
  return made;
}

// Keeps the bytes from `first` on of each row of `width` bytes.
void keep_bytes(void* region, std::size_t rows, std::size_t width, std::size_t first, std::size_t count) {
  auto* const bytes = static_cast<char*>(region);
  for (std::size_t row = 0; row < rows; ++row)
    std::memmove(bytes + row * count, bytes + row * width + first, count);
}

void Snapshot::keep_columns(const reference::GroupParams& params, std::uint32_t first, std::uint32_t count) {
  if (count == params.hidden) return;
  const std::size_t width = reference::row_bytes(params);
  const std::size_t value = width / params.hidden;
  keep_bytes(buffers_.recv_x, rows_, width, first * value, count * value);
  reference::GroupParams before = params;
  reference::GroupParams kept = params;
  before.hidden = first;
  kept.hidden = count;
  if (buffers_.recv_scales == nullptr) return;
  keep_bytes(buffers_.recv_scales, rows_, reference::scale_bytes(params), reference::scale_bytes(before),
             reference::scale_bytes(kept));
}

Snapshot Snapshot::of_combine(const reference::GroupParams& params, const epd_buffers_t& from,
                              std::size_t tokens, RankDevice& device) {
  Snapshot made;
  made.take(&epd_buffers_t::out, from, tokens * params.hidden * 2, device);
  made.take(&epd_buffers_t::out_weights, from, tokens * params.topk * sizeof(float), device);
  device.settle();
  return made;
}

// Like keep_bytes, for rows of bf16 values.
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
  // The oracle takes all blocks of layout expert, but reads only filled rows.
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
  params.scale_layout = abi::ScaleLayout::kRowMajor;  // as in a snapshot
  std::vector<reference::RankInput> inputs;
  for (std::uint32_t rank = 0; rank < plan_.ranks; ++rank) {
    inputs.push_back(input_of(rank, iteration, true));
    keep_columns(params_.hidden, columns, inputs.back().x);
  }
  const auto expected = reference::dispatch_to(params, inputs, self_.rank());
  Snapshot snapshot;
  const bool in_columns = params_.scale_layout != params.scale_layout;
  if (gpu_ != nullptr || columns.count != params_.hidden || in_columns) {
    snapshot = Snapshot::of_dispatch(params_, slot.buffers, end_of_rows(self_.rank()),
                                     plan_.shape().recv_rows(), *device_);
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
  const auto expected = reference::combine_to(
      params_, inputs, answers, {plan_.weighted, plan_.return_weights ? abi::kReturnOwn : abi::kReturnNone},
      self_.rank());
  Snapshot snapshot;
  if (gpu_ != nullptr) snapshot = Snapshot::of_combine(params_, slot.buffers, plan_.tokens, *device_);
  const epd_buffers_t& delivered = gpu_ != nullptr ? snapshot.buffers() : slot.buffers;
  add_verdict(context_.samples->combine, "combine, iteration " + std::to_string(iteration),
              kit::compare_combine(params_, expected, delivered));
}

void Worker::add_verdict(const OperationSamples& samples, const std::string& what,
                         const std::string& difference) {
  samples.verdicts[self_.rank()].add("rank " + std::to_string(self_.rank()) + ": " + what, difference);
}

}  // namespace epd::bench
