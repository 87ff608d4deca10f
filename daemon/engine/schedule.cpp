#include "schedule.h"

#include "session_port.h"

#include <algorithm>
#include <utility>

namespace epd::engine {

Operation* Schedule::Queue::next() {
  if (operations_.empty()) return nullptr;
  if (next_ == operations_.end()) {
    next_ = operations_.begin();
    moving_ = std::exchange(lap_, kNoPriority);
  }
  return (next_++)->get();
}

void Schedule::Queue::note_moving(std::int32_t priority) {
  lap_ = std::max(lap_, priority);
  moving_ = std::max(moving_, priority);
}

void Schedule::add(std::uint64_t session_id, std::unique_ptr<Operation> operation) {
  queues_[session_id].operations_.push_back(std::move(operation));
  ++count_;
}

void Schedule::remove(const Operation& operation) {
  Queue& queue = queues_.at(operation.member().session->id());
  const auto found = std::find_if(queue.operations_.begin(), queue.operations_.end(),
                                  [&](const auto& entry) { return entry.get() == &operation; });
  if (queue.next_ == found) ++queue.next_;
  queue.operations_.erase(found);
  --count_;
}

bool Schedule::has(std::uint64_t session_id) const {
  const auto found = queues_.find(session_id);
  return found != queues_.end() && !found->second.operations_.empty();
}

Schedule::Queue& Schedule::next_session() {
  while (true) {
    auto next = queues_.upper_bound(last_);
    if (next == queues_.end()) next = queues_.begin();
    last_ = next->first;
    if (!next->second.operations_.empty()) return next->second;
    queues_.erase(next);
  }
}

std::int32_t Schedule::moving_priority() const {
  std::int32_t highest = kNoPriority;
  for (const auto& [id, queue] : queues_) highest = std::max(highest, queue.moving_);
  return highest;
}

void Schedule::clear() {
  queues_.clear();
  count_ = 0;
}

}  // namespace epd::engine
