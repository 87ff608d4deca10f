// The lines of libepd on standard error if $EPD_LOG asks for them: one for each attach, join, leave and
// detach (info), for each call that fails (error), and for each submission (debug). Without the variable it
// says nothing, and looks at one number.
#pragma once

#include <atomic>
#include <initializer_list>
#include <string>
#include <utility>

namespace epd::client {

enum class LogLevel : int { kUnread = -1, kOff = 0, kError, kInfo, kDebug };

namespace log_detail {
extern std::atomic<int> level;
LogLevel read_level();  // of the environment, once
}  // namespace log_detail

inline bool logs(LogLevel wanted) {
  int level = log_detail::level.load(std::memory_order_relaxed);
  if (level == static_cast<int>(LogLevel::kUnread)) level = static_cast<int>(log_detail::read_level());
  return level >= static_cast<int>(wanted);
}

// If logs(level): `time level=info process="libepd" pid=7 event="attached" device="host:0"`.
void log_line(LogLevel level, const char* event,
              std::initializer_list<std::pair<const char*, std::string>> fields);

}  // namespace epd::client
