#include "starts.h"

#include "base/log.h"
#include "calls.h"

#include <algorithm>
#include <utility>

namespace epd::engine {

namespace {

constexpr std::uint64_t kFirstWordNs = 5'000'000;   // well within the time that the supervisor allows
constexpr std::uint64_t kNextWordNs = 200'000'000;  // likewise

// The first member whose device has not taken the epoch; null: none.
const Member* late_member(const Group& group) {
  const auto late = std::find_if(group.members.begin(), group.members.end(), [](const auto& member) {
    return member->calls != nullptr && !member->stopped() && !member->calls->resumed();
  });
  return late != group.members.end() ? late->get() : nullptr;
}

}  // namespace

void Starts::owe(Group& group) {
  owed_.push_back({&group, clock_.round_ns(), clock_.round_ns() + kFirstWordNs});
  finish();
}

// Clients enqueue as soon as they are told that the group continues. A gate that did not know that would
// discard the calls.
void Starts::finish() {
  std::erase_if(owed_, [this](Owed& owed) {
    if (refuse(owed)) return true;
    const std::string text = awaited(*owed.group);
    if (text.empty()) {
      activate(*owed.group);
    } else if (clock_.round_ns() >= owed.say_waits_ns) {
      say_waits(owed, text);
    }
    return text.empty();
  });
}

// True: a far engine was told something else of the group, so the group does not begin. A group that resumes
// treats that engine as lost.
bool Starts::refuse(Owed& owed) {
  const Group& group = *owed.group;
  if (group.far == nullptr || owed.difference_told) return false;
  const std::optional<FarSide::Difference> difference = group.far->difference();
  if (!difference) return false;
  owed.difference_told = true;
  const std::string reason = "has another " + difference->what;
  if (!group.life.is(GroupPhase::kStarting)) {
    far_engines_.lose(difference->engine, reason);
    return false;
  }
  const std::string text = far_engines_.name(difference->engine) + " " + reason;
  abi::GroupReady ready{group.id, StatusCode::kInvalidArgument, {}};
  abi::set_text(ready.text, text.data(), text.size());
  link_.send(abi::LinkType::kGroupReady, ready);
  return true;
}

// The rank or engine that the group waits for; "" if there is none.
std::string Starts::awaited(const Group& group) const {
  if (const Member* const late = late_member(group); late != nullptr)
    return "rank " + std::to_string(late->rank) + " waits for " + device_ + " to take the epoch";
  const std::optional<far::EngineId> engine = group.far == nullptr ? std::nullopt : group.far->awaited();
  return engine ? "greeting of " + far_engines_.name(*engine) : "";
}

void Starts::begin(Group& group) {
  forget(group);
  activate(group);
}

void Starts::forget(const Group& group) {
  std::erase_if(owed_, [&group](const Owed& owed) { return owed.group == &group; });
}

// Tells the supervisor that this engine does not hang. Repeated for as long as the loop runs.
void Starts::say_waits(Owed& owed, const std::string& text) {
  const Group& group = *owed.group;
  // Not for a start that takes only a moment.
  if (clock_.round_ns() >= owed.since_ns + kNextWordNs && !std::exchange(owed.waits_logged, true))
    log_event(LogLevel::kWarning, "group waits",
              {{"group", group.id}, {"name", group.name}, {"reason", text}});
  owed.say_waits_ns = clock_.round_ns() + kNextWordNs;
  abi::GroupWaits message{group.id, {}};
  abi::set_text(message.text, text.data(), text.size());
  link_.send(abi::LinkType::kGroupWaits, message);
}

// The device has taken the epoch.
void Starts::activate(Group& group) {
  const bool is_new = group.life.is(GroupPhase::kStarting);
  group.life.enter(GroupPhase::kActive);
  // The board comes first: a client that sees a failed operation must find the new epoch there.
  for (const auto& member : group.members) member->publish_state(abi::GroupState::kActive, group.cause);
  if (is_new) {
    link_.send(abi::LinkType::kGroupReady, abi::GroupReady{group.id, StatusCode::kOk, {}});
    return;
  }
  for (const auto& member : group.members) {
    member->failed_from = kNoFailure;
    member->publish_next_index();
  }
  link_.send(abi::LinkType::kResumed, abi::Resumed{group.id, group.epoch});
}

}  // namespace epd::engine
