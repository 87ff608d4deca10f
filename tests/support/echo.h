// Rounds whose expert answers each row with the row: what goes in, and what must come out.
#pragma once

#include "support/cases.h"

#include <cstdint>
#include <set>
#include <string>
#include <vector>

namespace epd::test {

inline constexpr double kStreamSeconds = 60;  // longer than any operation's deadline

// The input that a rank dispatches in a round.
Input input_of(const Case& c, std::uint32_t rank, std::uint64_t round);
std::vector<Input> inputs_of(const Case& c, std::uint64_t round);  // of all ranks
// The answer of a rank's expert to what the rank receives.
Answer answer_of(const Case& c, const std::vector<Input>& inputs, std::uint32_t rank);
// "" or the first difference from what the rank must get for it, in a copy of its slot.
std::string check_received(const Case& c, const epd_buffers_t& copy, std::uint32_t rank, std::uint64_t round,
                           std::uint32_t num_recv_rows, const std::set<std::uint32_t>& lost = {});
std::string check_combined(const Case& c, const epd_buffers_t& copy, std::uint32_t rank, std::uint64_t round,
                           const std::set<std::uint32_t>& lost = {});
// M, as the slot's counts say.
std::uint32_t rows_received(const Case& c, const epd_buffers_t& buffers);

}  // namespace epd::test
