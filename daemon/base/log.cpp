#include "base/log.h"

#include "base/clock.h"
#include "base/event.h"

#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>
#include <cmath>
#include <mutex>

namespace epd {
namespace {

LogFormat g_format = LogFormat::kLogfmt;
std::string g_process = "epd";
std::mutex g_limiter_mutex;
constexpr const char* kSuppressed = "lines like this one were suppressed";

// Bytes of the well-formed UTF-8 sequence that `text` begins with; 0 if it does not.
std::size_t utf8_length(std::string_view text) {
  const auto byte = [&](std::size_t i) { return i < text.size() ? static_cast<unsigned char>(text[i]) : 0u; };
  const auto follows = [&](std::size_t i) { return (byte(i) & 0xc0u) == 0x80u; };
  const unsigned first = byte(0);
  if (first < 0x80) return 1;
  if (first >= 0xc2 && first <= 0xdf) return follows(1) ? 2 : 0;
  if (first >= 0xe0 && first <= 0xef) {
    const bool overlong = first == 0xe0 && byte(1) < 0xa0;
    const bool surrogate = first == 0xed && byte(1) >= 0xa0;
    return follows(1) && follows(2) && !overlong && !surrogate ? 3 : 0;
  }
  if (first >= 0xf0 && first <= 0xf4) {
    const bool overlong = first == 0xf0 && byte(1) < 0x90;
    const bool too_large = first == 0xf4 && byte(1) >= 0x90;
    return follows(1) && follows(2) && follows(3) && !overlong && !too_large ? 4 : 0;
  }
  return 0;
}

// Clients choose some of this text: whatever they send stays inside the quotes and is valid JSON.
void append_quoted(std::string& out, std::string_view text) {
  out += '"';
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (static_cast<unsigned char>(c) >= 0x80) {
      const std::size_t length = utf8_length(text.substr(i));
      out += length == 0 ? std::string_view("\\ufffd") : text.substr(i, length);
      if (length != 0) i += length - 1;
      continue;
    }
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      static constexpr char kHex[] = "0123456789abcdef";
      out += "\\u00";
      out += kHex[(c >> 4) & 0xf];
      out += kHex[c & 0xf];
    } else {
      out += c;
    }
  }
  out += '"';
}

spdlog::logger& logger() {
  static const auto instance = [] {
    auto made = std::make_shared<spdlog::logger>("epd", std::make_shared<spdlog::sinks::stderr_sink_mt>());
    made->set_pattern("%Y-%m-%dT%H:%M:%S.%f%z level=%l %v");
    made->flush_on(spdlog::level::warn);
    return made;
  }();
  return *instance;
}

}  // namespace

LogField::LogField(std::string_view key, double value)
    : key_(key), value_(fmt::format("{:.3f}", value)), quoted_(!std::isfinite(value)) {}

void log_init(const std::string& process, LogLevel level, LogFormat format) {
  g_process = process;
  g_format = format;
  logger().set_pattern(format == LogFormat::kJson ? R"({"time":"%Y-%m-%dT%H:%M:%S.%f%z","level":"%l",%v})"
                                                  : "%Y-%m-%dT%H:%M:%S.%f%z level=%l %v");
  log_set_level(level);
}

void log_set_level(LogLevel level) {
  logger().set_level(static_cast<spdlog::level::level_enum>(level));
}

bool log_enabled(LogLevel level) {
  return logger().should_log(static_cast<spdlog::level::level_enum>(level));
}

void log_event(LogLevel level, std::string_view event, std::initializer_list<LogField> fields) {
  if (!log_enabled(level)) return;
  const bool json = g_format == LogFormat::kJson;
  std::string line = json ? "\"process\":" : "process=";
  append_quoted(line, g_process);
  line += json ? ",\"event\":" : " event=";
  append_quoted(line, event);
  for (const LogField& field : fields) {
    line += json ? ",\"" : " ";
    line += field.key();
    line += json ? "\":" : "=";
    if (field.quoted()) {
      append_quoted(line, field.value());
    } else {
      line += field.value();
    }
  }
  logger().log(static_cast<spdlog::level::level_enum>(level), "{}", line);
}

bool LogLimiter::admit(std::uint64_t& suppressed) {
  const std::lock_guard lock(g_limiter_mutex);
  const std::uint64_t now = MonotonicClock().now_ns();
  if (now - window_ns_ >= 1'000'000'000u) {
    used_ = used_ > burst_ ? burst_ - 1 : (used_ > 0 ? used_ - 1 : 0);
    window_ns_ = now;
  }
  if (used_ >= burst_) {
    ++suppressed_;
    return false;
  }
  ++used_;
  suppressed = std::exchange(suppressed_, 0);
  return true;
}

void LogLimiter::log(LogLevel level, std::string_view event, std::initializer_list<LogField> fields) {
  std::uint64_t suppressed = 0;
  if (!log_enabled(level) || !admit(suppressed)) return;
  log_event(level, event, fields);
  if (suppressed != 0) log_event(level, kSuppressed, {{"event_name", event}, {"count", suppressed}});
}

void LogLimiter::record(EventKind kind, LogLevel level, std::string_view event,
                        std::initializer_list<LogField> fields) {
  std::uint64_t suppressed = 0;
  if (!admit(suppressed)) return;
  record_event(kind, level, event, fields);
  if (suppressed != 0) record_event(kind, level, kSuppressed, {{"event_name", event}, {"count", suppressed}});
}

}  // namespace epd
