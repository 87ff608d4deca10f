#include "calls.h"

#include "announcement.h"
#include "device_operation.h"
#include "kernels/calls.h"
#include "op_rules.h"
#include "session_port.h"
#include "standing_routings.h"

#include <algorithm>
#include <vector>

namespace epd::engine {

using abi::Call;
using kernels::CallRing;
using kernels::kByHost;
using kernels::kByStreams;
using kernels::OpError;
using kernels::RouteState;

namespace {

constexpr std::uint64_t kLookNs = 50'000'000;
constexpr std::uint64_t kFarLookNs = 1'000'000;
// Kernels tell of a deadline themselves if they run, and know more about it.
constexpr std::uint64_t kOverdueNs = 1'000'000'000;
constexpr std::uint64_t kFreshNs = 500'000'000;  // this process may have been stopped since a look

// Compares cyclic numbers.
bool is_behind(std::uint32_t number, std::uint32_t other) {
  return static_cast<std::int32_t>(number - other) < 0;
}

std::string record_of(const Member& member, const Call& call) {
  return "record " + std::to_string(call.route) + " of rank " + std::to_string(member.rank);
}

}  // namespace

Calls::Calls(Member& member, device::Launcher& launcher)
    : member_(member),
      group_(member.group),
      launcher_(launcher),
      port_(member.lane->calls()),
      views_(member) {
  const GroupRankMemory& memory = group_.ranks[member.rank];
  const auto ranks_here = std::count_if(group_.ranks.begin(), group_.ranks.end(), [&](const auto& rank) {
    return rank.device_index == memory.device_index;
  });
  port_.open({memory.call_words(), memory.user, member.results,
              abi::ResultsLayout(group_.shape).counts_stride,
              memory.exchange->bytes() + group_.exchange_layout.generation,
              static_cast<std::uint32_t>(ranks_here), this, member.waits(), member.rank});
}

void Calls::follow_settings(std::uint32_t timeout_ms, std::uint32_t linger_us) {
  timeout_ms_ = timeout_ms;
  port_.set_limits({group_.sms, timeout_ms, linger_us});
}

// ---- halt and resume

void Calls::resume(bool fresh) {
  show_none();
  std::vector<RouteState> routes(group_.shape.num_routes());
  std::vector<StandingRouting> standing;
  recv_rows_.assign(routes.size(), 0);
  // A rank has no rows of dispatches from before it joined, but takes part in their combines.
  if (member_.first_index != 0)
    std::fill(routes.begin(), routes.end(), RouteState{abi::kUnknownRouting, 0, 0});
  if (!fresh) standing = standing_routings(group_.shape, launcher_, member_.next_number, member_.exchange());
  for (std::uint32_t record = 0; record < standing.size(); ++record) {
    const StandingRouting& now = standing[record];
    if (now.head.handle == 0) continue;
    routes[record] = {abi::op_tag(now.head.epoch, now.head.handle - 1), now.head.num_tokens, now.half};
    recv_rows_[record] = now.head.num_recv_rows;
  }
  std::vector<device::CallPort::Bell> bells;
  for (std::uint32_t rank = 0; rank < group_.shape.num_ranks; ++rank) {
    const GroupRankMemory& memory = group_.ranks[rank];
    if (rank != member_.rank && group_.active(rank) && group_.is_near(rank))
      bells.push_back({rank, memory.call_words(), memory.user});
  }
  port_.resume({group_.epoch, group_.in_tags(member_.next_number), group_.from_tags(0), group_.changed_epoch,
                routes, epoch_view(member_), peer_views(group_), memory_table(group_), bells});
}

// The member begins where its board says. The board follows the engine's polls, so it may be behind the
// device's progress. All operations before the last one that a rank has announced have ended, and peers have
// begun at most one more. If the group continued from the board's number, they would need routings that their
// later dispatches have overwritten in both halves of their records.
void Calls::catch_up() {
  const abi::ExchangeArenaLayout& layout = group_.exchange_layout;
  std::vector<abi::SignalLine> lines(group_.shape.depth);  // in each block the rank's own line
  launcher_.read_rows(lines.data(), member_.exchange() + layout.ready + member_.rank * sizeof(lines[0]),
                      sizeof(lines[0]), layout.block_bytes, lines.size());
  for (const abi::SignalLine& line : lines) {
    if (abi::epoch_of_tag(line.tag) == group_.epoch)  // else it may be of an operation that was undone
      member_.next_number = std::max(member_.next_number, group_.from_tags(abi::index_of_tag(line.tag)));
  }
}

// ---- what is enqueued

void Calls::pop(std::uint64_t now_ns) {
  const JournalEntry& entry = *port_.front();
  const std::uint32_t number = abi::unpack(entry.call).number;
  ended_[entry.ring] = number + 1;
  if (entry.result.error == OpError::kNone) {
    views_.end_before(entry.ring, number + 1);
  } else {
    views_.show_breaking(entry.ring, number, now_ns);
  }
  first_.reset();
  port_.pop();
}

void Calls::show_none() {
  views_.clear();
  first_.reset();
}

// Kernels are looked at from time to time. A host device shows an operation when it has begun.
void Calls::look(Page& page, std::uint64_t now_ns) {
  if (port_.running() != nullptr && !first_) port_.look();
  if (const device::CallPort::Ring* ring = port_.seen(); ring != nullptr) {
    // The journal was read after that look, so it may know of more ends. But it does not tell what was
    // discarded.
    note_ended(kByStreams, ring->done);
    note_ended(kByHost, ring->host_ended);
    const std::vector<CallViews::Enqueued> all = enqueued(*ring);
    views_.show(all, page, now_ns);
    if (all.empty()) {
      first_.reset();
    } else {
      note_first(all, now_ns);
    }
  }
  show_running(now_ns);
  if (now_ns < next_look_ns_) return;
  next_look_ns_ = now_ns + kLookNs;
  port_.look();
}

void Calls::note_first(const std::vector<CallViews::Enqueued>& all, std::uint64_t now_ns) {
  const CallViews::Enqueued& call = all.front();
  const bool same = first_ && first_->call.ring == call.ring && first_->call.number == call.number;
  if (!same) first_ = First{.call = call, .since_ns = now_ns};
  first_->seen_ns = now_ns;
  const auto other =
      std::find_if(all.begin(), all.end(), [&](const auto& each) { return each.ring != call.ring; });
  first_->longest_ms = std::max(call.timeout_ms, other != all.end() ? other->timeout_ms : 0);
  member_.lane->look_at_signals();
}

std::optional<Failure> Calls::overdue(std::uint64_t now_ns) const {
  if (!first_ || first_->begun || now_ns > first_->seen_ns + kFreshNs) return std::nullopt;
  const CallViews::Enqueued& call = first_->call;
  const bool stands = first_->awaited != device::SignalCopy::kNobody;
  const std::uint64_t waited_ns = now_ns - first_->since_ns;
  const std::uint64_t timeout_ms = stands ? first_->longest_ms : call.timeout_ms;
  if (waited_ns < timeout_ms * 1'000'000 + kOverdueNs) return std::nullopt;
  const Subject subject{member_, call.call, call.index};
  if (stands) {
    const std::uint32_t rank = first_->awaited;
    return Failure{
        StatusCode::kDeadlineExceeded, static_cast<std::int32_t>(rank),
        ended_after(subject, waited_ns / 1'000'000) + ": " +
            awaited_text(group_, rank, group_.stands_still_ms(rank, now_ns, 0), "has not got as far")};
  }
  return Failure{StatusCode::kDeadlineExceeded, static_cast<std::int32_t>(member_.rank),
                 ended_after(subject, waited_ns / 1'000'000) +
                     ": its GPU has begun no kernel of it; other kernels may hold all SMs"};
}

// A look at signals from before the call was seen may be about another operation. A noop may wait behind an
// operation of the other ring, which then has its index.
void Calls::show_running(std::uint64_t now_ns) {
  if (const device::OperationInFlight* running = port_.running(); running != nullptr && first_)
    return show_in_flight(*running, now_ns);
  const device::SignalCopy* const signals = first_ ? member_.lane->signals() : nullptr;
  if (signals == nullptr || signals->begun_ns < first_->seen_ns) return;
  const std::uint64_t number = group_.in_tags(first_->call.index);
  const device::SignalledOperation op{member_.rank, abi::op_tag(group_.epoch, number),
                                      static_cast<std::uint32_t>(number % group_.shape.depth), group_.masked,
                                      ranks_together(member_)};
  first_->begun = first_->begun || signals->announced(op);
  const bool stood = first_->awaited != device::SignalCopy::kNobody;
  first_->awaited = signals->stands(op) ? signals->awaited(op, 0) : device::SignalCopy::kNobody;
  if (!stood && signals->stands(op)) first_->since_ns = now_ns;
  if (first_->call.call.op == abi::Op::kNoop) return;
  views_.show_first(signals->stage(op), signals->awaited(op, 0), now_ns);
  seen_waits_.look(*signals, op, member_.waits());
}

void Calls::show_in_flight(const device::OperationInFlight& running, std::uint64_t now_ns) {
  first_->begun = true;
  views_.show_first(running.stage(), running.awaited(0), now_ns);
  if (group_.far == nullptr || now_ns < next_far_look_ns_) return;
  next_far_look_ns_ = now_ns + kFarLookNs;
  views_.show_far_wait(running.waits_for());
}

std::uint64_t Calls::next_look_ns() const {
  return port_.deadline_ns();
}

void Calls::ring_client() const {
  if (member_.session != nullptr) member_.session->ring();
}

void Calls::note_ended(CallRing ring, std::uint32_t end) {
  std::optional<std::uint32_t>& known = ended_[ring];
  if (!known || is_behind(*known, end)) known = end;
}

// Calls are taken from the two rings by turns. So if both have some, the index of a call that waits is a
// guess.
std::vector<CallViews::Enqueued> Calls::enqueued(const device::CallPort::Ring& ring) const {
  std::vector<CallViews::Enqueued> all;
  std::uint64_t index = member_.next_number;
  add_enqueued(kByStreams, ring.calls, index, all);
  add_enqueued(kByHost, ring.host_calls, index, all);
  return all;
}

// The client writes the ring, so it may hold anything.
void Calls::add_enqueued(CallRing ring, const abi::PackedCall (&calls)[abi::kCallSlots], std::uint64_t& index,
                         std::vector<CallViews::Enqueued>& all) const {
  for (std::uint32_t i = 0; i < abi::kCallSlots; ++i) {
    const std::uint32_t number = *ended_[ring] + i;
    const abi::PackedCall& packed = calls[number % abi::kCallSlots];
    const Call call = abi::unpack(packed);
    const bool comes =
        call.number == number && kernels::is_whole(packed) && call.epoch == (group_.epoch & 0xff);
    if (!comes || abi::bad_field(call.request(), abi::op_limits(group_.shape)) != abi::BadField::kNone) break;
    all.push_back({ring, number, index, call, timeout_of(call.timeout_ms)});
    if (call.op != abi::Op::kNoop) ++index;
  }
}

// ---- ends

std::string Calls::illegal(const JournalEntry& entry) const {
  const auto bad = [](const char* field, std::uint64_t value, const std::string& allowed) {
    return bad_field("call", field, value, allowed);
  };
  const Call call = abi::unpack(entry.call);
  if (entry.result.error == OpError::kLostCall) {
    return bad("number", call.number,
               std::to_string(entry.result.room) + ", since no more than " + std::to_string(abi::kCallSlots) +
                   " may be enqueued and not ended");
  }
  if (entry.result.error != OpError::kBadCall) return "";
  std::string why = refusal("call", call.request(), abi::op_limits(group_.shape));
  if (!why.empty()) return why;
  if (const std::uint32_t place = abi::place_of(call.result); place >= abi::kResultPlaces)
    return bad("result", place, "a place below " + std::to_string(abi::kResultPlaces));
  if ((call.flags & abi::kFlagPlaces) != 0 && entry.ring == kByHost)
    return bad("flags", call.flags, "no places of rows, which calls of streams have");
  return bad("flags", call.flags, "those of the operation");
}

Failure Calls::failure(const JournalEntry& entry, std::uint64_t now_ns) const {
  const Call s = abi::unpack(entry.call);
  const std::uint64_t index = index_of(entry);
  const Subject subject{member_, s, index};
  if (entry.result.error == OpError::kOldRouting)
    return changed_group_failure(subject, "the routing in " + record_of(member_, s), entry.result.rows);
  if (entry.result.error == OpError::kNoRouting) {
    return {StatusCode::kNotFound, static_cast<std::int32_t>(member_.rank),
            "operation " + std::to_string(index) + ": " + op_name(s.op) + " on slot " +
                std::to_string(s.slot) + " uses the routing in " + record_of(member_, s) +
                ", which holds none; allowed: a record that a dispatch of this rank has written"};
  }
  if (entry.result.error == OpError::kOldMemory) return old_memory(entry, s);
  Failure failure = device_failure(subject, launcher_, entry.result,
                                   ended_after(subject, timeout_of(s.timeout_ms)), now_ns);
  if (const std::string far = port_.waited_for(); !far.empty()) failure.text += "; it waited for " + far;
  return failure;
}

Failure Calls::old_memory(const JournalEntry& entry, const abi::Call& s) const {
  return {StatusCode::kNotFound, static_cast<std::int32_t>(member_.rank),
          "operation " + std::to_string(index_of(entry)) + ": " + op_name(s.op) + " on slot " +
              std::to_string(s.slot) + " names rows in memory " + std::to_string(entry.result.rows) +
              " (generation " + std::to_string(entry.result.room) + ") of rank " +
              std::to_string(member_.rank) +
              ", which is not mapped any more; allowed: a graph whose memory has not been freed since its "
              "capture"};
}

std::uint32_t Calls::rows_of(const JournalEntry& entry) {
  const Call s = abi::unpack(entry.call);
  if (s.op != abi::Op::kDispatch) return recv_rows_[s.route];
  if (abi::makes_routing(s.op, s.flags)) recv_rows_[s.route] = entry.result.num_recv_rows;
  return entry.result.num_recv_rows;
}

}  // namespace epd::engine
