// Memory of the caller's that the engines of a group have mapped: calls that name rows there copy nothing. An
// allocation is known by its id, never by its address: what is freed and allocated again at the same address
// is other memory. See README, "Memory of the caller's".
#pragma once

#include "connection.h"
#include "device.h"
#include "errors.h"
#include "proto/mapped_memory.h"

#include <cstdint>
#include <list>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace epd::client {

struct Group;
struct SubmitRequest;

// A part of an allocation in which rows may lie.
struct MemoryPart {
  Allocation in;
  std::uintptr_t address = 0;
  std::uint64_t bytes = 0;
};

// In which allocations the rows of a call lie, as the driver said just before.
struct RowMemory {
  Allocation in;        // of x, or y
  Allocation out;       // of recv_x, or out
  bool mapped = false;  // one of them was mapped just now
  GraphEnd graph;       // that captures the call; null: none does
};

// The memory that the engines of a group have mapped. Callers hold the session's mutex.
class GroupMapped {
 public:
  // An allocation that so many calls have named is mapped; at once for a graph.
  static constexpr std::int32_t kMapAtCall = 3;

  // After a failure that may pass, so many calls more.
  static constexpr std::int32_t kAgainAfter = 256;

  struct Rows {
    const void* at = nullptr;
    std::uint64_t bytes = 0;
    bool registered = false;  // only memory that is registered will do
  };
  // Where the rows lie. 0: they have to be copied. Counts what becomes of them.
  abi::RowPlace find(const Rows& rows, const Allocation& in, const GraphEnd& graph);
  void count(abi::RowsAre rows);
  // The counts, if they have changed since the last time.
  std::optional<abi::RowCounts> take_counts();
  bool has_counts() const { return counts_changed_; }
  // There is something that the watch has to look at from time to time.
  bool has_news() const { return counts_changed_ || !mapped().empty(); }
  // Counts a call that names rows there. True: the allocation is to be mapped now.
  bool wants(const Allocation& in, bool captured);
  // Calls copy rows of the allocation from here on. kLimit: for a while.
  void refuse(const Allocation& in, abi::RowsAre why);

  // Takes a number for the part. None: all are in use. What is mapped keeps its number until it is freed,
  // because calls that are still enqueued may name it.
  std::optional<abi::MemoryRange> claim(const MemoryPart& part, bool registered);
  // The engines have mapped it, or not.
  void end_claim(const abi::MemoryRange& range, bool mapped);
  // Calls name it no more. The range is what engines are to be told. `freed`: graphs that name it and have
  // not ended are to be reported.
  abi::MemoryRange forget(std::uint32_t number, bool freed);
  struct Freed {
    MemoryPart part;
    std::vector<GraphEnd> graphs;
  };
  // Returns once what graphs name and has been forgotten as freed.
  std::vector<Freed> take_freed() { return std::exchange(freed_, {}); }
  // A registration has ended: from here on calls copy rows of the allocation, but for other registered parts.
  // Calls that are enqueued, and graphs, may still name it.
  void leave(const MemoryPart& part);
  // It is registered again. False: it has not been left.
  bool take_back(const MemoryPart& part);
  struct Known {
    std::uint32_t number = 0;
    std::uint32_t generation = 0;
    MemoryPart part;
    bool captured = false;
  };
  std::vector<Known> mapped() const;
  // Those that lie where the allocation lies, are other memory, and are named by no graph: they have been
  // freed.
  std::vector<Known> replaced_by(const Allocation& now) const;
  // One that graphs name, in turn.
  std::optional<Known> next_captured();
  // The range as the engines were told of it.
  abi::MemoryRange range_of(std::uint32_t number) const;

 private:
  struct Entry {
    MemoryPart part;
    std::uint32_t generation = 0;  // the last that the number had
    enum class State { kFree, kClaimed, kMapped, kLeft } state = State::kFree;
    bool registered = false;
    std::vector<GraphEnd> graphs;  // that name it

    bool captured() const;
    bool is_mapped() const { return state == State::kMapped || state == State::kLeft; }
  };
  struct Use {
    std::uint64_t id = 0;  // of the first piece
    std::int32_t calls = 0;
    abi::RowsAre why = abi::RowsAre::kFirstCalls;  // are its rows copied
  };
  abi::RowPlace look_for(const Rows& rows, const Allocation& in, const GraphEnd& graph, abi::RowsAre& are);
  const Use* find_use(const Allocation& in) const;
  Use& use_of(const Allocation& in);
  bool knows(const Allocation& in) const;

  std::vector<Entry> entries_;  // by number
  std::vector<Use> uses_;       // the oldest first
  std::vector<Freed> freed_;
  std::uint32_t looked_at_ = 0;
  abi::RowCounts counts_{};
  bool counts_changed_ = false;
};

// The ranges that a session has registered. Callers hold its mutex.
class SessionRegistered {
 public:
  // INVALID_ARGUMENT: the range is registered, or overlaps one that is. RESOURCE_EXHAUSTED: there are
  // kMaxMapped. `freed`: allocations that are no more.
  Status add(const MemoryPart& part, const std::vector<Allocation>& freed);
  // NOT_FOUND: no range begins there.
  Status remove(std::uintptr_t address, MemoryPart& part);
  const std::vector<MemoryPart>& all() const { return all_; }

 private:
  std::vector<MemoryPart> all_;
};

// Has engines map memory. Any thread may call, without the mutex.
class MemoryMapper {
 public:
  // `device`: null on host devices.
  MemoryMapper(Device* device, Waits& waits, Connection& connection)
      : device_(device), waits_(waits), connection_(connection) {}

  // INVALID_ARGUMENT: no range, or it is not within one allocation that engines can map.
  Status find_range(const void* address, std::uint64_t bytes, MemoryPart& out) const;
  bool is_there(const Allocation& allocation) const;
  // The allocations of parts that are no more.
  std::vector<Allocation> freed_of(const std::vector<MemoryPart>& parts) const;
  // Returns when all engines of the group have it.
  Status map(Group& group, const MemoryPart& part, bool registered);
  void unmap(Group& group, std::uint32_t number, bool freed);
  // Unmaps what has been freed, in all groups. The list is guarded by the mutex. Does not wait for engines.
  void unmap_freed(const std::list<std::unique_ptr<Group>>& groups);
  // Tells the daemon the counts of all groups. As above.
  void tell_counts(const std::list<std::unique_ptr<Group>>& groups);
  // The group goes on, perhaps with another engine that has not mapped all. What that can't map is copied
  // from here on; graphs that name it fail.
  void map_again(Group& group);

  // Asks where the rows of a call lie. Maps what calls name again, and unmaps what has been freed.
  RowMemory look_up(Group& group, const SubmitRequest& request, bool captured);
  // OK, or INVALID_ARGUMENT: memory that a graph names has been freed. It is unmapped, so that the graph
  // fails from here on. Of all such memory, or of one in turn.
  Status check_captured(Group& group, bool all);

 private:
  // True: it was mapped.
  bool note_named(Group& group, const Allocation& in, bool captured);
  void note_refused(Group& group, const MemoryPart& part, const Status& why);
  Status ask(Group& group, const abi::MemoryRange& range, const std::vector<UniqueFd>& fds,
             Deadline deadline);
  // Does not wait. False: it was not sent.
  bool tell_unmapped_locked(const Group& group, const GroupMapped::Known& known);

  Device* const device_;
  Waits& waits_;
  Connection& connection_;
};

}  // namespace epd::client
