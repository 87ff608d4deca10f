// What ranks answer in a test of combine.
#pragma once

#include "kernels_cases.h"

namespace epd::kernels::testing_cases {

// What all ranks answer, of as many rows as they have room for.
std::vector<reference::CombineInput> random_answers(const Case& c, std::uint32_t seed,
                                                    const reference::CombineOptions& options);
// Whether all ranks with tokens give weights.
bool has_weights(const Case& c);

}  // namespace epd::kernels::testing_cases
