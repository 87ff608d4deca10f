// The operations in flight, and whose turn it is: session by session, and in each from the operation on at
// which its last turn ended. So the operations of one session, however many, delay those of another by one
// turn.
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
  // Of one session.
  class Queue {
   public:
    // The operation at which a turn goes on, or null if there is none. Those behind it come next.
    Operation* next();
    std::size_t size() const { return operations_.size(); }
    // Called for each operation after its step: which priority, if its rows could move now.
    void note_moving(std::int32_t priority);
    // The highest of those, of a whole lap of the operations.
    std::int32_t moving() const { return moving_; }

    std::uint32_t turns = 0;

   private:
    friend class Schedule;
    using List = std::list<std::unique_ptr<Operation>>;

    List operations_;  // in order of acceptance
    List::iterator next_ = operations_.end();
    std::int32_t moving_ = kNoPriority;
    std::int32_t lap_ = kNoPriority;  // as far as this lap has come
  };

  bool empty() const { return count_ == 0; }
  // Of a session, by its id.
  void add(std::uint64_t session_id, std::unique_ptr<Operation> operation);
  // Destroys it.
  void remove(const Operation& operation);
  bool has(std::uint64_t session_id) const;
  // Sessions that may have operations.
  std::size_t num_sessions() const { return queues_.size(); }
  // The session whose turn it is. Not empty().
  Queue& next_session();
  // The highest among operations whose rows could move when they were last looked at.
  std::int32_t moving_priority() const;

  // The first, over all sessions, that `condition` holds for; null if none.
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
  std::uint64_t last_ = 0;  // the session that had its turn
  std::size_t count_ = 0;
};

}  // namespace epd::engine
