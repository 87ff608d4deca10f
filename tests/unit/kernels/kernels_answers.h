// The answers of ranks in a test of combine.
#pragma once

#include "kernels_cases.h"

namespace epd::kernels::testing_cases {

// The answers of all ranks, of as many rows as their regions have.
std::vector<reference::CombineInput> random_answers(const Case& c, std::uint32_t seed,
                                                    const reference::CombineOptions& options);
// Whether all ranks with tokens give weights.
bool has_weights(const Case& c);

}  // namespace epd::kernels::testing_cases
