// To the coordinator.
#include "frames.h"
#include "membership_parts.h"
#include "membership_wire.h"

#include "proto/binding_rules.h"

// No unnamed namespace: carry() is found by its arguments.
namespace epd::cluster {

using namespace membership;
using wire::Binding;

// ---- events

template <typename Io>
void carry(Io& io, wire::NodeDrains& m, NodeDrains& v) {
  EPD_PART(status, v.status);
}

template <typename Io>
void carry(Io& io, wire::MemoryAcquired& m, MemoryAcquired& v) {
  EPD_PART(request, v.request);
  EPD_NUMBER(group_id, v.group_id, kAny);
  EPD_NUMBER(rank, v.rank, kMostRank);
  EPD_PART(status, v.status);
}

static void carry_bindings(Writer&, wire::Join& m, abi::Bindings& v) {
  const auto add = [&m](std::size_t number, std::uint32_t memory, std::uint32_t reserved,
                        std::uint64_t offset, std::uint64_t length) {
    if (memory == 0 && reserved == 0 && offset == 0 && length == 0) return;
    Binding& message = *m.add_bindings();
    message.set_region(static_cast<std::uint32_t>(number));
    message.set_memory(memory);
    message.set_reserved(reserved);
    message.set_offset(offset);
    message.set_stride(length);
  };
  for (std::size_t i = 0; i < abi::kNumRegions; ++i)
    add(i, v[i].memory, v[i].reserved, v[i].offset, v[i].stride);
}

static void carry_bindings(Reader& io, wire::Join& m, abi::Bindings& v) {
  for (const Binding& message : m.bindings()) {
    const std::size_t number = message.region();
    if (number >= abi::kNumRegions) {
      io.refuse("bindings.region", std::to_string(number), "0 .. " + std::to_string(abi::kNumRegions - 1));
      return;
    }
    v[number] = {message.memory(), message.reserved(), message.offset(), message.stride()};
  }
}

// Its limits are for the registry, which refuses it to the client.
template <typename Io>
void carry(Io& io, wire::Join& m, abi::Join& v) {
  std::string group(v.group, abi::text_length(v.group));
  EPD_BYTES(group, group, abi::kMaxGroupName);
  abi::set_text(v.group, group.data(), group.size());
  EPD_INTEGER(rank, v.rank, std::numeric_limits<std::int32_t>::min(), kAnyWord);
  EPD_NUMBER(timeout_ms, v.timeout_ms, kAnyWord);
  EPD_NUMBER(sms, v.sms, kAnyWord);
  EPD_INTEGER(priority, v.priority, std::numeric_limits<std::int32_t>::min(), kAnyWord);
  carry_unjudged(io, *m.mutable_shape(), v.shape);
  carry_bindings(io, m, v.bindings);
}

template <typename Io>
void carry(Io& io, wire::Quota& m, Quota& v) {
  EPD_NUMBER(limit, v.limit, kAny);
  EPD_TEXT(source, v.source, kMaxWireText);
}

template <typename Io>
void carry(Io& io, wire::JoinRequest& m, JoinRequest& v) {
  EPD_PART(id, v.id);
  EPD_NUMBER(uid, v.uid, kAnyWord);
  EPD_INTEGER(pid, v.pid, 0, std::numeric_limits<std::int32_t>::max());
  EPD_PART(engine, v.engine);
  EPD_NUMBER(device_kind, v.device_kind, static_cast<std::uint64_t>(abi::DeviceKind::kCuda));
  EPD_PART(join, v.join);
  EPD_PART(max_groups, v.max_groups);
  EPD_NUMBER(num_memories, v.num_memories, abi::kMaxMessageFds);
  EPD_NUMBER(last_generation, v.last_generation, kAnyWord);
}

template <typename Io>
void carry(Io& io, wire::LeaveRequest& m, LeaveRequest& v) {
  EPD_PART(id, v.id);
  EPD_NUMBER(member, v.member, kAnyWord);
}

template <typename Io>
void carry(Io& io, wire::SessionClosed& m, SessionClosed& v) {
  EPD_PART(session, v.session);
  EPD_TEXT(how, v.how, kMaxWireText);
}

template <typename Io>
void carry(Io& io, wire::BoardIndex& m, BoardIndex& v) {
  EPD_NUMBER(group_id, v.group_id, kAny);
  EPD_NUMBER(rank, v.rank, kMostRank);
  EPD_NUMBER(next_index, v.next_index, kAny);
}

template <typename Io>
void carry(Io& io, wire::EngineUp& m, EngineUp& v) {
  EPD_PART(engine, v.engine);
  EPD_BYTES(address, v.address, abi::kMaxFarAddressBytes);
}

template <typename Io>
void carry(Io& io, wire::EngineDown& m, EngineDown& v) {
  EPD_PART(engine, v.engine);
  EPD_TEXT(text, v.text, kMaxWireText);
  EPD_LIST(boards, v.boards, kMaxBoards);
}

template <typename Io>
void carry(Io& io, wire::GroupReady& m, GroupReady& v) {
  carry_group(io, m, v.engine, v.message.group_id);
  EPD_NUMBER(status, v.message.status, kMostCode);
  EPD_CHARS(text, v.message.text);
  EPD_LIST(boards, v.boards, kMaxBoards);
}

template <typename Io>
void carry(Io& io, wire::GroupWaits& m, GroupWaits& v) {
  carry_group(io, m, v.engine, v.message.group_id);
  EPD_CHARS(text, v.message.text);
}

template <typename Io>
void carry(Io& io, wire::MemberStopped& m, MemberStopped& v) {
  EPD_PART(engine, v.engine);
  EPD_PART(message, v.message);
}

template <typename Io>
void carry(Io& io, wire::BreakRequested& m, BreakRequested& v) {
  EPD_PART(engine, v.engine);
  EPD_PART(message, v.message);
}

template <typename Io>
void carry(Io& io, wire::Broken& m, Broken& v) {
  carry_group(io, m, v.engine, v.message.group_id);
  EPD_NUMBER(epoch, v.message.epoch, abi::kLastEpoch);
  EPD_NUMBER(next_index, v.message.next_index, kAny);
}

template <typename Io>
void carry(Io& io, wire::Resumed& m, Resumed& v) {
  carry_group(io, m, v.engine, v.message.group_id);
  EPD_NUMBER(epoch, v.message.epoch, abi::kLastEpoch);
}

template <typename Io>
void carry(Io& io, wire::GroupRemoved& m, GroupRemoved& v) {
  carry_group(io, m, v.engine, v.message.group_id);
}

template <typename Io>
void carry(Io& io, wire::RankRefused& m, RankRefused& v) {
  carry_group(io, m, v.engine, v.message.group_id);
  EPD_NUMBER(rank, v.message.rank, kMostRank);
  EPD_NUMBER(status, v.message.status, kMostCode);
  EPD_CHARS(text, v.message.text);
}

template <typename Io>
void carry(Io& io, wire::PeerLost& m, PeerLost& v) {
  EPD_PART(engine, v.engine);
  EPD_PART(far, v.far);
  EPD_TEXT(text, v.text, kMaxWireText);
  EPD_NUMBER(loss, v.loss, static_cast<std::uint32_t>(abi::PeerLoss::kCorrupt));
}

template <typename Io>
void carry(Io& io, wire::EvictRank& m, EvictRank& v) {
  EPD_NUMBER(group_id, v.group_id, kAny);
  EPD_NUMBER(rank, v.rank, kMostRank);
  EPD_TEXT(how, v.how, kMaxWireText);
}

#define EPD_EVENTS(X)                \
  X(NodeDrains, node_drains)         \
  X(MemoryAcquired, memory_acquired) \
  X(JoinRequest, join_request)       \
  X(LeaveRequest, leave_request)     \
  X(SessionClosed, session_closed)   \
  X(EngineUp, engine_up)             \
  X(EngineDown, engine_down)         \
  X(GroupReady, group_ready)         \
  X(GroupWaits, group_waits)         \
  X(MemberStopped, member_stopped)   \
  X(BreakRequested, break_requested) \
  X(Broken, broken)                  \
  X(Resumed, resumed)                \
  X(GroupRemoved, group_removed)     \
  X(RankRefused, rank_refused)       \
  X(PeerLost, peer_lost)             \
  X(EvictRank, evict_rank)

#define EPD_WRITE(Type, field)                      \
  static void write(wire::Event& m, Type& v) {      \
    Writer().part(#field, *m.mutable_##field(), v); \
  }
EPD_EVENTS(EPD_WRITE)
#undef EPD_WRITE
// Said on the registry's own side alone. Whoever adds an event gives it a message or a line here.
static void write(wire::Event&, NodeUp&) {
  EPD_CHECK(false);
}
static void write(wire::Event&, NodeLost&) {
  EPD_CHECK(false);
}

static void carry(Writer&, wire::Event& m, Event& v) {
  std::visit([&m](auto& event) { write(m, event); }, v);
}

static void carry(Reader& io, wire::Event& m, Event& v) {
  switch (m.what_case()) {
#define EPD_READ(Type, field) \
  case wire::Event::k##Type: return io.part(#field, *m.mutable_##field(), v.emplace<Type>());
    EPD_EVENTS(EPD_READ)
#undef EPD_READ
    case wire::Event::WHAT_NOT_SET: break;
  }
  io.refuse("what", "none that is known", "an event of a node");
}

// ---- reports

template <typename Io>
void carry(Io& io, wire::DeviceDescription& m, DeviceDescription& v) {
  EPD_TEXT(name, v.name, abi::kDeviceNameBytes - 1);
  EPD_NUMBERS(unreachable, v.unreachable, kMaxDevices, kMaxDevices - 1);
}

template <typename Io>
void carry(Io& io, wire::EngineReport& m, EngineReport& v) {
  EPD_NUMBER(device, v.device, kMaxDevices - 1);
  EPD_BYTES(address, v.address, abi::kMaxFarAddressBytes);
}

template <typename Io>
void carry(Io& io, wire::RankReport& m, RankReport& v) {
  EPD_NUMBER(rank, v.rank, kMostRank);
  EPD_NUMBER(device, v.device, kMaxDevices - 1);
  EPD_NUMBER(session, v.session, kAny);
  EPD_NUMBER(member, v.member, kAnyWord);
  EPD_NUMBER(uid, v.uid, kAnyWord);
  EPD_INTEGER(pid, v.pid, 0, std::numeric_limits<std::int32_t>::max());
  EPD_NUMBER(sms, v.sms, kAnyWord);
  EPD_INTEGER(priority, v.priority, abi::kMinPriority, abi::kMaxPriority);
  EPD_NUMBER(bound, v.bound, (std::uint64_t{1} << abi::kNumRegions) - 1);
  EPD_NUMBER(join_request, v.join_request, kAnyWord);
  EPD_NUMBER(active_since, v.active_since, abi::kLastEpoch);
  EPD_NUMBER(first_index, v.first_index, kAny);
}

template <typename Io>
void carry(Io& io, wire::GroupReport& m, GroupReport& v) {
  EPD_PART(told, v.told);
  EPD_NUMBER(asked_sum_ranks, v.asked_sum_ranks, abi::kMaxRanks);
  EPD_LIST(ranks, v.ranks, abi::kMaxRanks);
}

template <typename Io>
void carry(Io& io, wire::Attach& m, Attach& v) {
  EPD_NUMBER(attempt, v.attempt, kAny);
  EPD_TEXT(boot, v.boot, kMaxNameText);
  EPD_NUMBER(number, v.number, kMostNode);
  EPD_NUMBER(drains, v.drains, 1);
  EPD_LIST(devices, v.devices, kMaxDevices);
  EPD_LIST(engines, v.engines, kMaxDevices);
  EPD_LIST(groups, v.groups, kMaxReports);
}

// ---- messages

template <typename Io>
void carry(Io& io, wire::AgentHeartbeat& m, AgentHeartbeat& v) {
  EPD_NUMBER(hears, v.hears, 1);
}

template <typename Io>
void carry(Io& io, wire::Told& m, Told& v) {
  EPD_PART(event, v.event);
}

template <typename Io>
void carry(Io&, wire::Superseded&, Superseded&) {}

#define EPD_BODIES(X)                \
  X(Attach, attach)                  \
  X(AgentHeartbeat, agent_heartbeat) \
  X(Told, told)                      \
  X(Superseded, superseded)

#define EPD_WRITE(Type, field)                         \
  static void write(wire::ToCoordinator& m, Type& v) { \
    Writer().part(#field, *m.mutable_##field(), v);    \
  }
EPD_BODIES(EPD_WRITE)
#undef EPD_WRITE

static void read_body(Reader& io, wire::ToCoordinator& m, ToCoordinator& v) {
  switch (m.body_case()) {
#define EPD_READ(Type, field) \
  case wire::ToCoordinator::k##Type: return io.part(#field, *m.mutable_##field(), v.body.emplace<Type>());
    EPD_BODIES(EPD_READ)
#undef EPD_READ
    case wire::ToCoordinator::BODY_NOT_SET: break;
  }
  io.refuse("body", "none that is known", "a message of an agent");
}

template <typename Io>
void carry_term(Io& io, wire::ToCoordinator& m, ToCoordinator& v) {
  EPD_NUMBER(term, v.term, kMaxTerm);
}

wire::ToCoordinator message_of(const ToCoordinator& message) {
  ToCoordinator v = message;
  wire::ToCoordinator m;
  Writer io;
  carry_term(io, m, v);
  std::visit([&m](auto& body) { write(m, body); }, v.body);
  return m;
}

Result<ToCoordinator> parse(const wire::ToCoordinator& message) {
  wire::ToCoordinator m = message;
  ToCoordinator v;
  Reader io;
  carry_term(io, m, v);
  read_body(io, m, v);
  if (!io.status().ok()) return io.status();
  return v;
}

}  // namespace epd::cluster
