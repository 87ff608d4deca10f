// To an agent.
#include "frames.h"
#include "membership_parts.h"
#include "membership_wire.h"

// No unnamed namespace: carry() is found by its arguments.
namespace epd::cluster {

using namespace membership;

static constexpr std::size_t kMaxGroups = 65'536;  // of one node

// ---- actions

template <typename Io>
void carry(Io& io, wire::StartGroup& m, StartGroup& v) {
  EPD_PART(engine, v.engine);
  EPD_PART(group, v.group);
  EPD_NUMBER(broken, v.broken, 1);
}

template <typename Io>
void carry(Io& io, wire::SendRank& m, SendRank& v) {
  carry_group(io, m, v.engine, v.group_id);
  EPD_PART(rank, v.rank);
}

template <typename Io>
void carry(Io& io, wire::SendMember& m, SendMember& v) {
  carry_group(io, m, v.engine, v.group_id);
  EPD_PART(member, v.member);
}

template <typename Io>
void carry(Io& io, wire::SendFarEngine& m, SendFarEngine& v) {
  EPD_PART(engine, v.engine);
  EPD_PART(far, v.far);
}

template <typename Io>
void carry(Io& io, wire::SendStopMember& m, SendStopMember& v) {
  EPD_PART(engine, v.engine);
  EPD_PART(message, v.message);
}

template <typename Io>
void carry(Io& io, wire::SendBreak& m, SendBreak& v) {
  EPD_PART(engine, v.engine);
  EPD_PART(message, v.message);
  EPD_PART(group, v.group);
  EPD_NUMBER(orderly, v.orderly, 1);
}

template <typename Io>
void carry(Io& io, wire::SendRelease& m, SendRelease& v) {
  carry_group(io, m, v.engine, v.message.group_id);
}

template <typename Io>
void carry(Io& io, wire::SendResume& m, SendResume& v) {
  carry_group(io, m, v.engine, v.message.group_id);
  EPD_NUMBER(epoch, v.message.epoch, abi::kLastEpoch);
  EPD_NUMBER(resume_index, v.message.resume_index, kAny);
  EPD_NUMBER(cause, v.message.cause, kMostCode);
  EPD_INTEGER(failed_rank, v.message.failed_rank, -1, kMostRank);
  EPD_CHARS(text, v.message.text);
  EPD_PART(group, v.group);
  EPD_NUMBER(view, v.view, kAny);
  EPD_PART(epoch_key, v.epoch_key);
}

template <typename Io>
void carry(Io& io, wire::SendRemoveGroup& m, SendRemoveGroup& v) {
  carry_group(io, m, v.engine, v.message.group_id);
}

template <typename Io>
void carry(Io& io, wire::CloseStreams& m, CloseStreams& v) {
  carry_group(io, m, v.engine, v.group_id);
  EPD_NUMBER(rank, v.rank, kMostRank);
  EPD_NUMBER(later, v.later, 1);
}

template <typename Io>
void carry(Io& io, wire::KillEngine& m, KillEngine& v) {
  EPD_PART(engine, v.engine);
  EPD_TEXT(text, v.text, kMaxWireText);
}

template <typename Io>
void carry(Io& io, wire::AcquireMemory& m, AcquireMemory& v) {
  carry_group(io, m, v.engine, v.group_id);
  EPD_PART(request, v.request);
  EPD_NUMBER(rank, v.rank, kMostRank);
  EPD_NUMBER(uid, v.uid, kAnyWord);
  EPD_PART(shape, v.shape);
  io.judge([&v] {
    return v.rank < v.shape.num_ranks
               ? ""
               : "rank is " + std::to_string(v.rank) + "; allowed: below num_ranks, which is " +
                     std::to_string(v.shape.num_ranks);
  });
}

template <typename Io>
void carry(Io& io, wire::ReleaseMemory& m, ReleaseMemory& v) {
  carry_group(io, m, v.engine, v.group_id);
  EPD_NUMBER(rank, v.rank, kMostRank);
}

template <typename Io>
void carry(Io& io, wire::MarkLost& m, MarkLost& v) {
  carry_group(io, m, v.engine, v.group_id);
  EPD_NUMBER(rank, v.rank, kMostRank);
  EPD_NUMBER(cause, v.cause, kMostCode);
  EPD_INTEGER(failed_rank, v.failed_rank, -1, kMostRank);
  EPD_TEXT(text, v.text, kMaxWireText);
}

template <typename Io>
void carry(Io& io, wire::ReplyJoined& m, ReplyJoined& v) {
  EPD_PART(request, v.request);
  EPD_NUMBER(member, v.message.member, kAnyWord);
  EPD_NUMBER(rank, v.message.rank, kMostRank);
  EPD_NUMBER(group_id, v.message.group_id, kAny);
  EPD_NUMBER(epoch, v.message.epoch, abi::kLastEpoch);
  EPD_NUMBER(resume_index, v.message.resume_index, kAny);
  EPD_NUMBER(user_bytes, v.message.user_bytes, kAny);
  EPD_NUMBER(board_bytes, v.message.board_bytes, kAny);
  EPD_NUMBER(default_timeout_ms, v.message.default_timeout_ms, kAnyWord);
  EPD_NUMBER(sum_ranks, v.message.sum_ranks, abi::kMaxRanks);
  EPD_NUMBER(shares_device, v.message.shares_device, 1);
  EPD_PART(group, v.group);
}

template <typename Io>
void carry(Io& io, wire::ReplyLeft& m, ReplyLeft& v) {
  EPD_PART(request, v.request);
  EPD_NUMBER(member, v.message.member, kAnyWord);
}

template <typename Io>
void carry(Io& io, wire::ReplyRefused& m, ReplyRefused& v) {
  EPD_PART(request, v.request);
  EPD_PART(status, v.status);
}

template <typename Io>
void carry(Io& io, wire::WakeSession& m, WakeSession& v) {
  EPD_PART(session, v.session);
}

#define EPD_ACTIONS(X)                  \
  X(StartGroup, start_group)            \
  X(SendRank, send_rank)                \
  X(SendMember, send_member)            \
  X(SendFarEngine, send_far_engine)     \
  X(SendStopMember, send_stop_member)   \
  X(SendBreak, send_break)              \
  X(SendRelease, send_release)          \
  X(SendResume, send_resume)            \
  X(SendRemoveGroup, send_remove_group) \
  X(CloseStreams, close_streams)        \
  X(KillEngine, kill_engine)            \
  X(AcquireMemory, acquire_memory)      \
  X(ReleaseMemory, release_memory)      \
  X(MarkLost, mark_lost)                \
  X(ReplyJoined, reply_joined)          \
  X(ReplyLeft, reply_left)              \
  X(ReplyRefused, reply_refused)        \
  X(WakeSession, wake_session)

#define EPD_WRITE(Type, field)                      \
  static void write(wire::Action& m, Type& v) {     \
    Writer().part(#field, *m.mutable_##field(), v); \
  }
EPD_ACTIONS(EPD_WRITE)
#undef EPD_WRITE

static void carry(Writer&, wire::Action& m, Action& v) {
  std::visit([&m](auto& action) { write(m, action); }, v);
}

static void carry(Reader& io, wire::Action& m, Action& v) {
  switch (m.what_case()) {
#define EPD_READ(Type, field) \
  case wire::Action::k##Type: return io.part(#field, *m.mutable_##field(), v.emplace<Type>());
    EPD_ACTIONS(EPD_READ)
#undef EPD_READ
    case wire::Action::WHAT_NOT_SET: break;
  }
  io.refuse("what", "none that is known", "an action of a node");
}

// ---- messages

template <typename Io>
void carry(Io& io, wire::Welcome& m, Welcome& v) {
  EPD_NUMBER(attempt, v.attempt, kAny);
  EPD_NUMBERS(groups, v.groups, kMaxGroups, kAny);
}

template <typename Io>
void carry(Io&, wire::CoordinatorHeartbeat&, CoordinatorHeartbeat&) {}

template <typename Io>
void carry(Io& io, wire::Order& m, Order& v) {
  EPD_NUMBER(heard, v.heard, kAny);
  EPD_PART(action, v.action);
}

template <typename Io>
void carry(Io& io, wire::PutOut& m, PutOut& v) {
  EPD_TEXT(text, v.text, kMaxWireText);
}

#define EPD_BODIES(X)                            \
  X(Welcome, welcome)                            \
  X(CoordinatorHeartbeat, coordinator_heartbeat) \
  X(Order, order)                                \
  X(PutOut, put_out)

#define EPD_WRITE(Type, field)                      \
  static void write(wire::ToAgent& m, Type& v) {    \
    Writer().part(#field, *m.mutable_##field(), v); \
  }
EPD_BODIES(EPD_WRITE)
#undef EPD_WRITE

static void read_body(Reader& io, wire::ToAgent& m, ToAgent& v) {
  switch (m.body_case()) {
#define EPD_READ(Type, field) \
  case wire::ToAgent::k##Type: return io.part(#field, *m.mutable_##field(), v.body.emplace<Type>());
    EPD_BODIES(EPD_READ)
#undef EPD_READ
    case wire::ToAgent::BODY_NOT_SET: break;
  }
  io.refuse("body", "none that is known", "a message of a coordinator");
}

template <typename Io>
void carry_head(Io& io, wire::ToAgent& m, ToAgent& v) {
  EPD_NUMBER(term, v.term, kMaxTerm);
  EPD_NUMBER(number, v.number, kMostNode);
}

wire::ToAgent message_of(const ToAgent& message) {
  ToAgent v = message;
  wire::ToAgent m;
  Writer io;
  carry_head(io, m, v);
  std::visit([&m](auto& body) { write(m, body); }, v.body);
  return m;
}

Result<ToAgent> parse(const wire::ToAgent& message) {
  wire::ToAgent m = message;
  ToAgent v;
  Reader io;
  carry_head(io, m, v);
  read_body(io, m, v);
  if (!io.status().ok()) return io.status();
  return v;
}

}  // namespace epd::cluster
