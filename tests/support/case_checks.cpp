// Comparing what was delivered with the specification, bit by bit.
#include "support/cases.h"

#include <algorithm>
#include <cstring>

namespace epd::test {
namespace {

using kernels::reference::RankReceived;

std::int64_t index_at(const Case& c, const void* indices, std::size_t i) {
  return c.index64 ? static_cast<const std::int64_t*>(indices)[i]
                   : static_cast<const std::int32_t*>(indices)[i];
}

// "" or where two arrays of n elements differ, bit by bit.
template <typename T>
std::string differ(const std::string& name, const T* got, const T* wanted, std::size_t n) {
  if (n == 0) return "";
  // As bytes: bits count, also those of NaN and of the sign of zero.
  const auto* got_bytes = reinterpret_cast<const std::byte*>(got);
  const auto* wanted_bytes = reinterpret_cast<const std::byte*>(wanted);
  const auto* different = std::mismatch(got_bytes, got_bytes + n * sizeof(T), wanted_bytes).first;
  const std::size_t i = static_cast<std::size_t>(different - got_bytes) / sizeof(T);
  if (i == n) return "";
  return name + "[" + std::to_string(i) + "] of " + std::to_string(n) + " is " + std::to_string(got[i]) +
         ", not " + std::to_string(wanted[i]);
}

template <typename T>
std::string differ(const std::string& name, const T* got, const std::vector<T>& wanted) {
  return differ(name, got, wanted.data(), wanted.size());
}

std::string differ_number(const std::string& name, std::int64_t got, std::int64_t wanted) {
  if (got == wanted) return "";
  return name + " is " + std::to_string(got) + ", not " + std::to_string(wanted);
}

bool all_bytes(const void* data, std::size_t bytes, int value) {
  const auto* p = static_cast<const unsigned char*>(data);
  return std::all_of(p, p + bytes, [value](unsigned char byte) { return byte == value; });
}

// Keeps the first difference.
class First {
 public:
  void also(std::string text) {
    if (text_.empty()) text_ = std::move(text);
  }
  bool found() const { return !text_.empty(); }
  std::string text() && { return std::move(text_); }

 private:
  std::string text_;
};

// The received rows of one rank, row by row.
class Rows {
 public:
  Rows(const Case& c, const epd_buffers_t& b)
      : case_(c),
        buffers_(b),
        shape_(c.row_shape()),
        scales_(kernels::reference::scales_by_row(c.params(), room(), b.recv_scales)) {}

  std::size_t room() const { return shape_.recv_rows(); }
  bool filled(std::size_t row) const { return buffers_.recv_src[row * 2] >= 0; }

  std::string as_wanted(std::size_t row, const RankReceived& want) const {
    const std::size_t choices = shape_.choices_per_row();
    First first;
    first.also(differ(name("recv_src", row), src(row), &want.recv_src[row * 2], 2));
    for (std::size_t k = 0; k < choices; ++k) {
      first.also(differ_number(name("recv_topk_idx", row),
                               index_at(case_, buffers_.recv_topk_idx, row * choices + k),
                               want.recv_topk_idx[row * choices + k]));
    }
    first.also(differ(name("recv_topk_weights", row), weights(row), &want.recv_topk_weights[row * choices],
                      choices));
    const std::size_t bytes = shape_.row_bytes();
    first.also(differ(name("byte of recv_x", row), x(row), &want.recv_x[row * bytes], bytes));
    if (const std::size_t scales = shape_.scale_bytes(); scales != 0)
      first.also(
          differ(name("byte of recv_scales", row), scales_of(row), &want.recv_scales[row * scales], scales));
    return std::move(first).text();
  }

  // A row that no token fills, and that says so.
  std::string marked(std::size_t row, bool zeroed) const {
    const std::size_t choices = shape_.choices_per_row();
    const std::int32_t none[2] = {-1, -1};
    First first;
    first.also(differ(name("recv_src of unused", row), src(row), none, 2));
    for (std::size_t k = 0; k < choices; ++k) {
      first.also(differ_number(name("recv_topk_idx of unused", row),
                               index_at(case_, buffers_.recv_topk_idx, row * choices + k), -1));
    }
    if (!all_bytes(weights(row), choices * 4, 0))
      first.also(name("recv_topk_weights of unused", row) + " is not 0");
    if (zeroed &&
        !(all_bytes(x(row), shape_.row_bytes(), 0) && all_bytes(scales_of(row), shape_.scale_bytes(), 0)))
      first.also(name("padding", row) + " is not zeroed");
    return std::move(first).text();
  }

  // A row that nobody may have touched.
  std::string untouched(std::size_t row) const {
    const std::size_t choices = shape_.choices_per_row();
    const auto* idx = static_cast<const std::uint8_t*>(buffers_.recv_topk_idx);
    const bool good =
        all_bytes(src(row), 8, kPoison) && all_bytes(weights(row), choices * 4, kPoison) &&
        all_bytes(idx + row * choices * shape_.index_bytes(), choices * shape_.index_bytes(), kPoison) &&
        all_bytes(x(row), shape_.row_bytes(), kPoison) &&
        all_bytes(scales_of(row), shape_.scale_bytes(), kPoison);
    return good ? "" : name("unused", row) + " was written to";
  }

