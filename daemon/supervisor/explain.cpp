// One operation explains itself: whom it waits for, and what keeps that one.
#include "node.h"
#include "process_state.h"

#include <algorithm>
#include <set>

namespace epd {
namespace {

std::string for_ms(std::uint64_t us) {
  return "for " + std::to_string(us / 1000) + " ms";
}

const char* down_word(DeviceState state) {
  switch (state) {
    case DeviceState::kStarting: return "is starting";
    case DeviceState::kRestarting: return "is down and will be started again";
    case DeviceState::kFailed: return "has failed for good";
    case DeviceState::kStopped: return "stands still";
    case DeviceState::kReady: break;
  }
  return "";
}

std::string stage_words(const std::string& stage) {
  if (stage == "planning") return "has submitted it; an earlier operation of that rank holds it up";
  if (stage == "wait_ready") return "has submitted it and waits for another rank to submit it";
  if (stage == "moving") return "is still moving its rows";
  if (stage == "wait_arrived") return "has moved its rows and waits for another rank's";
  return "has seen it fail and waits for the group to agree";
}

std::string describe(const WaitView& wait) {
  if (wait.session_id == 0) return "rank " + std::to_string(wait.rank) + " has left the group";
  std::string text = "rank " + std::to_string(wait.rank) + " (session " + std::to_string(wait.session_id) +
                     ", pid " + wait.process + ", " + wait.device + ") ";
  if (wait.gone) return text + "has left the group";
  if (wait.device_state != DeviceState::kReady && !wait.engine_stopped) {
    return text + "can't go on: the engine of " + wait.device + " " + down_word(wait.device_state);
  }
  if (wait.engine_stopped) {
    return text + "can't go on: the engine of " + wait.device + " (pid " + std::to_string(wait.engine_pid) +
           ") stands still" +
           (wait.submitted ? "; it had taken the operation" : "; it had not taken the operation");
  }
  text += wait.submitted ? stage_words(wait.stage) : "has not submitted it";
  if (wait.client_stopped) text += "; its process is stopped by a signal";
  return text;
}

const OperationView* find_of_rank(const std::vector<OperationView>& all, const OperationView& like,
                                  std::uint32_t rank) {
  const auto found = std::find_if(all.begin(), all.end(), [&](const OperationView& other) {
    return other.group_id == like.group_id && other.epoch == like.epoch && other.op_index == like.op_index &&
           other.rank == rank;
  });
  return found == all.end() ? nullptr : &*found;
}

// What an operation that waits for no rank is about.
std::string own_reason(const OperationView& op, const std::vector<OperationView>& all,
                       const std::string& silent_engines) {
  if (op.stage == "moving") return "its own rows are moving";
  if (op.stage == "breaking") {
    return "it has failed; the group breaks, and " +
           (silent_engines.empty() ? std::string("the next epoch is about to begin")
                                   : "the answer of " + silent_engines + " is missing");
  }
  const OperationView* earlier = nullptr;
  for (const OperationView& other : all) {
    const bool before = other.group_id == op.group_id && other.rank == op.rank && other.epoch == op.epoch &&
                        other.op_index < op.op_index;
    if (before && (earlier == nullptr || other.op_index < earlier->op_index)) earlier = &other;
  }
  if (earlier == nullptr) return "it is about to begin";
  return "operation " + std::to_string(earlier->op_index) + " of its rank has not ended: epctl op " +
         std::to_string(earlier->session_id) + ":" + std::to_string(earlier->ticket);
}

}  // namespace

WaitView Node::wait_view(const membership::Group& group, std::uint32_t rank, const OperationView* its) const {
  WaitView wait;
  wait.rank = rank;
  const auto member = group.members.find(rank);
  if (member == group.members.end()) {
    wait.gone = true;
    wait.text = describe(wait);
    return wait;
  }
  const DeviceView device = fleet_->view(member->second.device);
  wait.session_id = member->second.session_id;
  wait.pid = member->second.pid;
  const Session* session = sessions_->find(wait.session_id);
  wait.process = session == nullptr ? std::to_string(wait.pid) : process_name(*session);
  wait.gone = member->second.gone;
  wait.device = device.name;
  wait.device_state = device.state;
  wait.engine_pid = device.engine_pid;
  wait.engine_stopped = device.state == DeviceState::kStopped;
  wait.client_stopped = !wait.gone && wait.pid != 0 && is_stopped(wait.pid);
  wait.submitted = its != nullptr;
  if (its != nullptr) wait.stage = its->stage;
  wait.text = describe(wait);
  return wait;
}

// Engines that owe the group an answer to its break.
std::string Node::silent_engines(const membership::Group& group) const {
  std::string names;
  for (const auto& [device, slot] : group.engines) {
    if (slot.phase != membership::EnginePhase::kBreaking && slot.phase != membership::EnginePhase::kAbsent &&
        slot.phase != membership::EnginePhase::kStarting)
      continue;
    names += (names.empty() ? "the engine of " : ", of ") + fleet_->name(device);
  }
  return names;
}

Result<OperationDetail> Node::operation_detail(std::uint64_t session_id, std::uint64_t ticket) const {
  const std::vector<OperationView> all = operation_views();
  const auto found = std::find_if(all.begin(), all.end(), [&](const OperationView& op) {
    return op.session_id == session_id && op.ticket == ticket;
  });
  if (found == all.end()) return no_such_operation(session_id, ticket);
  OperationDetail detail;
  detail.operation = *found;
  const Session* session = sessions_->find(session_id);
  const auto group = registry_.groups().find(found->group_id);
  if (session == nullptr || group == registry_.groups().end()) {
    detail.text = "its session has ended; it runs to its end alone";
    return detail;
  }
  const DeviceView device = fleet_->view(session->device);
  detail.group_name = group->second.name;
  detail.pid = session->peer.pid;
  detail.engine_pid = device.engine_pid;
  detail.engine_stopped = device.state == DeviceState::kStopped;
  std::set<std::uint32_t> seen{found->rank};
  for (const OperationView* at = &*found; at != nullptr && at->waiting_for >= 0;) {
    const auto rank = static_cast<std::uint32_t>(at->waiting_for);
    if (!seen.insert(rank).second) break;
    at = find_of_rank(all, *found, rank);
    detail.waits.push_back(wait_view(group->second, rank, at));
  }
  if (detail.engine_stopped) {
    detail.text = "its own engine (pid " + std::to_string(device.engine_pid) +
                  ") stands still; what is shown is as it was " + std::to_string(device.heartbeat_age_ms) +
                  " ms ago";
  } else if (detail.waits.empty()) {
    detail.text = own_reason(*found, all, silent_engines(group->second));
  } else {
    detail.text = "waits " + for_ms(found->waiting_us) + ": " + detail.waits.back().text;
  }
  return detail;
}

Status Node::no_such_operation(std::uint64_t session_id, std::uint64_t ticket) const {
  const std::string name = "operation " + std::to_string(session_id) + ":" + std::to_string(ticket);
  const Session* session = sessions_->find(session_id);
  if (session == nullptr) {
    return not_found(name + ": there is no session " + std::to_string(session_id) +
                     "; allowed: an ID that epctl ops prints");
  }
  const DeviceView device = fleet_->view(session->device);
  if (device.state != DeviceState::kReady && device.state != DeviceState::kStopped) {
    return not_found(name + ": the engine of " + device.name + " " + down_word(device.state) +
                     "; what it had taken is answered when it is back");
  }
  return not_found(name + " is not in flight; allowed: an ID that epctl ops prints");
}

}  // namespace epd
