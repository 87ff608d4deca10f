// Structured logs: one event name, then key=value fields. spdlog behind; to standard error, by a thread of
// its own and a queue of 2048 lines: whoever logs never waits for a reader. Lines that don't fit, the oldest,
// or that can't be written are lost, counted and told (as an event, too).
//   log_event(LogLevel::kInfo, "session attached", {{"session", id}, {"pid", pid}});
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <type_traits>

namespace epd {

enum class EventKind : std::uint32_t;

// spdlog's numbers.
enum class LogLevel : int { kTrace = 0, kDebug = 1, kInfo = 2, kWarning = 3, kError = 4, kOff = 6 };
enum class LogFormat { kLogfmt, kJson };

class LogField {
 public:
  LogField(std::string_view key, std::string_view value) : key_(key), value_(value), quoted_(true) {}
  LogField(std::string_view key, const std::string& value) : LogField(key, std::string_view(value)) {}
  LogField(std::string_view key, const char* value) : LogField(key, std::string_view(value)) {}
  LogField(std::string_view key, bool value) : key_(key), value_(value ? "true" : "false") {}
  LogField(std::string_view key, double value);
  template <typename T>
  requires std::is_integral_v<T> LogField(std::string_view key, T value)
      : key_(key), value_(std::to_string(value)) {}

  std::string_view key() const { return key_; }
  const std::string& value() const { return value_; }
  bool quoted() const { return quoted_; }

 private:
  std::string_view key_;
  std::string value_;
  bool quoted_ = false;
};

// `process` names the writer in each line: "epd", "engine host:0". Call once, before other threads.
void log_init(const std::string& process, LogLevel level, LogFormat format);
void log_set_level(LogLevel level);
bool log_enabled(LogLevel level);
void log_event(LogLevel level, std::string_view event, std::initializer_list<LogField> fields = {});

// Waits until everything has been written, or a second. Before the process ends.
void log_flush();
std::uint64_t log_lines_lost();
// One line, outside of the log, before the process ends. A reader that stands still costs the line.
void print_error(const std::string& line);

// At most `burst` lines, then one each second; a line that follows suppressed ones says how many.
// One per call site, static; safe from any thread.
class LogLimiter {
 public:
  explicit LogLimiter(std::uint32_t burst = 10) : burst_(burst) {}
  void log(LogLevel level, std::string_view event, std::initializer_list<LogField> fields);
  // The same for an event (base/event.h).
  void record(EventKind kind, LogLevel level, std::string_view event, std::initializer_list<LogField> fields);

 private:
  // False: to be suppressed. Else how many were, since the last that was not.
  bool admit(std::uint64_t& suppressed);

  std::uint32_t burst_;
  std::uint32_t used_ = 0;        // guarded by a mutex in log.cpp
  std::uint64_t suppressed_ = 0;  // likewise
  std::uint64_t window_ns_ = 0;   // likewise
};

}  // namespace epd
