#include "mapped_memory.h"

#include "group.h"
#include "log.h"
#include "operations.h"
#include "staging.h"

#include <algorithm>
#include <string>
#include <thread>
#include <utility>

namespace epd::client {
namespace {

constexpr std::int64_t kMapMs = 5'000;
constexpr std::size_t kMostUses = 256;
// The driver tells a graph's end from a thread of its own.
constexpr std::int64_t kGraphEndMs = 20;

std::string range_of(const MemoryPart& part) {
  return std::to_string(part.bytes) + " bytes at " + hex(part.address);
}

bool holds(const MemoryPart& part, std::uintptr_t address, std::uint64_t bytes) {
  return address >= part.address && address - part.address <= part.bytes &&
         bytes <= part.bytes - (address - part.address);
}

bool have_ended(const std::vector<GraphEnd>& graphs) {
  return std::all_of(graphs.begin(), graphs.end(), [](const GraphEnd& graph) { return graph->load(); });
}

}  // namespace

// ---- a group's

bool GroupMapped::Entry::captured() const {
  return !have_ended(graphs);
}

abi::RowPlace GroupMapped::find(const Rows& rows, const Allocation& in, const GraphEnd& graph) {
  auto are = abi::RowsAre::kNotMappable;
  const abi::RowPlace place = in.pieces != 0 ? look_for(rows, in, graph, are) : 0;
  count(are);
  return place;
}

abi::RowPlace GroupMapped::look_for(const Rows& rows, const Allocation& in, const GraphEnd& graph,
                                    abi::RowsAre& are) {
  const auto address = reinterpret_cast<std::uintptr_t>(rows.at);
  const Use* const use = find_use(in);
  are = use != nullptr ? use->why : abi::RowsAre::kFirstCalls;
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    Entry& entry = entries_[i];
    if (entry.state != Entry::State::kMapped || !entry.part.in.shares(in, address, 1)) continue;
    are = rows.registered && !entry.registered ? abi::RowsAre::kUnknown : abi::RowsAre::kNoRoom;
    if (are == abi::RowsAre::kUnknown || !holds(entry.part, address, rows.bytes)) continue;
    if (!entry.part.in.shares(in, address, std::max<std::uint64_t>(rows.bytes, 1))) continue;
    const std::uint64_t offset = address - entry.part.address;
    are = abi::RowsAre::kUnaligned;
    if (offset % abi::kRowPlaceAlign != 0 || offset > abi::kMaxPlaceOffset) return 0;
    are = abi::RowsAre::kInPlace;
    if (graph != nullptr) {
      std::erase_if(entry.graphs, [&graph](const GraphEnd& its) { return its == graph || its->load(); });
      entry.graphs.push_back(graph);
    }
    return abi::row_place(static_cast<std::uint32_t>(i), entry.generation, offset);
  }
  return 0;
}

void GroupMapped::count(abi::RowsAre rows) {
  ++counts_[static_cast<std::size_t>(rows)];
  counts_changed_ = true;
}

std::optional<abi::RowCounts> GroupMapped::take_counts() {
  return std::exchange(counts_changed_, false) ? std::optional(counts_) : std::nullopt;
}

const GroupMapped::Use* GroupMapped::find_use(const Allocation& in) const {
  const auto found =
      std::find_if(uses_.begin(), uses_.end(), [&in](const Use& use) { return use.id == in.ids.front(); });
  return found != uses_.end() ? &*found : nullptr;
}

GroupMapped::Use& GroupMapped::use_of(const Allocation& in) {
  if (const Use* const known = find_use(in); known != nullptr) return const_cast<Use&>(*known);
  if (uses_.size() == kMostUses) uses_.erase(uses_.begin());
  uses_.push_back({in.ids.front()});
  return uses_.back();
}

bool GroupMapped::wants(const Allocation& in, bool captured) {
  if (in.pieces == 0 || knows(in)) return false;
  Use& use = use_of(in);
  if (use.why == abi::RowsAre::kNotMappable) return false;
  return ++use.calls >= (captured ? 1 : kMapAtCall);
}

void GroupMapped::refuse(const Allocation& in, abi::RowsAre why) {
  Use& use = use_of(in);
  use.why = why;
  use.calls = kMapAtCall - kAgainAfter;
}

std::optional<abi::MemoryRange> GroupMapped::claim(const MemoryPart& part, bool registered) {
  entries_.resize(abi::kMaxMapped);
  const auto free = std::find_if(entries_.begin(), entries_.end(), [](const Entry& entry) {
    return entry.state == Entry::State::kFree && entry.generation < abi::kMaxMemoryGeneration;
  });
  if (free == entries_.end()) return std::nullopt;
  *free = {part, free->generation + 1, Entry::State::kClaimed, registered, {}};
  return range_of(static_cast<std::uint32_t>(free - entries_.begin()));
}

