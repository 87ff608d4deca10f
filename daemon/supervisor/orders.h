// Orders to engines and sessions: what the deciders have decided and what other parts add, in the order of
// the decisions.
#pragma once

#include "fleet.h"
#include "membership/messages.h"
#include "operator_settings.h"
#include "rooms.h"
#include "session/session_table.h"

#include <cstdint>
#include <map>
#include <utility>

namespace epd::supervisor {

// The last break that operators were told of, for each group.
class ToldBreaks {
 public:
  // False: it was told already. `num_groups` there are, and `exists` says whether a group is one of them: the
  // others are forgotten.
  template <typename Exists>
  bool tell(const abi::Break& message, std::size_t num_groups, const Exists& exists) {
    if (told_.size() > num_groups)
      std::erase_if(told_, [&](const auto& entry) { return !exists(entry.first); });
    const std::pair told(message.epoch, message.fatal);
    return std::exchange(told_[message.group_id], told) != told;
  }
  std::size_t size() const { return told_.size(); }

 private:
  std::map<std::uint64_t, std::pair<std::uint64_t, std::uint32_t>> told_;  // group: epoch, fatal
};

class Orders {
 public:
  Orders(const Rooms& rooms, const OperatorSettings& settings) : rooms_(rooms), settings_(settings) {}

  // Carries out everything that was decided, and what is decided because of memory. Code that is carried out
  // must not call this again: its actions would overtake those that still wait. True: there was something to
  // do.
  bool carry_out_all();

  // Sends a message to an engine, after everything that was decided before.
  template <typename T>
  void send(std::uint32_t device, abi::LinkType type, const T& body, const FdList& fds = {}) {
    carry_out_all();
    rooms_.fleet[device].send(type, body, fds);
  }
  void add_session(const session::Session& session);
  // Tells operators of a break, once for each. `orderly`: nothing went wrong.
  void tell_break(const membership::GroupLabel& group, const abi::Break& message, bool orderly);
  void refuse(std::uint64_t session_id, std::uint32_t request_id, const Status& status);

 private:
  void carry_out(const membership::StartGroup& action);
  void carry_out(const membership::SendRank& action);
  void carry_out(const membership::SendMember& action);
  void carry_out(const membership::SendStopMember& action);
  void carry_out(const membership::SendBreak& action);
  void carry_out(const membership::SendRelease& action);
  void carry_out(const membership::SendResume& action);
  void carry_out(const membership::SendRemoveGroup& action);
  void carry_out(const membership::CloseStreams& action);
  void carry_out(const membership::KillEngine& action);
  void carry_out(const membership::AcquireMemory& action);
  void carry_out(const membership::ReleaseMemory& action);
  void carry_out(const membership::MarkLost& action);
  void carry_out(const membership::ReplyJoined& action);
  void carry_out(const membership::ReplyLeft& action);
  void carry_out(const membership::ReplyRefused& action);
  void carry_out(const membership::WakeSession& action);
  void carry_out(const membership::SendFarEngine& action);

  void send_far_engine(std::uint32_t device, const membership::FarEngine& far);
  void send_rank(membership::EngineId to, std::uint64_t group_id, const membership::RankDescription& rank);
  void send_member(std::uint32_t device, std::uint64_t group_id, const membership::MemberDescription& member);

  const Rooms& rooms_;
  const OperatorSettings& settings_;
  bool carrying_out_ = false;
  ToldBreaks told_breaks_;
  std::pair<std::uint64_t, std::uint64_t> last_resume_;  // that was logged: group, epoch
};

}  // namespace epd::supervisor
