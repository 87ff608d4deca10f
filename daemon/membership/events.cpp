#include "membership/events.h"

namespace epd::membership {

const std::uint32_t* node_of(const Event& event) {
  const auto node = [](const auto& e) -> const std::uint32_t* {
    if constexpr (requires { e.node; }) return &e.node;
    if constexpr (requires { e.engine; }) return &e.engine.node;
    if constexpr (requires { e.session; }) return &e.session.node;
    if constexpr (requires { e.id; }) return &e.id.session.node;
    if constexpr (requires { e.request; }) return &e.request.session.node;
    return nullptr;
  };
  return std::visit(node, event);
}

void set_node(Event& event, std::uint32_t node) {
  if (const std::uint32_t* old = node_of(event)) const_cast<std::uint32_t&>(*old) = node;
  if (auto* join = std::get_if<JoinRequest>(&event)) join->id.session.node = node;
}

}  // namespace epd::membership
