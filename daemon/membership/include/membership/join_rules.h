// What a Join must look like. Messages name the field, the value and what is allowed.
#pragma once

#include "base/status.h"
#include "proto/attach.h"

#include <string>

namespace epd::membership {

// Every field against the limits of shape.h.
Status check_join(const abi::Join& join);
// INVALID_ARGUMENT naming the first field that differs, with both values.
Status check_same_shape(const abi::GroupShape& first, const abi::GroupShape& joiner,
                        const std::string& group);

}  // namespace epd::membership
