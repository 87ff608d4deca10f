#include "base/event.h"

#include "base/clock.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <iterator>

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
    events_.push_back(std::move(event));
    if (events_.size() > capacity_) events_.pop_front();
  }
  added_.notify_all();
}

EventBatch EventLog::read(std::uint64_t after, std::size_t limit, std::uint32_t wait_ms) {
  std::unique_lock lock(mutex_);
  added_.wait_for(lock, std::chrono::milliseconds(wait_ms), [&] { return newest_ > after; });
  EventBatch batch;
  batch.newest = newest_;
  if (newest_ <= after || events_.empty()) return batch;
  const std::uint64_t oldest = events_.front().sequence;
  const std::uint64_t first = std::max(oldest, after + 1);
  batch.lost = first - (after + 1);
  const std::size_t available = newest_ - first + 1;
  const auto begin = events_.begin() + static_cast<std::ptrdiff_t>(first - oldest);
  batch.events.assign(begin, begin + static_cast<std::ptrdiff_t>(std::min(limit, available)));
  return batch;
}

void record_event(EventKind kind, LogLevel level, std::string_view event,
                  std::initializer_list<LogField> fields) {
  log_event(level, event, fields);
  EventLog* log = g_event_log.load();
  if (log == nullptr) return;
  Event record;
  record.monotonic_ns = MonotonicClock().now_ns();
  record.unix_ms = std::chrono::duration_cast<std::chrono::milliseconds>(
                       std::chrono::system_clock::now().time_since_epoch())
                       .count();
  record.kind = kind;
  record.level = level;
  record.text = event;
  for (const LogField& field : fields) record.fields.emplace_back(field.key(), field.value());
  log->add(std::move(record));
}

}  // namespace epd