  std::uint64_t digest(std::size_t row, std::uint64_t hash) const;

 private:
  static std::string name(const std::string& what, std::size_t row) {
    return what + " row " + std::to_string(row);
  }
  const std::int32_t* src(std::size_t row) const { return buffers_.recv_src + row * 2; }
  const float* weights(std::size_t row) const {
    return buffers_.recv_topk_weights + row * shape_.choices_per_row();
  }
  const std::uint8_t* x(std::size_t row) const {
    return static_cast<const std::uint8_t*>(buffers_.recv_x) + row * shape_.row_bytes();
  }
  const std::uint8_t* scales_of(std::size_t row) const { return scales_.data() + row * shape_.scale_bytes(); }

  const Case& case_;
  const epd_buffers_t& buffers_;
  const abi::GroupShape shape_;
  const std::vector<std::uint8_t> scales_;
};

std::uint64_t digest(std::uint64_t hash, const void* data, std::size_t bytes) {
  const auto* p = static_cast<const unsigned char*>(data);
  for (std::size_t i = 0; i < bytes; ++i) hash = (hash ^ p[i]) * 0x100000001b3ull;
  return hash;
}

std::uint64_t Rows::digest(std::size_t row, std::uint64_t hash) const {
  const std::size_t choices = shape_.choices_per_row();
  const auto* idx = static_cast<const std::uint8_t*>(buffers_.recv_topk_idx);
  hash = test::digest(hash, src(row), 8);
  hash = test::digest(hash, idx + row * choices * shape_.index_bytes(), choices * shape_.index_bytes());
  hash = test::digest(hash, weights(row), choices * 4);
  hash = test::digest(hash, x(row), shape_.row_bytes());
  return test::digest(hash, scales_of(row), shape_.scale_bytes());
}

std::string check_counts(const RankReceived& want, const epd_counts_t& got) {
  First first;
  first.also(differ_number("counts.num_recv_rows", got.num_recv_rows, want.num_recv_rows));
  first.also(differ("counts.rank_offsets", got.rank_offsets, want.rank_offsets));
  first.also(differ("counts.expert_counts", got.expert_counts, want.expert_counts));
  first.also(differ("counts.expert_offsets", got.expert_offsets, want.expert_offsets));
  return std::move(first).text();
}

}  // namespace

std::string check_dispatch(const Case& c, const epd_buffers_t& b, const std::vector<Input>& inputs,
                           std::uint32_t rank, const epd_result_t& result, const epd_counts_t* counts) {
  std::vector<Input> sent = inputs;
  if (!c.send_weights) {
    for (Input& input : sent) input.topk_weights.clear();
  }
  const RankReceived want = kernels::reference::dispatch_to(c.params(), sent, rank);
  First first;
  first.also(differ_number("num_recv_rows", result.num_recv_rows, want.num_recv_rows));
  first.also(differ("rank_offsets", b.rank_offsets, want.rank_offsets));
  first.also(differ("expert_counts", b.expert_counts, want.expert_counts));
  first.also(differ("expert_offsets", b.expert_offsets, want.expert_offsets));
  first.also(differ("source_ranges", b.source_ranges, want.source_ranges));
  if (counts != nullptr) first.also(check_counts(want, *counts));
  const Rows rows(c, b);
  for (std::size_t row = 0; row < rows.room() && !first.found(); ++row) {
    if (row < want.num_rows && want.recv_src[row * 2] >= 0) {
      first.also(rows.as_wanted(row, want));
    } else if (const bool padding = c.layout == EPD_LAYOUT_PACKED && row < want.num_rows;
               padding || c.mark_unused) {
      first.also(rows.marked(row, padding && c.zero_padding));
    } else {
      first.also(rows.untouched(row));
    }
  }
  return std::move(first).text();
}

std::string check_combine(const Case& c, const epd_buffers_t& b, const std::vector<Input>& inputs,
                          std::uint32_t rank, Round round, const std::set<std::uint32_t>& silent) {
  const auto want =
      kernels::reference::combine_to(c.at(round).params(), inputs, make_answers(c, round, inputs, silent),
                                     {c.weighted, c.return_weights}, rank);
  First first;
  first.also(differ("out", static_cast<const std::uint16_t*>(b.out), want.out));
  first.also(differ("out_weights", b.out_weights, want.out_weights));
  return std::move(first).text();
}

std::uint64_t digest_dispatch(const Case& c, const epd_buffers_t& b, std::uint32_t num_recv_rows) {
  const Rows rows(c, b);
  const std::size_t end = c.layout == EPD_LAYOUT_EXPERT ? rows.room() : num_recv_rows;
  std::uint64_t hash = 0xcbf29ce484222325ull;
  for (std::size_t row = 0; row < end; ++row) {
    if (rows.filled(row)) hash = rows.digest(row, hash);
  }
  hash = digest(hash, b.rank_offsets, (std::size_t{c.num_ranks} + 1) * 4);
  return digest(hash, b.expert_counts, std::size_t{c.num_experts / c.num_ranks} * 4);
}

std::uint64_t digest_combine(const Case& c, const epd_buffers_t& b, std::uint32_t num_tokens) {
  return digest(0xcbf29ce484222325ull, b.out, std::size_t{num_tokens} * c.hidden * 2);
}

}  // namespace epd::test
