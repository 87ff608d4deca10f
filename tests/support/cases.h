// Random cases and what the specification says of them. Everything follows from (case, rank, round), so
// each rank makes the inputs of all ranks for itself and nothing needs to be exchanged.
#pragma once

#include "epd/epd.h"
#include "kernels/reference.h"
#include "proto/arena.h"
#include "proto/operation.h"

#include <cstdint>
#include <set>
#include <string>
#include <vector>

namespace epd::test {

// Outputs are filled with it before each operation.
inline constexpr int kPoison = 0xa5;

enum class Routing { kUniform, kZipf, kOneExpert, kOneRank, kSparse, kNothing, kRepeated };
enum class Sizes { kFull, kUneven, kSomeEmpty, kAllEmpty };

struct Round;

struct Case {
  std::uint64_t seed = 1;
  // The group.
  std::uint32_t num_ranks = 2;
  std::uint32_t num_experts = 4;
  std::uint32_t max_tokens = 8;
  std::uint32_t hidden = 128;
  std::uint32_t topk = 2;
  std::uint32_t depth = 2;
  epd_payload_t payload = EPD_PAYLOAD_BF16;
  epd_scale_format_t scales = EPD_SCALE_FORMAT_FLOAT32;
  epd_layout_t layout = EPD_LAYOUT_COMPACT;
  epd_scale_layout_t scale_layout = EPD_SCALE_LAYOUT_ROW_MAJOR;
  epd_range_format_t range_format = EPD_RANGE_FORMAT_ROWS;
  std::uint32_t alignment = 1;
  std::uint32_t opaque_bytes = 0;
  std::uint32_t num_biases = 0;
  std::uint32_t num_handles = 0;
  std::uint32_t max_recv_rows = 0;
  std::uint32_t sum_ranks = 0;
  epd_span_t span = EPD_SPAN_NODE;
  std::int32_t priority = 0;
  bool index64 = false;
  std::vector<epd_row_format_t> more_formats;
  // The group continues without lost ranks, and takes them back: a script with `recover` does as well.
  bool degrade = false;
  bool late = false;  // with `degrade`: also without ranks that miss a deadline
  // Bit r: rank r's scripts submit in a stream, where operations are calls.
  std::uint32_t in_streams = 0;
  // Bit r: rank r's streams wait by kernel.
  std::uint32_t kernel_waits = 0;
  // Bit r: rank r's operations in streams have events.
  std::uint32_t event_waits = 0;
  // Its operations.
  std::uint32_t row_format = 0;  // dispatch, see at()
  bool send_weights = true;      // dispatch
  bool weighted = true;          // combine
  bool left_out_rows = false;    // in some rounds the choices of one rank have weight 0, and its rows are NaN
  abi::ReturnWeights return_weights = abi::kReturnNone;  // combine
  bool zero_padding = false;
  bool mark_unused = false;
  bool defer = false;
  std::uint32_t sms = 0;
  Routing routing = Routing::kUniform;
  Sizes sizes = Sizes::kUneven;