abi::MemoryRange GroupMapped::range_of(std::uint32_t number) const {
  const Entry& entry = entries_[number];
  abi::MemoryRange range;
  range.number = number;
  range.generation = entry.generation;
  range.offset = entry.part.address - entry.part.in.begin;
  range.bytes = entry.part.bytes;
  range.whole = entry.part.in.bytes;
  range.id = entry.part.in.ids.front();
  return range;
}

void GroupMapped::end_claim(const abi::MemoryRange& range, bool mapped) {
  Entry& entry = entries_[range.number];
  if (entry.generation == range.generation && entry.state == Entry::State::kClaimed)
    entry.state = mapped ? Entry::State::kMapped : Entry::State::kFree;
}

abi::MemoryRange GroupMapped::forget(std::uint32_t number, bool freed) {
  Entry& entry = entries_[number];
  if (freed && entry.captured()) freed_.push_back({entry.part, std::move(entry.graphs)});
  entry = {{}, entry.generation, Entry::State::kFree, false, {}};
  abi::MemoryRange range;
  range.number = number;
  range.generation = entry.generation;
  return range;
}

bool GroupMapped::knows(const Allocation& in) const {
  return std::any_of(entries_.begin(), entries_.end(), [&in](const Entry& entry) {
    return entry.state != Entry::State::kFree && entry.part.in.shares(in, in.begin, in.bytes);
  });
}

void GroupMapped::leave(const MemoryPart& part) {
  refuse(part.in, abi::RowsAre::kNotMappable);
  for (Entry& entry : entries_) {
    const bool elsewhere = entry.registered && entry.part.address != part.address;
    if (entry.state == Entry::State::kMapped && entry.part.in.shares(part.in, part.address, 1) && !elsewhere)
      entry.state = Entry::State::kLeft;
  }
}

bool GroupMapped::take_back(const MemoryPart& part) {
  const auto left = std::find_if(entries_.begin(), entries_.end(), [&part](const Entry& entry) {
    return entry.state == Entry::State::kLeft && entry.part.in == part.in &&
           entry.part.address == part.address && entry.part.bytes == part.bytes;
  });
  if (left == entries_.end()) return false;
  left->state = Entry::State::kMapped;
  left->registered = true;
  return true;
}

std::vector<GroupMapped::Known> GroupMapped::mapped() const {
  std::vector<Known> found;
  for (std::uint32_t i = 0; i < entries_.size(); ++i) {
    const Entry& entry = entries_[i];
    if (entry.is_mapped()) found.push_back({i, entry.generation, entry.part, entry.captured()});
  }
  return found;
}

std::vector<GroupMapped::Known> GroupMapped::replaced_by(const Allocation& now) const {
  std::vector<Known> found = mapped();
  std::erase_if(found, [&now](const Known& known) {
    const Allocation& its = known.part.in;
    const std::uintptr_t begin = std::max(its.begin, now.begin);
    const std::uintptr_t end = std::min(its.begin + its.bytes, now.begin + now.bytes);
    return begin >= end || its.shares(now, begin, end - begin) || known.captured;
  });
  return found;
}

std::optional<GroupMapped::Known> GroupMapped::next_captured() {
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    looked_at_ = (looked_at_ + 1) % static_cast<std::uint32_t>(entries_.size());
    const Entry& entry = entries_[looked_at_];
    if (entry.is_mapped() && entry.captured()) return Known{looked_at_, entry.generation, entry.part, true};
  }
  return std::nullopt;
}

// ---- a session's

Status SessionRegistered::add(const MemoryPart& part, const std::vector<Allocation>& freed) {
  std::erase_if(all_, [&freed](const MemoryPart& known) {
    return std::find(freed.begin(), freed.end(), known.in) != freed.end();
  });
  for (const MemoryPart& known : all_) {
    if (part.address < known.address + known.bytes && known.address < part.address + part.bytes)
      return invalid_argument("the range overlaps " + range_of(known) +
                              ", which are registered; allowed: each byte once");
  }
  if (all_.size() >= abi::kMaxMapped) {
    return {StatusCode::kResourceExhausted,
            std::to_string(all_.size()) +
                " ranges are registered in this session; allowed: " + std::to_string(abi::kMaxMapped)};
  }
  all_.push_back(part);
  return {};
}

Status SessionRegistered::remove(std::uintptr_t address, MemoryPart& part) {
  const auto found = std::find_if(all_.rbegin(), all_.rend(),
                                  [address](const MemoryPart& known) { return known.address == address; });
  if (found == all_.rend()) {
    return {StatusCode::kNotFound,
            "address is " + hex(address) + ", where no registered range of this session begins"};
  }
  part = *found;
  all_.erase(std::next(found).base());
  return {};
}

// ---- mapping

