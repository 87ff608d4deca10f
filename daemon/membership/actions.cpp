#include "membership/actions.h"

#include "membership/group.h"

#include <algorithm>

namespace epd::membership {
namespace {

std::string at(const char* verb, std::uint32_t device, std::uint64_t group_id) {
  return std::string(verb) + " device=" + std::to_string(device) + " group=" + std::to_string(group_id);
}

std::string reply(const char* verb, std::uint64_t session_id, std::uint32_t request_id) {
  return std::string(verb) + " session=" + std::to_string(session_id) +
         " request=" + std::to_string(request_id);
}

struct Printer {
  std::string operator()(const StartGroup& a) const {
    return at("start", a.device, a.group_id) + " broken=" + (a.broken ? "1" : "0");
  }
  std::string operator()(const SendRank& a) const {
    return at("rank", a.device, a.group_id) + " rank=" + std::to_string(a.rank) +
           " since=" + std::to_string(a.active_since);
  }
  std::string operator()(const SendMember& a) const {
    return at("member", a.device, a.group_id) + " rank=" + std::to_string(a.rank);
  }
  std::string operator()(const SendStopMember& a) const {
    return at("stop_member", a.device, a.message.group_id) + " rank=" + std::to_string(a.message.rank);
  }
  std::string operator()(const SendBreak& a) const {
    const abi::Break& m = a.message;
    std::string text = at("break", a.device, m.group_id) + " epoch=" + std::to_string(m.epoch) +
                       " fatal=" + std::to_string(m.fatal) + " cause=" + status_name(m.cause) +
                       " culprit=" + std::to_string(m.culprit_rank);
    if (m.fatal != 0) text += " fail_from=" + std::to_string(m.fail_from);
    return text;
  }
  std::string operator()(const SendRelease& a) const { return at("release", a.device, a.message.group_id); }
  std::string operator()(const SendResume& a) const {
    std::string text = at("resume", a.device, a.message.group_id) +
                       " epoch=" + std::to_string(a.message.epoch) +
                       " index=" + std::to_string(a.message.resume_index);
    if (a.message.cause != StatusCode::kOk) text += std::string(" cause=") + status_name(a.message.cause);
    return text;
  }
  std::string operator()(const SendRemoveGroup& a) const {
    return at("remove", a.device, a.message.group_id);
  }
  std::string operator()(const CloseStreams& a) const {
    return at("close", a.device, a.group_id) + " rank=" + std::to_string(a.rank);
  }
  std::string operator()(const KillEngine& a) const { return "kill device=" + std::to_string(a.device); }
  std::string operator()(const ReplyJoined& a) const {
    return reply("joined", a.session_id, a.request_id) + " rank=" + std::to_string(a.message.rank);
  }
  std::string operator()(const ReplyLeft& a) const { return reply("left", a.session_id, a.request_id); }
  std::string operator()(const ReplyRefused& a) const {
    return reply("refused", a.session_id, a.request_id) + " status=" + status_name(a.status.code());
  }
  std::string operator()(const WakeSession& a) const {
    return "wake session=" + std::to_string(a.session_id);
  }
};

}  // namespace

std::string to_string(const Action& action) {
  return std::visit(Printer{}, action);
}

const std::uint64_t* EngineSlot::due_ns() const {
  const auto due = [](const auto& of) -> const std::uint64_t* {
    if constexpr (requires { of.due_ns; }) return of.due_ns != 0 ? &of.due_ns : nullptr;
    return nullptr;
  };
  return std::visit(due, state);
}

bool Group::all_gone() const {
  return std::all_of(members.begin(), members.end(), [](const auto& entry) { return entry.second.gone(); });
}

std::string Group::waits() const {
  std::string text;
  for (const auto& [device, slot] : engines) {
    if (!slot.waits_for.empty()) text += "; " + slot.waits_for;
  }
  return text;
}

std::uint32_t Group::sms_on(std::uint32_t device) const {
  std::uint32_t most = 0;
  for (const auto& [rank, member] : members) {
    if (member.device == device) most = std::max(most, member.sms);
  }
  return most;
}

std::int32_t Group::priority_on(std::uint32_t device) const {
  std::int32_t highest = abi::kMinPriority;
  for (const auto& [rank, member] : members) {
    if (member.device == device) highest = std::max(highest, member.priority);
  }
  return highest;
}

}  // namespace epd::membership
