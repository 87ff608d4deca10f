// Events for operators: each is a log line, and an entry in a bounded memory that the control plane reads. So
// both agree. Each event has an owner: the user who caused it, or the daemon. Events of one owner never
// remove those of another owner that has fewer.
#pragma once

#include "base/log.h"

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <initializer_list>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace epd {

// The values are those of EventKind in control.proto.
enum class EventKind : std::uint32_t {
  kOther = 0,
  kSessionAttached = 1,
  kSessionEnded = 2,
  kRefused = 3,  // an attach, a join, a call, an operator's request
  kRankJoined = 4,
  kRankLost = 5,
  kGroupBroke = 6,
  kGroupResumed = 7,
  kEngineStarted = 8,
  kEngineReady = 9,
  kEngineDied = 10,
  kDeviceFailed = 11,
  kConfigReloaded = 12,
  kConfigRefused = 13,
  kSettingChanged = 14,  // epctl set
  kEvicted = 15,         // epctl evict
  kDaemonState = 16,     // serving, draining, stopped
  kEngineStopped = 17,   // by a signal or a debugger
  kEngineGoesOn = 18,
  kNodeUp = 19,
  kNodeLost = 20,
  kNodeDrains = 21,
  kRankLeft = 22,    // in order: it left, or its session detached
  kGroupEnded = 23,  // in order: because a rank left
};

struct Event {
  std::uint64_t sequence = 0;  // from 1; those that are forgotten leave holes
  std::uint64_t monotonic_ns = 0;
  std::int64_t unix_ms = 0;
  EventKind kind = EventKind::kOther;
  LogLevel level = LogLevel::kInfo;
  EventOwner owner = kDaemonOwner;
  std::string text;  // the log line's event
  std::vector<std::pair<std::string, std::string>> fields;
};

struct EventBatch {
  std::vector<Event> events;
  std::uint64_t lost = 0;    // events up to the last one here that have been forgotten
  std::uint64_t newest = 0;  // sequence of the newest event; 0: none
};

// Keeps `capacity` events. When it is full, the oldest event of the owner with the most events is removed.
// Any thread may call; none waits for a reader.
class EventLog {
 public:
  explicit EventLog(std::size_t capacity = 4096) : capacity_(capacity) {}
  // While this object lives, record_event() writes here too. Only one may be installed.
  void install();
  ~EventLog();
  EventLog(const EventLog&) = delete;
  EventLog& operator=(const EventLog&) = delete;

  void add(Event event);
  // Returns up to `limit` events that follow number `after`. If there are none, waits for one, up to
  // `wait_ms`.
  EventBatch read(std::uint64_t after, std::size_t limit, std::uint32_t wait_ms);

 private:
  void forget_one();  // with the lock held

  const std::size_t capacity_;
  std::mutex mutex_;
  std::condition_variable added_;
  std::map<std::uint64_t, Event> events_;                     // by sequence; guarded by mutex_
  std::map<EventOwner, std::deque<std::uint64_t>> by_owner_;  // sequences, ascending; likewise
  std::uint64_t newest_ = 0;                                  // likewise
};

// Logs the event, and remembers it at any log level.
void record_event(EventKind kind, LogLevel level, std::string_view event,
                  std::initializer_list<LogField> fields = {}, EventOwner owner = kDaemonOwner,
                  const char* file = __builtin_FILE());
// The same for events that a client causes by permitted actions (attach, join, leave). They are limited for
// each user, far above the needs of programs. Suppressed ones are counted, and reported by
// LogLimiter::tell_suppressed().
void record_of_user(EventOwner owner, EventKind kind, LogLevel level, std::string_view event,
                    std::initializer_list<LogField> fields, const char* file = __builtin_FILE());

}  // namespace epd