Status MemoryMapper::find_range(const void* address, std::uint64_t bytes, MemoryPart& out) const {
  const auto begin = reinterpret_cast<std::uintptr_t>(address);
  if (begin == 0 || begin % abi::kRowPlaceAlign != 0)
    return invalid_argument("address is " + hex(begin) + "; allowed: a multiple of " +
                            std::to_string(abi::kRowPlaceAlign) + ", not 0");
  if (bytes == 0) return bad_value("bytes", 0, "1 or more");
  const Allocation in = device_->allocation_of(begin, bytes);
  if (in.pieces == 0)
    return invalid_argument("address is " + hex(begin) +
                            ", where no memory of a GPU lies; allowed: memory of cudaMalloc or cuMemCreate");
  const std::uint64_t behind = in.bytes - (begin - in.begin);
  if (bytes > behind)
    return invalid_argument("bytes is " + std::to_string(bytes) + "; allowed: 1 .. " +
                            std::to_string(behind) + ", up to the end of the allocation");
  out = {in, begin, bytes};
  abi::MemoryRange range;
  std::vector<UniqueFd>
      fds;  // each group that maps it exports it again: they would keep memory that is freed
  return device_->export_memory(in, range, fds);
}

bool MemoryMapper::is_there(const Allocation& allocation) const {
  return device_->allocation_of(allocation.begin, allocation.bytes) == allocation;
}

std::vector<Allocation> MemoryMapper::freed_of(const std::vector<MemoryPart>& parts) const {
  std::vector<Allocation> freed;
  for (const MemoryPart& part : parts) {
    if (!is_there(part.in)) freed.push_back(part.in);
  }
  return freed;
}

Status MemoryMapper::ask(Group& group, const abi::MemoryRange& range, const std::vector<UniqueFd>& fds,
                         Deadline deadline) {
  const abi::MapMemory message{group.member, 0, range};
  Packet reply;
  FdList sent;
  for (const UniqueFd& fd : fds) sent.push_back(fd.get());
  return connection_.request({abi::AttachType::kMapMemory, abi::AttachType::kMapped, &message,
                              sizeof(message), deadline, deadline, sent},
                             reply);
}

Status MemoryMapper::map(Group& group, const MemoryPart& part, bool registered) {
  std::optional<abi::MemoryRange> range;
  {
    const Lock lock = waits_.lock();
    if (registered && group.mapped.take_back(part)) return {};
    range = group.mapped.claim(part, registered);
  }
  if (!range) {
    return {StatusCode::kResourceExhausted, "the group has " + std::to_string(abi::kMaxMapped) +
                                                " memories mapped; allowed: as many, until one is freed"};
  }
  std::vector<UniqueFd> fds;
  Status status = device_->export_memory(part.in, *range, fds);
  if (status.ok()) status = ask(group, *range, fds, Deadline::in_ms(kMapMs));
  const Lock lock = waits_.lock();
  group.mapped.end_claim(*range, status.ok());
  return status;
}

// If the engines can't be told now, they keep it until its number is used again, or the group ends.
void MemoryMapper::unmap(Group& group, std::uint32_t number, bool freed) {
  abi::MemoryRange range;
  {
    const Lock lock = waits_.lock();
    range = group.mapped.forget(number, freed);
  }
  [[maybe_unused]] const Status told = ask(group, range, {}, Deadline::in_ms(kMapMs));
}

void MemoryMapper::unmap_freed(const std::list<std::unique_ptr<Group>>& groups) {
  struct Looked {
    std::uint32_t member = 0;
    GroupMapped::Known known;
  };
  std::vector<Looked> all;
  {
    const Lock lock = waits_.lock();
    for (const auto& group : groups) {
      for (const GroupMapped::Known& known : group->mapped.mapped()) all.push_back({group->member, known});
    }
  }
  std::erase_if(all, [this](const Looked& looked) { return is_there(looked.known.part.in); });
  const Lock lock = waits_.lock();
  for (const auto& group : groups) {
    const std::vector<GroupMapped::Known> now = group->mapped.mapped();
    for (const Looked& freed : all) {
      const bool there = std::any_of(now.begin(), now.end(), [&freed](const GroupMapped::Known& known) {
        return known.number == freed.known.number && known.generation == freed.known.generation;
      });
      if (!there || group->member != freed.member) continue;
      if (tell_unmapped_locked(*group, freed.known)) group->mapped.forget(freed.known.number, true);
    }
  }
}

bool MemoryMapper::tell_unmapped_locked(const Group& group, const GroupMapped::Known& known) {
  abi::MapMemory message{group.member, 0, {}};
  message.range.number = known.number;
  message.range.generation = known.generation;
  return connection_.tell_locked(abi::AttachType::kMapMemory, &message, sizeof(message));
}

