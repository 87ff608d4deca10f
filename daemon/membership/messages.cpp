#include "membership/messages.h"

namespace epd::membership {
namespace {

std::string at(const char* verb, EngineId engine, std::uint64_t group_id) {
  return std::string(verb) + " device=" + std::to_string(engine.device) +
         " group=" + std::to_string(group_id);
}

std::string at(const char* verb, EngineId engine, std::uint64_t group_id, std::uint32_t rank) {
  return at(verb, engine, group_id) + " rank=" + std::to_string(rank);
}

std::string reply(const char* verb, const RequestId& request) {
  return std::string(verb) + " session=" + std::to_string(request.session.number) +
         " request=" + std::to_string(request.number);
}

struct Printer {
  std::string operator()(const StartGroup& a) const {
    return at("start", a.engine, a.group.label.id) + " broken=" + (a.broken ? "1" : "0");
  }
  std::string operator()(const SendRank& a) const {
    return at("rank", a.engine, a.group_id, a.rank.rank) + " since=" + std::to_string(a.rank.active_since);
  }
  std::string operator()(const SendMember& a) const {
    return at("member", a.engine, a.group_id, a.member.rank);
  }
  std::string operator()(const SendFarEngine& a) const {
    return "far_engine device=" + std::to_string(a.engine.device) +
           " far=" + std::to_string(a.far.engine.device) + " of " + a.far.node + " at " + a.far.address;
  }
  std::string operator()(const SendStopMember& a) const {
    return at("stop_member", a.engine, a.message.group_id, a.message.rank);
  }
  std::string operator()(const SendBreak& a) const {
    const abi::Break& m = a.message;
    std::string text = at("break", a.engine, m.group_id) + " epoch=" + std::to_string(m.epoch) +
                       " fatal=" + std::to_string(m.fatal) + " cause=" + status_name(m.cause) +
                       " failed_rank=" + std::to_string(m.failed_rank);
    if (m.fatal != 0) text += " fail_from=" + std::to_string(m.fail_from);
    return text;
  }
  std::string operator()(const SendRelease& a) const { return at("release", a.engine, a.message.group_id); }
  std::string operator()(const SendResume& a) const {
    std::string text = at("resume", a.engine, a.message.group_id) +
                       " epoch=" + std::to_string(a.message.epoch) +
                       " index=" + std::to_string(a.message.resume_index);
    if (a.message.cause != StatusCode::kOk) text += std::string(" cause=") + status_name(a.message.cause);
    return text;
  }
  std::string operator()(const SendRemoveGroup& a) const {
    return at("remove", a.engine, a.message.group_id);
  }
  std::string operator()(const CloseStreams& a) const {
    return at("close", a.engine, a.group_id, a.rank) + (a.later ? " later" : "");
  }
  std::string operator()(const KillEngine& a) const {
    return "kill device=" + std::to_string(a.engine.device);
  }
  std::string operator()(const AcquireMemory& a) const {
    return at("acquire", a.engine, a.group_id, a.rank) +
           " session=" + std::to_string(a.request.session.number);
  }
  std::string operator()(const ReleaseMemory& a) const { return at("free", a.engine, a.group_id, a.rank); }
  std::string operator()(const MarkLost& a) const {
    return at("mark_lost", a.engine, a.group_id, a.rank) + " cause=" + status_name(a.cause) +
           " failed_rank=" + std::to_string(a.failed_rank);
  }
  std::string operator()(const ReplyJoined& a) const {
    return reply("joined", a.request) + " rank=" + std::to_string(a.message.rank);
  }
  std::string operator()(const ReplyLeft& a) const { return reply("left", a.request); }
  std::string operator()(const ReplyRefused& a) const {
    return reply("refused", a.request) + " status=" + status_name(a.status.code());
  }
  std::string operator()(const WakeSession& a) const {
    return "wake session=" + std::to_string(a.session.number);
  }
};

}  // namespace

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

std::uint32_t node_of(const Action& action) {
  const auto node = [](const auto& a) {
    if constexpr (requires { a.engine; }) {
      return a.engine.node;
    } else if constexpr (requires { a.request; }) {
      return a.request.session.node;
    } else {
      return a.session.node;
    }
  };
  return std::visit(node, action);
}

std::string to_string(const Action& action) {
  const std::uint32_t node = node_of(action);
  return std::visit(Printer{}, action) + (node == kLocalNode ? "" : " node=" + std::to_string(node));
}

}  // namespace epd::membership
