#include "operations.h"

namespace epd::client {

Status check_request(const Group& group, const SubmitRequest& request) {
  if (request.slot >= group.shape.depth) {
    return bad_value("slot", request.slot, "0 .. " + std::to_string(group.shape.depth - 1));
  }
  if (request.num_tokens > group.shape.max_tokens) {
    return bad_value("num_tokens", request.num_tokens, "0 .. " + std::to_string(group.shape.max_tokens));
  }
  const std::uint32_t biases = (request.flags & abi::kFlagBiases) >> abi::kBiasShift;
  if (biases > group.shape.num_biases) {
    return bad_value("num_biases", biases, "0 .. " + std::to_string(group.shape.num_biases));
  }
  if (request.row_format >= group.shape.num_formats()) {
    return bad_value("row_format", request.row_format,
                     "0 .. " + std::to_string(group.shape.num_formats() - 1));
  }
  if (request.keep && request.handle != 0) {
    return bad_value("keep_handle", 1, "0 under a handle: its routing stays as long as it was to stay");
  }
  return {};
}

std::uint32_t engine_flags(const abi::GroupShape& shape, const SubmitRequest& request) {
  std::uint32_t flags = request.flags | request.row_format << abi::kFormatShift;
  if (request.op == abi::Op::kDispatch && request.handle != 0) flags |= abi::kFlagCached;
  if (shape.layout != abi::Layout::kPacked) flags &= ~std::uint32_t{abi::kFlagZeroPadding};
  return flags;
}

Status no_handle_left(const Group& group) {
  return {StatusCode::kResourceExhausted,
          "no handle is left to keep: the group's num_handles is " + std::to_string(group.shape.num_handles)};
}

}  // namespace epd::client
