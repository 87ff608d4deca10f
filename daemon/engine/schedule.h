// The operations in flight, and whose turn it is. Sessions have turns. In a session, a turn continues at the
// operation at which the last turn ended. So the operations of one session, however many, delay those of
// another by one turn.
#pragma once

#include "operation.h"

#include <cstddef>
#include <cstdint>
#include <limits>
#include <list>
#include <map>
#include <memory>

namespace epd::engine {

inline constexpr std::int32_t kNoPriority = std::numeric_limits<std::int32_t>::min();

class Schedule {
 public:
  // The operations of one session.
  class Queue {
   public:
    // The operation at which a turn continues, or null if there is none. Later calls return those behind it.
    Operation* next();
    std::size_t size() const { return operations_.size(); }
    // Called for each operation after its step: its priority, if its rows could move now.
    void note_moving(std::int32_t priority);
    // The highest of these priorities, over a whole lap of the operations.
    std::int32_t moving() const { return moving_; }

    std::uint32_t turns = 0;

   private:
    friend class Schedule;
    using List = std::list<std::unique_ptr<Operation>>;

    List operations_;  // in the order of acceptance
    List::iterator next_ = operations_.end();
    std::int32_t moving_ = kNoPriority;
    std::int32_t lap_ = kNoPriority;  // in this lap so far
  };

  bool empty() const { return count_ == 0; }
  // Adds an operation to the session with this id.
  void add(std::uint64_t session_id, std::unique_ptr<Operation> operation);
  // Destroys the operation.
  void remove(const Operation& operation);
  bool has(std::uint64_t session_id) const;
  // The number of sessions that may have operations.
  std::size_t num_sessions() const { return queues_.size(); }
  // The session whose turn it is. The schedule must not be empty().
  Queue& next_session();
  // The highest priority among operations whose rows could move when they were last looked at.
  std::int32_t moving_priority() const;

  // The first operation, over all sessions, for which `condition` holds; null if there is none.
  template <typename Condition>
  const Operation* find(Condition condition) const {
    for (const auto& [id, queue] : queues_) {
      for (const auto& operation : queue.operations_) {
        if (condition(*operation)) return operation.get();
      }
    }
    return nullptr;
  }
  template <typename Visit>
  void for_each(Visit visit) const {
    find([&visit](Operation& operation) {
      visit(operation);
      return false;
    });
  }
  void clear();

 private:
  std::map<std::uint64_t, Queue> queues_;
  std::uint64_t last_ = 0;  // the session that had the last turn
  std::size_t count_ = 0;
};

}  // namespace epd::engine
