#include "commands.h"

#include "announcement.h"
#include "device_operation.h"

#include <vector>

namespace epd {

using abi::Submission;
using kernels::cuda::OpError;
using kernels::cuda::RouteState;

namespace {

// The same operation: how it was submitted makes no difference.
bool same_program(const Submission& a, const Submission& b) {
  return a.op == b.op && a.slot == b.slot && a.route == b.route && a.flags == b.flags && a.sms == b.sms &&
         a.timeout_ms == b.timeout_ms;
}

constexpr std::uint64_t kLookNs = 50'000'000;

// Of numbers that are cyclic.
bool is_behind(std::uint32_t number, std::uint32_t other) {
  return static_cast<std::int32_t>(number - other) < 0;
}

std::string record_of(const Member& member, const Submission& submission) {
  return "record " + std::to_string(submission.route) + " of rank " + std::to_string(member.rank);
}

}  // namespace

Commands::Commands(Member& member, Launcher& launcher)
    : member_(member),
      group_(member.group),
      launcher_(launcher),
      port_(*member.lane->commands()),
      views_(member) {
  const abi::ExchangeArenaLayout& layout = group_.exchange_layout;
  const GroupRankMemory& memory = group_.ranks[member.rank];
  port_.open({memory.command_words(), memory.user, member.rank, group_.shape.depth,
              static_cast<std::uint32_t>(group_.shape.num_routes()), layout.block_bytes, layout.landing_bytes,
              layout.half_bytes});
}

// ---- programs

std::string Commands::refuses(const Submission& submission) const {
  if (submission.handle >= abi::kMaxPrograms) {
    return "submission field handle is " + std::to_string(submission.handle) + "; allowed: 0 .. " +
           std::to_string(abi::kMaxPrograms - 1) + ", the number of a program";
  }
  const std::optional<Recorded>& known = recorded_[submission.handle];
  if (!known || same_program(known->submission, submission)) return "";
  return "submission field handle is " + std::to_string(submission.handle) +
         ", a program that was recorded otherwise; allowed: the same again, or another number";
}

void Commands::record(const Submission& submission, std::uint32_t timeout_ms) {
  std::optional<Recorded>& place = recorded_[submission.handle];
  if (place) return;
  place = Recorded{submission, timeout_ms};
  describe(*place);
}

void Commands::describe(const Recorded& recorded) {
  const Submission& s = recorded.submission;
  CommandPort::Program program;
  if (s.op != abi::Op::kNoop) {
    OperationPlace place;
    place.announcement.op = static_cast<std::uint32_t>(s.op);
    place.announcement.slot = s.slot;
    place.announcement.flags = s.flags;
    place.route.half = member_.exchange() + group_.exchange_layout.routing_of(s.route);
    place.route.head.epoch = group_.epoch;
    program.op = epd::describe(member_, s, place);
    for (std::uint32_t rank = 0; rank < group_.shape.num_ranks; ++rank) {
      if (group_.active(rank))
        program.op.peers[rank] = describe_peer(group_, s, rank, place.number, place.route.head.epoch);
    }
  }
  program.op.timeout_ns = std::uint64_t{recorded.timeout_ms} * 1'000'000;
  program.route = s.route;
  program.makes_routing = makes_routing(s) ? 1 : 0;
  program.max_tokens = makes_routing(s) ? group_.shape.max_tokens : 0;
  for (std::uint32_t rank = 0; rank < group_.shape.num_ranks; ++rank)
    program.since[rank] = group_.active_since[rank];
  port_.record(static_cast<std::uint32_t>(s.handle), kind_of(s.op), program, group_.share_sms(s.sms));
}

// ---- turns

void Commands::resume(bool fresh) {
  for (const std::optional<Recorded>& recorded : recorded_) {
    if (recorded) describe(*recorded);
  }
  std::vector<RouteState> routes(group_.shape.num_routes());
  std::vector<RouteHeads::Standing> standing;
  if (!fresh) standing = member_.heads->standing(member_.next_number, member_.exchange());
  for (std::uint32_t record = 0; record < standing.size(); ++record) {
    const RouteHeads::Standing& now = standing[record];
    if (now.head.handle == 0) continue;
    routes[record] = {abi::op_tag(now.head.epoch, now.head.handle - 1), now.head.num_tokens, now.half};
  }
  port_.resume({group_.epoch, group_.in_tags(member_.next_number), group_.changed_epoch, routes});
}

// ---- what is rung

void Commands::pop() {
  ended_ = port_.front()->command + 1;
  views_.end_before(*ended_);
  port_.pop();
}

void Commands::look(Page& page, std::uint64_t now_ns) {
  if (const CommandPort::Ring* ring = port_.seen(); ring != nullptr) {
    // The journal, which was read after that look, may know more; what was discarded it does not tell.
    if (!ended_ || is_behind(*ended_, ring->done)) ended_ = ring->done;
    views_.show(rung(*ring), page, now_ns);
  }
  if (now_ns < next_look_ns_) return;
  next_look_ns_ = now_ns + kLookNs;
  port_.look();
}

// The client writes the ring, and it may be anything.
std::vector<CommandViews::Rung> Commands::rung(const CommandPort::Ring& ring) const {
  std::vector<CommandViews::Rung> all;
  std::uint64_t index = member_.next_number;
  for (std::uint32_t i = 0; i < abi::kCommandSlots; ++i) {
    const std::uint32_t number = *ended_ + i;
    const abi::Command command = abi::unpack(ring.commands[number % abi::kCommandSlots]);
    const bool comes = command.number == number && command.epoch == (group_.epoch & 0xff);
    if (!comes || !recorded_[command.program]) break;
    const Recorded& recorded = *recorded_[command.program];
    all.push_back({command.number, index, &recorded.submission, command.num_tokens, recorded.timeout_ms});
    if (recorded.submission.op != abi::Op::kNoop) ++index;
  }
  return all;
}

// ---- ends

std::string Commands::illegal(const JournalEntry& entry) const {
  const auto field = [](const char* name, std::uint64_t value, const std::string& allowed) {
    return "command field " + std::string(name) + " is " + std::to_string(value) + "; allowed: " + allowed;
  };
  const abi::Command command = abi::unpack(entry.result.rows);
  switch (entry.result.error) {
    case OpError::kBadProgram: return field("program", command.program, "one that was recorded");
    case OpError::kBadTokens:
      return field("num_tokens", command.num_tokens, "0 .. " + std::to_string(entry.result.room));
    case OpError::kLostCommand:
      return field("number", command.number,
                   std::to_string(entry.result.room) + ", since no more than " +
                       std::to_string(abi::kCommandSlots) + " may be rung and not ended");
    default: break;
  }
  if (entry.program < abi::kMaxPrograms && recorded_[entry.program]) return "";
  return field("program", entry.program, "one that was recorded");
}

Failure Commands::failure(const JournalEntry& entry, std::uint64_t now_ns) const {
  const Submission& s = submission(entry);
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
  return device_failure(subject, launcher_, entry.result,
                        ended_after(subject, recorded_[entry.program]->timeout_ms), now_ns);
}

std::uint64_t Commands::bytes_moved(const JournalEntry& entry) const {
  const abi::GroupShape& shape = group_.shape;
  if (submission(entry).op == abi::Op::kCombine) return std::uint64_t{entry.num_tokens} * shape.hidden * 2;
  return std::uint64_t{entry.result.num_recv_rows} * (shape.row_bytes() + shape.scale_bytes());
}

}  // namespace epd