void MemoryMapper::tell_counts(const std::list<std::unique_ptr<Group>>& groups) {
  const Lock lock = waits_.lock();
  for (const auto& group : groups) {
    const std::optional<abi::RowCounts> counts = group->mapped.take_counts();
    if (!counts) continue;
    const abi::RowsTold message{group->member, 0, *counts};
    connection_.tell_locked(abi::AttachType::kRowsTold, &message, sizeof(message));
  }
}

void MemoryMapper::map_again(Group& group) {
  const Deadline deadline = Deadline::in_ms(kMapMs);  // for all: an engine may be stopped
  std::vector<GroupMapped::Known> all;
  {
    const Lock lock = waits_.lock();
    all = group.mapped.mapped();
  }
  for (const GroupMapped::Known& known : all) {
    abi::MemoryRange range;
    {
      const Lock lock = waits_.lock();
      range = group.mapped.range_of(known.number);
    }
    if (range.generation != known.generation || range.whole == 0) continue;
    std::vector<UniqueFd> fds;
    Status status = device_->export_memory(known.part.in, range, fds);
    if (status.ok()) status = ask(group, range, fds, deadline);
    if (status.ok()) continue;
    {
      const Lock lock = waits_.lock();
      tell_unmapped_locked(group, known);
      group.mapped.forget(known.number, false);
    }
    note_refused(group, known.part, status);
  }
}

bool MemoryMapper::note_named(Group& group, const Allocation& in, bool captured) {
  if (in.pieces == 0) return false;
  std::vector<GroupMapped::Known> freed;
  bool wanted = false;
  {
    const Lock lock = waits_.lock();
    freed = group.mapped.replaced_by(in);
    wanted = group.mapped.wants(in, captured);
  }
  for (const GroupMapped::Known& known : freed) unmap(group, known.number, true);
  if (!wanted) return false;
  const MemoryPart whole{in, in.begin, in.bytes};
  const Status status = map(group, whole, false);
  if (!status.ok()) note_refused(group, whole, status);
  return status.ok();
}

void MemoryMapper::note_refused(Group& group, const MemoryPart& part, const Status& why) {
  const bool for_good = why.code() == StatusCode::kInvalidArgument ||
                        why.code() == StatusCode::kUnsupported || why.code() == StatusCode::kPermissionDenied;
  log_line(LogLevel::kInfo, "rows are copied: their memory can't be mapped",
           {{"group", group.group_name}, {"address", hex(part.address)}, {"reason", why.message()}});
  const Lock lock = waits_.lock();
  group.mapped.refuse(part.in, for_good ? abi::RowsAre::kNotMappable : abi::RowsAre::kLimit);
}

RowMemory MemoryMapper::look_up(Group& group, const SubmitRequest& request, bool captured) {
  if (request.memory == nullptr) return {};
  const auto of = [this](const GroupMapped::Rows& its) {
    return its.at == nullptr ? Allocation()
                             : device_->allocation_of(reinterpret_cast<std::uintptr_t>(its.at), its.bytes);
  };
  const NamedRows named = rows_named(group.shape, request);
  RowMemory rows{of(named.in), of(named.out), false, nullptr};
  if (captured) {
    const Status followed = device_->follow_graph(request.stream.stream, rows.graph);
    if (!followed.ok()) {
      log_line(LogLevel::kInfo, "rows are copied: their graph's end would not be known",
               {{"group", group.group_name}, {"reason", followed.message()}});
      return {};
    }
  }
  rows.mapped = note_named(group, rows.in, captured);
  if (rows.out != rows.in) rows.mapped = note_named(group, rows.out, captured) || rows.mapped;
  return rows;
}

Status MemoryMapper::check_captured(Group& group, bool all) {
  std::vector<GroupMapped::Known> named;
  {
    const Lock lock = waits_.lock();
    if (all) {
      named = group.mapped.mapped();
    } else if (const auto next = group.mapped.next_captured(); next) {
      named.push_back(*next);
    }
  }
  for (const GroupMapped::Known& known : named) {
    if (known.captured && !is_there(known.part.in)) unmap(group, known.number, true);
  }
  std::vector<GroupMapped::Freed> freed;
  {
    const Lock lock = waits_.lock();
    freed = group.mapped.take_freed();
  }
  const Deadline deadline = Deadline::in_ms(kGraphEndMs);
  std::erase_if(freed, [&deadline](const GroupMapped::Freed& one) {
    while (!have_ended(one.graphs) && !deadline.passed())
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    return have_ended(one.graphs);
  });
  if (freed.empty()) return {};
  return invalid_argument(
      "memory that a captured graph names has been freed: " + range_of(freed.front().part) +
      (freed.size() == 1 ? "" : " and " + std::to_string(freed.size() - 1) + " more") +
      "; allowed: memory that lives as long as the graph, as that of a graph's pool");
}

}  // namespace epd::client
