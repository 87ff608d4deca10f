#include "base/event.h"

#include "base/clock.h"

#include <algorithm>
#include <atomic>
#include <chrono>

namespace epd {
namespace {

std::atomic<EventLog*> g_event_log{nullptr};

}  // namespace

void EventLog::install() {
  g_event_log.store(this);
}

EventLog::~EventLog() {
  EventLog* self = this;
  g_event_log.compare_exchange_strong(self, nullptr);
}

void EventLog::add(Event event) {
  {
    const std::lock_guard lock(mutex_);
    event.sequence = ++newest_;
    by_owner_[event.owner].push_back(event.sequence);
    events_.emplace_hint(events_.end(), event.sequence, std::move(event));
    if (events_.size() > capacity_) forget_one();
  }
  added_.notify_all();
}

// The owner with the most events; of several, the one whose oldest event is older.
void EventLog::forget_one() {
  const auto most = std::max_element(by_owner_.begin(), by_owner_.end(), [](const auto& a, const auto& b) {
    const auto& x = a.second;
    const auto& y = b.second;
    return x.size() != y.size() ? x.size() < y.size() : x.front() > y.front();
  });
  events_.erase(most->second.front());
  most->second.pop_front();
  if (most->second.empty()) by_owner_.erase(most);
}

EventBatch EventLog::read(std::uint64_t after, std::size_t limit, std::uint32_t wait_ms) {
  std::unique_lock lock(mutex_);
  added_.wait_for(lock, std::chrono::milliseconds(wait_ms), [&] { return newest_ > after; });
  EventBatch batch;
  batch.newest = newest_;
  for (auto at = events_.upper_bound(after); at != events_.end() && batch.events.size() < limit; ++at)
    batch.events.push_back(at->second);
  if (!batch.events.empty()) batch.lost = batch.events.back().sequence - after - batch.events.size();
  return batch;
}

void record_event(EventKind kind, LogLevel level, std::string_view event,
                  std::initializer_list<LogField> fields, EventOwner owner, const char* file) {
  log_event(level, event, fields, file);
  EventLog* log = g_event_log.load();
  if (log == nullptr) return;
  Event record;
  record.monotonic_ns = MonotonicClock().now_ns();
  record.unix_ms = std::chrono::duration_cast<std::chrono::milliseconds>(
                       std::chrono::system_clock::now().time_since_epoch())
                       .count();
  record.kind = kind;
  record.level = level;
  record.owner = owner;
  record.text = event;
  for (const LogField& field : fields) record.fields.emplace_back(field.key(), field.value());
  log->add(std::move(record));
}

void record_of_user(EventOwner owner, EventKind kind, LogLevel level, std::string_view event,
                    std::initializer_list<LogField> fields, const char* file) {
  // A program of many ranks makes a burst: it attaches and joins all of them.
  constexpr std::uint32_t kBurst = 1000;
  constexpr std::uint32_t kEachSecond = 20;
  static LogLimiter limiter(kBurst, kEachSecond);
  limiter.record(kind, level, event, fields, owner, file);
}

}  // namespace epd
