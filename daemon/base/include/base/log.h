// Structured logs: an event name, then key=value fields. spdlog formats them. A thread writes them to
// standard error from a queue of 2048 lines, so a caller never waits for a reader. If the queue is full, the
// oldest lines are lost. Lost lines are counted and reported, also as an event.
//   log_event(LogLevel::kInfo, "session attached", {{"session", id}, {"pid", pid}});
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>

namespace epd {

enum class EventKind : std::uint32_t;

// The owner of an event or a line: a user's number, or the daemon.
using EventOwner = std::int64_t;
inline constexpr EventOwner kDaemonOwner = -1;

// spdlog's numbers.
enum class LogLevel : int { kTrace = 0, kDebug = 1, kInfo = 2, kWarning = 3, kError = 4, kOff = 6 };
enum class LogFormat { kLogfmt, kJson };

const char* log_level_word(LogLevel level);  // "info"

// The rooms (folders of the daemon) that log. Each may have a level of its own.
inline constexpr std::array<std::string_view, 8> kLogRooms = {"base",   "cluster", "control", "device",
                                                              "engine", "metrics", "session", "supervisor"};

struct LogLevels {
  LogLevel general = LogLevel::kInfo;
  std::array<std::optional<LogLevel>, kLogRooms.size()>
      rooms{};  // in the order of kLogRooms; none: as general

  LogLevels() = default;
  LogLevels(LogLevel level) : general(level) {}  // NOLINT(google-explicit-constructor): one for all
};
// Parses "info", "info,session=debug,engine=trace". No value: the text is not of this form.
std::optional<LogLevels> parse_log_levels(std::string_view text);
std::string to_text(const LogLevels& levels);

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

// `process` names the writer in each line: "epd", "engine host:0". `journal`: standard error is systemd's
// journal, and each line begins with its importance, as <6>. Call once, before other threads.
void log_init(const std::string& process, const LogLevels& levels, LogFormat format, bool journal = false);
void log_set_levels(const LogLevels& levels);
// `file` is the caller's, which tells its room.
bool log_enabled(LogLevel level, const char* file = __builtin_FILE());
void log_event(LogLevel level, std::string_view event, std::initializer_list<LogField> fields = {},
               const char* file = __builtin_FILE());

// Waits until everything has been written, at most a second. Called before the process ends.
void log_flush();
std::uint64_t log_lines_lost();
// Why the last line could not be written: "standard error: No space left on device". Empty: it was written.
std::string log_problem();
// Writes one line outside of the log, before the process ends. It is lost if the reader does not read.
void print_error(const std::string& line);
// The same for the last words of a program that may have begun to log: a log line in JSON and in the journal,
// otherwise the text for people.
void print_last_error(const std::string& text);

// Allows each owner `burst` lines, then `each_second`. So no user's flood suppresses another's lines. The
// owner's next line, or tell_suppressed(), says how many were suppressed. One static object for each call
// site. Safe from any thread.
class LogLimiter {
 public:
  explicit LogLimiter(std::uint32_t burst = 10, std::uint32_t each_second = 1);
  ~LogLimiter();
  LogLimiter(const LogLimiter&) = delete;
  LogLimiter& operator=(const LogLimiter&) = delete;

  void log(LogLevel level, std::string_view event, std::initializer_list<LogField> fields,
           const char* file = __builtin_FILE());
  // The same for an event (base/event.h).
  void record(EventKind kind, LogLevel level, std::string_view event, std::initializer_list<LogField> fields,
              EventOwner owner, const char* file = __builtin_FILE());

  // Logs the counts of suppressed lines, as far as limiters may write again. Called from time to time.
  static void tell_suppressed();

 private:
  struct Suppressed {
    EventOwner owner = kDaemonOwner;
    std::uint64_t count = 0;
    std::string event;  // the last one
    LogLevel level = LogLevel::kInfo;
    EventKind kind{};
    bool recorded = false;
    const char* file = "";
    void tell() const;
  };
  struct Budget {
    double left = 0;  // lines
    std::uint64_t filled_ns = 0;
    Suppressed suppressed;
  };
  // False: the line is suppressed. Otherwise `before` has those suppressed since the last one that was not.
  bool admit(const Suppressed& line, Suppressed& before);
  Budget& budget_of(EventOwner owner, std::uint64_t now_ns);
  void fill(Budget& budget, std::uint64_t now_ns) const;

  const std::uint32_t burst_;
  const std::uint32_t each_second_;
  std::map<EventOwner, Budget> budgets_;  // guarded by a mutex in log.cpp
};

}  // namespace epd
