#include "support/echo.h"

#include <cstring>

namespace epd::test {
namespace {

std::string name(std::uint64_t round, const char* what) {
  return std::string(what) + " of round " + std::to_string(round);
}

}  // namespace

std::vector<Input> inputs_of(const Case& c, std::uint64_t round) {
  std::vector<Input> inputs;
  for (std::uint32_t rank = 0; rank < c.num_ranks; ++rank) inputs.push_back(input_of(c, rank, round));
  return inputs;
}

Answer answer_of(const Case& c, const std::vector<Input>& inputs, std::uint32_t rank) {
  const auto received = kernels::reference::dispatch_to(c.params(), inputs, rank);
  Answer answer;
  answer.y.resize(received.recv_x.size() / 2);
  if (!answer.y.empty()) std::memcpy(answer.y.data(), received.recv_x.data(), received.recv_x.size());
  return answer;
}

// The expert answers a row with the row, so rows must be numbers that can be added.
Input input_of(const Case& c, std::uint32_t rank, std::uint64_t round) {
  Input input = make_input(c, rank, round);
  std::vector<std::uint16_t> row(c.hidden);
  for (std::uint32_t t = 0; t < input.num_tokens; ++t) {
    make_y_row(c, rank, round, t, row.data());
    std::memcpy(&input.x[std::size_t{t} * c.hidden * 2], row.data(), row.size() * 2);
  }
  return input;
}

std::uint32_t rows_received(const Case& c, const epd_buffers_t& buffers) {
  const std::uint32_t experts = c.num_experts / c.num_ranks;
  if (c.layout == EPD_LAYOUT_COMPACT) return static_cast<std::uint32_t>(buffers.rank_offsets[c.num_ranks]);
  if (c.layout == EPD_LAYOUT_PACKED) return static_cast<std::uint32_t>(buffers.expert_offsets[experts]);
  std::uint32_t rows = 0;
  for (std::uint32_t e = 0; e < experts; ++e) rows += static_cast<std::uint32_t>(buffers.expert_counts[e]);
  return rows;
}

std::string check_received(const Case& c, const epd_buffers_t& copy, std::uint32_t rank, std::uint64_t round,
                           std::uint32_t num_recv_rows, const std::set<std::uint32_t>& lost) {
  epd_result_t result;
  epd_result_init(&result);
  result.num_recv_rows = num_recv_rows;
  const std::string text =
      check_dispatch(c, copy, without_ranks(c, inputs_of(c, round), lost), rank, result, nullptr);
  return text.empty() ? "" : name(round, "dispatch") + ": " + text;
}

std::string check_combined(const Case& c, const epd_buffers_t& copy, std::uint32_t rank, std::uint64_t round,
                           const std::set<std::uint32_t>& lost) {
  const std::vector<Input> inputs = without_ranks(c, inputs_of(c, round), lost);
  std::vector<Answer> answers;
  for (std::uint32_t source = 0; source < c.num_ranks; ++source)
    answers.push_back(answer_of(c, inputs, source));
  const auto want =
      kernels::reference::combine_to(c.params(), inputs, answers, {c.weighted, abi::kReturnNone}, rank);
  const auto* out = static_cast<const std::uint16_t*>(copy.out);
  for (std::size_t i = 0; i < want.out.size(); ++i) {
    if (out[i] == want.out[i]) continue;
    return name(round, "combine") + ": out[" + std::to_string(i) + "] is " + std::to_string(out[i]) +
           ", not " + std::to_string(want.out[i]);
  }
  return "";
}

}  // namespace epd::test
