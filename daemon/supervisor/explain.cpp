// Explains one operation: which rank it waits for, and what stops that rank.
#include "control_reads.h"
#include "fleet.h"
#include "membership/deciders.h"
#include "messages.h"
#include "process_state.h"
#include "session/session_table.h"

#include <algorithm>
#include <set>

namespace epd::supervisor {
namespace {

std::string for_ms(std::uint64_t us) {
  return "for " + std::to_string(us / 1000) + " ms";
}

const char* down_word(DeviceState state) {
  switch (state) {
    case DeviceState::kStarting: return "is starting";
    case DeviceState::kRestarting: return "is down and will be started again";
    case DeviceState::kFailed: return "has failed for good";
    case DeviceState::kReady:
    case DeviceState::kStopped: break;
  }
  return "";
}

std::string stage_words(v1::OperationStage stage) {
  switch (stage) {
    case v1::OPERATION_STAGE_PLANNING:
      return "has submitted it; there an earlier operation, its stream or its device holds it up";
    case v1::OPERATION_STAGE_WAIT_READY: return "has submitted it and waits for another rank to submit it";
    case v1::OPERATION_STAGE_MOVING: return "is still moving its rows";
    case v1::OPERATION_STAGE_WAIT_ARRIVED: return "has moved its rows and waits for another rank's";
    default: return "has seen it fail and waits for the group to agree";
  }
}

// `process` names the client's process, for people.
std::string describe(const v1::Wait& wait, DeviceState state, const std::string& process) {
  std::string text = "rank " + std::to_string(wait.rank()) + " (session " +
                     std::to_string(wait.session_id()) + ", pid " + process + ", " + wait.device() + ") ";
  if (wait.gone()) return text + "has left the group";
  if (wait.engine_stopped()) {
    return text + "can't continue: the engine of " + wait.device() + " (pid " +
           std::to_string(wait.engine_pid()) + ") does not respond" +
           (wait.submitted() ? "; it had taken the operation" : "; it had not taken the operation");
  }
  if (state != DeviceState::kReady)
    return text + "can't continue: the engine of " + wait.device() + " " + down_word(state);
  text += wait.submitted() ? stage_words(wait.stage()) : "has not submitted it";
  if (wait.client_stopped()) text += "; its process is stopped by a signal";
  return text;
}

using Operations = google::protobuf::RepeatedPtrField<v1::Operation>;

const v1::Operation* find_of_rank(const Operations& all, const v1::Operation& like, std::uint32_t rank) {
  const auto found = std::find_if(all.begin(), all.end(), [&](const v1::Operation& other) {
    return other.group_id() == like.group_id() && other.epoch() == like.epoch() &&
           other.op_index() == like.op_index() && other.rank() == rank;
  });
  return found == all.end() ? nullptr : &*found;
}

// Why a break is not complete.
std::string break_reason(const std::string& silent_engines, std::uint64_t coordinator_away_ms) {
  if (!silent_engines.empty()) return "the answer of " + silent_engines + " is missing";
  if (coordinator_away_ms == 0) return "the next epoch is about to begin";
  return "it waits for the coordinator, which has been away " + for_ms(coordinator_away_ms * 1000);
}

// The reason of an operation that waits for no rank. `breaks`: what a break of its group waits for.
std::string own_reason(const v1::Operation& op, const Operations& all, const std::string& breaks) {
  if (op.stage() == v1::OPERATION_STAGE_MOVING) return "its own rows are moving";
  if (op.stage() == v1::OPERATION_STAGE_BREAKING) return "it has failed; the group breaks, and " + breaks;
  const v1::Operation* earlier = nullptr;
  for (const v1::Operation& other : all) {
    const bool before = other.group_id() == op.group_id() && other.rank() == op.rank() &&
                        other.epoch() == op.epoch() && other.op_index() < op.op_index();
    if (before && (earlier == nullptr || other.op_index() < earlier->op_index())) earlier = &other;
  }
  if (earlier == nullptr) return "it is about to begin: its device, or its stream, has not come to it";
  return "operation " + std::to_string(earlier->op_index()) + " of its rank has not ended: epctl op " +
         earlier->id();
}

}  // namespace

v1::Wait ControlReads::wait_of(const membership::Group& group, std::uint32_t rank,
                               const v1::Operation* its) const {
  v1::Wait wait;
  wait.set_rank(rank);
  const auto found = group.members.find(rank);
  for (const membership::Deciders::FarRank& far : rooms_.deciders.far_ranks(group.id)) {
    if (far.rank != rank) continue;
    wait.set_node(far.node);
    wait.set_device("host:" + std::to_string(far.device));
    wait.set_text("rank " + std::to_string(rank) + " (" + wait.device() + " on " + far.node +
                  "): epctl ops there says what holds it up, epctl groups --members whether it is stopped");
    return wait;
  }
  if (found == group.members.end()) {
    wait.set_device_state(
        v1::DEVICE_STATE_STARTING);  // the rank has no device; v1 has always shown this state
    wait.set_gone(true);
    wait.set_text("rank " + std::to_string(rank) + " has left the group");
    return wait;
  }
  const membership::Member& member = found->second;
  const std::uint32_t device = member.engine.device;
  const DeviceState state = rooms_.fleet[device].state_now();
  wait.set_session_id(member.session.number);
  wait.set_pid(member.pid);
  wait.set_gone(member.gone());
  wait.set_device(rooms_.fleet[device].name());
  wait.set_device_state(message_of(state));
  wait.set_engine_pid(rooms_.fleet[device].pid());
  wait.set_engine_stopped(state == DeviceState::kStopped);
  wait.set_client_stopped(!member.gone() && member.pid != 0 && is_stopped(member.pid));
  wait.set_submitted(its != nullptr);
  if (its != nullptr) wait.set_stage(its->stage());
  const session::Session* session = rooms_.sessions.find(member.session.number);
  wait.set_text(describe(wait, state,
                         session == nullptr ? std::to_string(member.pid) : session::process_name(*session)));
  return wait;
}

// Engines that have not acknowledged the group's break.
std::string ControlReads::silent_engines(const membership::Group& group) const {
  std::string names;
  for (const auto& [engine, slot] : group.engines) {
    using membership::EnginePhase;
    if (!slot.is(EnginePhase::kBreaking) && !slot.is(EnginePhase::kAbsent) &&
        !slot.is(EnginePhase::kStarting))
      continue;
    names += (names.empty() ? "the engine of " : ", of ") + rooms_.fleet[engine.device].name();
  }
  return names;
}

Result<v1::GetOperationResponse> ControlReads::explain(std::uint64_t session_id, std::uint64_t ticket) const {
  const v1::ListOperationsResponse list = list_operations(stopped_engines());
  const Operations& all = list.operations();
  const auto found = std::find_if(all.begin(), all.end(), [&](const v1::Operation& op) {
    return op.session_id() == session_id && op.ticket() == ticket;
  });
  if (found == all.end()) return no_such_operation(session_id, ticket);
  v1::GetOperationResponse answer;
  *answer.mutable_operation() = *found;
  const session::Session* session = rooms_.sessions.find(session_id);
  const membership::Group* const group = rooms_.deciders.find(found->group_id());
  if (session == nullptr || group == nullptr) {
    answer.set_text("its session has ended; it runs to its end alone");
    return answer;
  }
  answer.set_group(group->name);
  answer.set_pid(session->peer.pid);
  answer.set_engine_pid(rooms_.fleet[session->device].pid());
  answer.set_engine_stopped(rooms_.fleet[session->device].state_now() == DeviceState::kStopped);
  std::set<std::uint32_t> seen{found->rank()};
  for (const v1::Operation* at = &*found; at != nullptr && at->waiting_for() >= 0;) {
    const auto rank = static_cast<std::uint32_t>(at->waiting_for());
    if (!seen.insert(rank).second) break;
    at = find_of_rank(all, *found, rank);
    *answer.add_waits() = wait_of(*group, rank, at);
  }
  if (answer.engine_stopped()) {
    answer.set_text("its own engine (pid " + std::to_string(answer.engine_pid()) +
                    ") does not respond; what is shown is as it was " +
                    std::to_string(rooms_.fleet[session->device].heartbeat_age_ms()) + " ms ago");
  } else if (answer.waits().empty() && !found->far_wait().empty()) {
    answer.set_text("waits for " + found->far_wait());
  } else if (answer.waits().empty()) {
    const std::uint64_t away_ms = rooms_.deciders.coordinator_away_ms(group->id);
    answer.set_text(own_reason(*found, all, break_reason(silent_engines(*group), away_ms)));
  } else {
    answer.set_text("waits " + for_ms(found->waiting_us()) + ": " + answer.waits().rbegin()->text() +
                    (found->far_wait().empty() ? "" : "; it waits for " + found->far_wait()));
  }
  return answer;
}

Status ControlReads::no_such_operation(std::uint64_t session_id, std::uint64_t ticket) const {
  const std::string name = "operation " + std::to_string(session_id) + ":" + std::to_string(ticket);
  const session::Session* session = rooms_.sessions.find(session_id);
  if (session == nullptr) {
    return not_found(name + ": there is no session " + std::to_string(session_id) +
                     "; allowed: an ID that epctl ops prints");
  }
  const DeviceState state = rooms_.fleet[session->device].state();
  if (state != DeviceState::kReady) {
    return not_found(name + ": the engine of " + rooms_.fleet[session->device].name() + " " +
                     down_word(state) + "; what it had taken is answered when it is back");
  }
  return not_found(name + " is not in flight; allowed: an ID that epctl ops prints");
}

}  // namespace epd::supervisor