  std::string describe() const;
  abi::GroupShape shape() const;
  // The case as a dispatch with the data of the round has it: with the row format that it chooses. Whatever
  // is about the rows of a dispatch takes such a case.
  Case at(const Round& round) const;
  // The shape with row_format alone.
  abi::GroupShape row_shape() const { return shape().with_format(row_format); }
  kernels::reference::GroupParams params() const;
  epd_group_config_t config(const char* name, std::uint32_t rank) const;
  bool in_stream_on(std::uint32_t rank) const { return (in_streams >> rank & 1) != 0; }
  epd_wait_by_t wait_by_on(std::uint32_t rank) const {
    if ((kernel_waits >> rank & 1) != 0) return EPD_WAIT_BY_KERNEL;
    return (event_waits >> rank & 1) != 0 ? EPD_WAIT_BY_EVENT : EPD_WAIT_BY_MEMOP;
  }
};

// Applies to all cases that say nothing else: groups span nodes, and have no sum domains unless they say so.
void let_groups_span_nodes(bool span);

// A case within a few megabytes; every field but num_ranks follows from the seed. If it has a max_recv_rows,
// that is just enough for routings 0 .. kRoundsThatFit - 1. On GPUs sum_ranks has to be 0.
Case random_case(std::uint64_t seed, std::uint32_t num_ranks);
inline constexpr std::uint64_t kRoundsThatFit = 8;
// Gives the group more row formats, from which dispatches choose; some cases stay as they are.
void add_formats(Case& c);
// The least max_recv_rows for these routings.
std::uint32_t rows_needed(const Case& c, std::uint64_t num_routings);

// The inputs of one operation: its routing (number of tokens, choices) and its data (all else). They differ
// where a routing is used again.
struct Round {
  Round(std::uint64_t both) : data(both), routing(both) {}  // NOLINT: a number is a round
  Round(std::uint64_t its_data, std::uint64_t its_routing) : data(its_data), routing(its_routing) {}
  std::uint64_t data;
  std::uint64_t routing;
  auto operator<=>(const Round&) const = default;  // NOLINT(modernize-use-nullptr): clang-tidy 14
};

using Input = kernels::reference::RankInput;
Input make_input(const Case& c, std::uint32_t rank, Round round);
std::vector<Input> make_inputs(const Case& c, Round round);

// The answers of a rank's experts, row by row: finite bf16, but for left_out_rows.
void make_y_row(const Case& c, std::uint32_t rank, Round round, std::uint32_t row, std::uint16_t* y);
// The answers of all ranks, as combine takes them.
using Answer = kernels::reference::CombineInput;
// Inputs as they were dispatched; rows of ranks in `silent` count as zeros.
std::vector<Answer> make_answers(const Case& c, Round round, const std::vector<Input>& inputs,
                                 const std::set<std::uint32_t>& silent = {});
// How many bias regions the combine of a round adds.
std::uint32_t biases_of(const Case& c, Round round);

// Arguments as the case says; the caller adds slot, handle and whatever it is about.
epd_dispatch_args_t dispatch_args(const Case& c, std::uint32_t num_tokens);
epd_combine_args_t combine_args(const Case& c, Round round);

// Writes an input to a slot's regions, and poison to its outputs. `cached`: to the choices too, nobody may
// read them.
void fill_dispatch(const Case& c, const epd_buffers_t& buffers, const Input& input, bool cached = false);
void fill_combine(const Case& c, const epd_buffers_t& buffers, std::uint32_t rank, Round round,
                  std::uint32_t num_recv_rows);

// "" or the first difference from the specification. `counts` may be null.
std::string check_dispatch(const Case& c, const epd_buffers_t& buffers, const std::vector<Input>& inputs,
                           std::uint32_t rank, const epd_result_t& result, const epd_counts_t* counts);
// The rows of ranks in `silent` count as zeros.
std::string check_combine(const Case& c, const epd_buffers_t& buffers, const std::vector<Input>& inputs,
                          std::uint32_t rank, Round round, const std::set<std::uint32_t>& silent = {});

// The inputs as a degraded group takes them: lost ranks send nothing, selections of their experts are none.
std::vector<Input> without_ranks(const Case& c, std::vector<Input> inputs,
                                 const std::set<std::uint32_t>& lost);
// Selections of experts of these ranks.
std::uint32_t selections_of(const Case& c, const Input& input, const std::set<std::uint32_t>& ranks);

// The digest of all output bytes of a slot that mean something.
std::uint64_t digest_dispatch(const Case& c, const epd_buffers_t& buffers, std::uint32_t num_recv_rows);
std::uint64_t digest_combine(const Case& c, const epd_buffers_t& buffers, std::uint32_t num_tokens);

}  // namespace epd::test
