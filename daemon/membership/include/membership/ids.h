// How the registry names engines, sessions and their requests. A registry of one node's groups has one node,
// kLocalNode.
#pragma once

#include <compare>
#include <cstdint>
#include <string>

namespace epd::membership {

inline constexpr std::uint32_t kLocalNode = 0;

struct EngineId {
  std::uint32_t node = kLocalNode;
  std::uint32_t device = 0;
  auto operator<=>(const EngineId&) const = default;  // NOLINT(modernize-use-nullptr): clang-tidy 14
};

struct SessionId {
  std::uint32_t node = kLocalNode;
  std::uint64_t number = 0;
  auto operator<=>(const SessionId&) const = default;  // NOLINT(modernize-use-nullptr): clang-tidy 14
};

// A Join or a Leave, as the client that waits for the answer has numbered it.
struct RequestId {
  SessionId session;
  std::uint32_t number = 0;
  auto operator<=>(const RequestId&) const = default;  // NOLINT(modernize-use-nullptr): clang-tidy 14
};

// Sessions that end together: one, or all of a node.
struct EndedSessions {
  EndedSessions(SessionId session) : node(session.node), number(session.number), all(false) {}
  static EndedSessions of_node(std::uint32_t node) {
    EndedSessions sessions(SessionId{node, 0});
    sessions.all = true;
    return sessions;
  }
  bool contains(SessionId session) const { return session.node == node && (all || session.number == number); }

  std::uint32_t node;
  std::uint64_t number;
  bool all;
};

// Only those who take part in an epoch know its key. Zero in groups of one node.
struct EpochKey {
  std::uint64_t high = 0;
  std::uint64_t low = 0;
  bool operator==(const EpochKey&) const = default;
};

// "12", on another node than the local one "12 of node 3".
inline std::string to_string(const SessionId& session) {
  return std::to_string(session.number) +
         (session.node == kLocalNode ? "" : " of node " + std::to_string(session.node));
}

// A membership's name: index in the low half, generation (never 0) in the high half, so
// that a stale name is told from a fresh one. Indices are reused within a session.
constexpr std::uint32_t make_member_id(std::uint32_t index, std::uint32_t generation) {
  return (generation << 16) | (index & 0xffffu);
}
constexpr std::uint32_t member_index(std::uint32_t member) {
  return member & 0xffffu;
}
constexpr std::uint32_t member_generation(std::uint32_t member) {
  return member >> 16;
}

}  // namespace epd::membership
