// What a Join must look like. Messages name the field, the value and what is allowed.
#pragma once

#include "common/status.h"
#include "proto/attach.h"

#include <string>
#include <string_view>

namespace epd::membership {

// Every field against the limits of shape.h; the bindings also against the descriptors that came.
Status check_join(const abi::Join& join, std::size_t num_memories);
Status check_group_name(std::string_view name);
// UNSUPPORTED: such groups are in another registry, or in none.
Status check_span(abi::Span span, bool spanning);
// What a kind of device can't do: UNSUPPORTED.
Status check_device(abi::DeviceKind kind, const abi::GroupShape& shape);
// INVALID_ARGUMENT: the ranks of a group are on devices of one kind.
Status check_same_kind(abi::DeviceKind first, abi::DeviceKind joiner, const std::string& group);
// INVALID_ARGUMENT naming the first field that differs, with both values.
Status check_same_shape(const abi::GroupShape& first, const abi::GroupShape& joiner,
                        const std::string& group);

}  // namespace epd::membership
