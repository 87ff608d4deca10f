#include "base/log.h"

#include "base/clock.h"
#include "base/event.h"

#include <poll.h>
#include <signal.h>
#include <spdlog/async_logger.h>
#include <spdlog/details/null_mutex.h>
#include <spdlog/details/thread_pool.h>
#include <spdlog/sinks/base_sink.h>
#include <spdlog/spdlog.h>
#include <unistd.h>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <mutex>
#include <thread>

namespace epd {
namespace {

LogFormat g_format = LogFormat::kLogfmt;
std::string g_process = "epd";
std::mutex g_limiter_mutex;
constexpr const char* kSuppressed = "lines like this one were suppressed";
constexpr std::size_t kQueuedLines = 2048;
constexpr int kPatienceMs = 1000;  // with a reader, when the process ends
constexpr std::uint64_t kTellLostNs = 1'000'000'000;

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

// Writes to standard error, on the logging thread. A reader that stands still holds up this thread and nobody
// else; one that has gone costs the lines.
class StderrSink final : public spdlog::sinks::base_sink<spdlog::details::null_mutex> {
 public:
  std::uint64_t done() const { return done_.load(); }
  std::uint64_t failed() const { return failed_.load(); }

 private:
  void sink_it_(const spdlog::details::log_msg& message) override {
    spdlog::memory_buf_t line;
    formatter_->format(message, line);
    if (!write_all(line.data(), line.size())) ++failed_;
    ++done_;
  }
  void flush_() override {}

  static bool write_all(const char* data, std::size_t bytes) {
    while (bytes != 0) {
      const ssize_t n = ::write(STDERR_FILENO, data, bytes);
      if (n > 0) {
        data += n;
        bytes -= static_cast<std::size_t>(n);
        continue;
      }
      if (n < 0 && errno == EINTR) continue;
      if (n == 0 || errno != EAGAIN) return false;
      pollfd writable{STDERR_FILENO, POLLOUT, 0};  // somebody has made it non-blocking
      ::poll(&writable, 1, -1);
    }
    return true;
  }

  std::atomic<std::uint64_t> done_{0};
  std::atomic<std::uint64_t> failed_{0};
};

// Never destroyed: that would wait for the thread, which may wait for a reader.
struct Log {
  std::shared_ptr<spdlog::details::thread_pool> pool =
      std::make_shared<spdlog::details::thread_pool>(kQueuedLines, 1);
  std::shared_ptr<StderrSink> sink = std::make_shared<StderrSink>();
  // Past the queue's length the oldest lines go.
  std::shared_ptr<spdlog::async_logger> logger = std::make_shared<spdlog::async_logger>(
      "epd", sink, pool, spdlog::async_overflow_policy::overrun_oldest);
  std::atomic<std::uint64_t> queued{0};
  std::atomic<std::uint64_t> told_lost{0};
  std::atomic<std::uint64_t> tell_at_ns{0};

  std::uint64_t overrun() const { return pool->overrun_counter(); }
  std::uint64_t lost() const { return overrun() + sink->failed(); }
};

Log& log() {
  static Log* const instance = [] {
    // The thread takes none of the process's signals.
    sigset_t all;
    sigset_t before;
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_BLOCK, &all, &before);
    auto* made = new Log;
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
    made->logger->set_pattern("%Y-%m-%dT%H:%M:%S.%f%z level=%l %v");
    return made;
  }();
  return *instance;
}

spdlog::logger& logger() {
  return *log().logger;
}

// What nobody could read is told where operators look, and in the log once it is read again.
void tell_lost() {
  Log& l = log();
  const std::uint64_t lost = l.lost();
  std::uint64_t told = l.told_lost.load();
  if (lost == told) return;
  const std::uint64_t now = MonotonicClock().now_ns();
  std::uint64_t due = l.tell_at_ns.load();
  if (now < due || !l.tell_at_ns.compare_exchange_strong(due, now + kTellLostNs)) return;
  if (!l.told_lost.compare_exchange_strong(told, lost)) return;
  record_event(
      EventKind::kOther, LogLevel::kWarning, "log lines lost",
      {{"count", lost - told}, {"in_all", lost}, {"reason", "standard error was not read, or is closed"}});
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

void log_flush() {
  Log& l = log();
  const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(kPatienceMs);
  while (l.sink->done() + l.overrun() < l.queued.load() && std::chrono::steady_clock::now() < end)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

std::uint64_t log_lines_lost() {
  return log().lost();
}

void print_error(const std::string& line) {
  pollfd writable{STDERR_FILENO, POLLOUT, 0};
  if (::poll(&writable, 1, kPatienceMs) <= 0) return;
  [[maybe_unused]] const ssize_t n = ::write(STDERR_FILENO, line.data(), line.size());
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
  ++log().queued;
  logger().log(static_cast<spdlog::level::level_enum>(level), "{}", line);
  tell_lost();
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
