#include "op_rules.h"

namespace epd::engine {

using abi::BadField;

std::string bad_field(const std::string& what, const char* field, std::uint64_t value,
                      const std::string& allowed) {
  return what + " field " + field + " is " + std::to_string(value) + "; allowed: " + allowed;
}

std::string refusal(const std::string& what, const abi::OpRequest& request, const abi::OpLimits& limits) {
  const auto up_to = [](std::uint64_t most) { return "0 .. " + std::to_string(most); };
  const bool routes = abi::makes_routing(request.op, request.flags);
  switch (abi::bad_field(request, limits)) {
    case BadField::kNone: break;
    case BadField::kOp:
      return bad_field(what, "op", static_cast<std::uint32_t>(request.op),
                       "1 (noop), 2 (dispatch), 3 (combine)");
    case BadField::kSlot: return bad_field(what, "slot", request.slot, up_to(limits.depth - 1));
    case BadField::kFlags:
      return bad_field(what, "flags", request.flags,
                       "the bits of " + std::to_string(abi::flags_of(request.op)));
    case BadField::kBiases:
      return bad_field(what, "biases in flags", abi::num_biases(request.flags), up_to(limits.num_biases));
    case BadField::kFormat:
      return bad_field(what, "row format in flags", abi::format_of(request.flags),
                       up_to(limits.num_formats - 1));
    case BadField::kTokens:
      return bad_field(what, "num_tokens", request.num_tokens,
                       routes ? up_to(limits.max_tokens) : "0, the routing's own counts");
    case BadField::kRoute:
      if (request.route >= limits.num_routes)
        return bad_field(what, "route", request.route, up_to(limits.num_routes - 1));
      return bad_field(
          what, "route", request.route,
          "the slot, " + std::to_string(request.slot) + ", or one from " + std::to_string(limits.depth));
  }
  return "";
}

}  // namespace epd::engine
