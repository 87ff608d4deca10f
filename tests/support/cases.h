// Random cases and what the specification says of them. Everything follows from (case, rank, round), so
// each rank makes the inputs of all ranks for itself and nothing needs to be exchanged.
#pragma once

#include "epd/epd.h"
#include "kernels/reference.h"

#include <cstdint>
#include <set>
#include <string>
#include <vector>

namespace epd::test {

enum class Routing { kUniform, kZipf, kOneExpert, kOneRank, kSparse, kNothing, kRepeated };
enum class Sizes { kFull, kUneven, kSomeEmpty, kAllEmpty };

struct Case {
  std::uint64_t seed = 1;
  std::uint32_t num_ranks = 2;
  std::uint32_t num_experts = 4;
  std::uint32_t max_tokens = 8;
  std::uint32_t hidden = 128;
  std::uint32_t topk = 2;
  std::uint32_t depth = 2;
  bool fp8 = false;
  bool index64 = false;
  bool send_weights = true;  // dispatch
  bool weighted = true;      // combine
  Routing routing = Routing::kUniform;
  Sizes sizes = Sizes::kUneven;
  // The group goes on without lost ranks, and takes them back: a script with `recover` does as well.
  bool degrade = false;

  std::string describe() const;
  kernels::reference::GroupParams params() const;
  epd_group_config_t config(const char* name, std::uint32_t rank) const;
};

// A case within a few megabytes; every field but num_ranks follows from the seed.
Case random_case(std::uint64_t seed, std::uint32_t num_ranks);

using Input = kernels::reference::RankInput;
Input make_input(const Case& c, std::uint32_t rank, std::uint64_t round);
std::vector<Input> make_inputs(const Case& c, std::uint64_t round);

// What rank's experts answer in a round: finite bf16, row by row.
void make_y_row(const Case& c, std::uint32_t rank, std::uint64_t round, std::uint32_t row, std::uint16_t* y);

// Writes an input to a slot's regions, and poison to its outputs.
void fill_dispatch(const Case& c, const epd_buffers_t& buffers, const Input& input);
void fill_combine(const Case& c, const epd_buffers_t& buffers, std::uint32_t rank, std::uint64_t round,
                  std::uint32_t num_rows);

// "" or the first difference from the specification. `counts` may be null.
std::string check_dispatch(const Case& c, const epd_buffers_t& buffers, const std::vector<Input>& inputs,
                           std::uint32_t rank, const epd_result_t& result, const epd_counts_t* counts);
// The rows of ranks in `silent` count as zeros.
std::string check_combine(const Case& c, const epd_buffers_t& buffers, const std::vector<Input>& inputs,
                          std::uint32_t rank, std::uint64_t round,
                          const std::set<std::uint32_t>& silent = {});

// The inputs as a degraded group takes them: lost ranks send nothing, selections of their experts are none.
std::vector<Input> without_ranks(const Case& c, std::vector<Input> inputs,
                                 const std::set<std::uint32_t>& lost);
// Selections of experts of these ranks.
std::uint32_t selections_of(const Case& c, const Input& input, const std::set<std::uint32_t>& ranks);

// Of all valid output bytes of a slot.
std::uint64_t digest_dispatch(const Case& c, const epd_buffers_t& buffers, std::uint32_t num_rows);
std::uint64_t digest_combine(const Case& c, const epd_buffers_t& buffers, std::uint32_t num_tokens);

}  // namespace epd::test
