#include "base/log.h"

#include "base/clock.h"
#include "base/event.h"
#include "base/utf8.h"

#include <poll.h>
#include <signal.h>
#include <spdlog/async_logger.h>
#include <spdlog/details/null_mutex.h>
#include <spdlog/details/thread_pool.h>
#include <spdlog/sinks/base_sink.h>
#include <spdlog/spdlog.h>
#include <unistd.h>
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <set>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

namespace epd {
namespace {

LogFormat g_format = LogFormat::kLogfmt;
std::string g_process = "epd";
bool g_journal = false;
// The lowest level of all rooms: below it nothing is logged.
std::atomic<int> g_lowest_level{static_cast<int>(LogLevel::kInfo)};
std::atomic<int> g_general_level{static_cast<int>(LogLevel::kInfo)};
std::array<std::atomic<int>, kLogRooms.size()> g_room_levels;  // the level + 1; 0: the general one
std::mutex g_limiter_mutex;
constexpr const char* kSuppressed = "lines like this one were suppressed";
constexpr std::size_t kQueuedLines = 2048;
constexpr int kPatienceMs = 1000;  // for the reader of the log, when the process ends
constexpr std::uint64_t kTellLostNs = 1'000'000'000;
constexpr std::size_t kMostOwners = 1024;  // of one limiter
constexpr EventOwner kOtherOwners = -2;

constexpr std::array<LogLevel, 5> kLevels = {LogLevel::kTrace, LogLevel::kDebug, LogLevel::kInfo,
                                             LogLevel::kWarning, LogLevel::kError};

std::optional<LogLevel> level_of(std::string_view word) {
  const auto found = std::find_if(kLevels.begin(), kLevels.end(),
                                  [&](LogLevel level) { return word == log_level_word(level); });
  return found == kLevels.end() ? std::nullopt : std::optional(*found);
}

// Returns the room of a file: "session" for ".../daemon/session/handshake.cpp"; kLogRooms.size(): none.
std::size_t room_of(std::string_view file) {
  constexpr std::string_view kFolder = "daemon/";
  const std::size_t at = file.rfind(kFolder);
  if (at == std::string_view::npos) return kLogRooms.size();
  file.remove_prefix(at + kFolder.size());
  const std::string_view room = file.substr(0, file.find('/'));
  return static_cast<std::size_t>(std::find(kLogRooms.begin(), kLogRooms.end(), room) - kLogRooms.begin());
}

// sd-daemon(3)
const char* journal_prefix(spdlog::level::level_enum level) {
  switch (static_cast<LogLevel>(level)) {
    case LogLevel::kTrace:
    case LogLevel::kDebug: return "<7>";
    case LogLevel::kInfo: return "<6>";
    case LogLevel::kWarning: return "<4>";
    case LogLevel::kError:
    case LogLevel::kOff: break;
  }
  return "<3>";
}

// Guarded by g_limiter_mutex. Never destroyed: limiters are static objects of other files.
std::set<LogLimiter*>& all_limiters() {
  static auto* limiters = new std::set<LogLimiter*>();
  return *limiters;
}

// Clients choose some of this text. It always stays inside the quotes, and is valid JSON.
void append_quoted(std::string& out, std::string_view text) {
  out += '"';
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (static_cast<unsigned char>(c) >= 0x80) {
      const std::size_t length = first_character(text.substr(i)).bytes;
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

// Writes to standard error, on the logging thread. A reader that stops reading blocks this thread only. If
// the reader has ended, the lines are lost.
class StderrSink final : public spdlog::sinks::base_sink<spdlog::details::null_mutex> {
 public:
  std::uint64_t done() const { return done_.load(); }
  std::uint64_t failed() const { return failed_.load(); }
  int error() const { return error_.load(); }
  int last_error() const { return last_error_.load(); }

 private:
  void sink_it_(const spdlog::details::log_msg& message) override {
    spdlog::memory_buf_t line;
    if (in_line_) line.push_back('\n');  // the line before was cut
    if (g_journal) line.append(std::string_view(journal_prefix(message.level)));
    formatter_->format(message, line);
    if (!write_all(line.data(), line.size())) {
      last_error_ = error_.load();
      ++failed_;
    }
    ++done_;
  }
  void flush_() override {}

  bool write_all(const char* data, std::size_t bytes) {
    while (bytes != 0) {
      const ssize_t n = ::write(STDERR_FILENO, data, bytes);
      if (n > 0) {
        data += n;
        bytes -= static_cast<std::size_t>(n);
        in_line_ = bytes != 0;
        if (bytes == 0) error_ = 0;
        continue;
      }
      if (n < 0 && errno == EINTR) continue;
      if (n == 0 || errno != EAGAIN) {
        error_ = n == 0 ? EIO : errno;
        return false;
      }
      pollfd writable{STDERR_FILENO, POLLOUT, 0};  // it may be non-blocking
      ::poll(&writable, 1, -1);
    }
    return true;
  }

  std::atomic<std::uint64_t> done_{0};
  std::atomic<std::uint64_t> failed_{0};
  std::atomic<int> error_{0};       // with which the last line failed; 0: it did not
  std::atomic<int> last_error_{0};  // with which a line failed last
  bool in_line_ = false;            // the last byte that was written ends no line
};

// Never destroyed, because the destructor would wait for the thread, which may wait for a reader.
struct Log {
  std::shared_ptr<spdlog::details::thread_pool> pool =
      std::make_shared<spdlog::details::thread_pool>(kQueuedLines, 1);
  std::shared_ptr<StderrSink> sink = std::make_shared<StderrSink>();
  // When the queue is full, the oldest lines are dropped.
  std::shared_ptr<spdlog::async_logger> logger = std::make_shared<spdlog::async_logger>(
      "epd", sink, pool, spdlog::async_overflow_policy::overrun_oldest);
  std::atomic<std::uint64_t> queued{0};
  std::atomic<std::uint64_t> told_lost{0};
  std::atomic<std::uint64_t> told_failed{0};
  std::atomic<std::uint64_t> tell_at_ns{0};

  std::uint64_t overrun() const { return pool->overrun_counter(); }
  std::uint64_t lost() const { return overrun() + sink->failed(); }
};

Log& log() {
  static Log* const instance = [] {
    // The thread blocks all signals of the process.
    sigset_t all;
    sigset_t before;
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_BLOCK, &all, &before);
    Log* made = nullptr;
    try {
      made = new Log;
    } catch (const std::system_error& error) {  // without a log nobody could learn why the daemon fails
      ::dprintf(STDERR_FILENO, "%s: no thread can be started for the log: %s; see ulimit -u and pids.max\n",
                g_process.c_str(), error.what());
      ::_exit(1);
    }
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
    made->logger->set_pattern("%Y-%m-%dT%H:%M:%S.%f%z level=%l %v");
    made->logger->set_level(spdlog::level::trace);  // see log_enabled
    return made;
  }();
  return *instance;
}

spdlog::logger& logger() {
  return *log().logger;
}

std::string problem_of(int error) {
  return std::string("standard error: ") + std::strerror(error);
}

// Says why lines were lost. The cause may be over by then.
std::string reason_of(std::uint64_t overrun, std::uint64_t failed) {
  std::string reason = overrun == 0 ? "" : "standard error was not read";
  if (failed != 0) reason += (reason.empty() ? "" : "; ") + problem_of(log().sink->last_error());
  return reason;
}

// Lost lines are reported as an event, and in the log when it is read again.
void tell_lost() {
  Log& l = log();
  const std::uint64_t failed = l.sink->failed();
  const std::uint64_t lost = l.overrun() + failed;
  std::uint64_t told = l.told_lost.load();
  if (lost == told) return;
  const std::uint64_t now = MonotonicClock().now_ns();
  std::uint64_t due = l.tell_at_ns.load();
  if (now < due || !l.tell_at_ns.compare_exchange_strong(due, now + kTellLostNs)) return;
  if (!l.told_lost.compare_exchange_strong(told, lost)) return;
  const std::uint64_t count = lost - told;
  const std::uint64_t failed_since = failed - l.told_failed.exchange(failed);
  record_event(
      EventKind::kOther, LogLevel::kWarning, "log lines lost",
      {{"count", count}, {"in_all", lost}, {"reason", reason_of(count - failed_since, failed_since)}});
}

}  // namespace

LogField::LogField(std::string_view key, double value)
    : key_(key), value_(fmt::format("{:.3f}", value)), quoted_(!std::isfinite(value)) {}

const char* log_level_word(LogLevel level) {
  switch (level) {
    case LogLevel::kTrace: return "trace";
    case LogLevel::kDebug: return "debug";
    case LogLevel::kInfo: return "info";
    case LogLevel::kWarning: return "warning";
    case LogLevel::kError: return "error";
    case LogLevel::kOff: break;
  }
  return "off";
}

std::optional<LogLevels> parse_log_levels(std::string_view text) {
  LogLevels levels;
  for (bool first = true;; first = false) {
    const std::size_t comma = text.find(',');
    const std::string_view part = text.substr(0, comma);
    const std::size_t equals = part.find('=');
    const std::optional<LogLevel> level =
        level_of(equals == std::string_view::npos ? part : part.substr(equals + 1));
    if (!level || first != (equals == std::string_view::npos)) return std::nullopt;
    if (first) {
      levels.general = *level;
    } else {
      const auto room = std::find(kLogRooms.begin(), kLogRooms.end(), part.substr(0, equals));
      if (room == kLogRooms.end()) return std::nullopt;
      levels.rooms[static_cast<std::size_t>(room - kLogRooms.begin())] = level;
    }
    if (comma == std::string_view::npos) return levels;
    text.remove_prefix(comma + 1);
  }
}

std::string to_text(const LogLevels& levels) {
  std::string text = log_level_word(levels.general);
  for (std::size_t i = 0; i < kLogRooms.size(); ++i) {
    if (levels.rooms[i])
      text.append(",").append(kLogRooms[i]).append("=").append(log_level_word(*levels.rooms[i]));
  }
  return text;
}

void log_init(const std::string& process, const LogLevels& levels, LogFormat format, bool journal) {
  g_process = process;
  g_format = format;
  g_journal = journal;
  logger().set_pattern(format == LogFormat::kJson ? R"({"time":"%Y-%m-%dT%H:%M:%S.%f%z","level":"%l",%v})"
                                                  : "%Y-%m-%dT%H:%M:%S.%f%z level=%l %v");
  log_set_levels(levels);
}

void log_set_levels(const LogLevels& levels) {
  int lowest = static_cast<int>(levels.general);
  for (std::size_t i = 0; i < kLogRooms.size(); ++i) {
    const int level = static_cast<int>(levels.rooms[i].value_or(levels.general));
    g_room_levels[i].store(levels.rooms[i] ? level + 1 : 0);
    lowest = std::min(lowest, level);
  }
  g_general_level.store(static_cast<int>(levels.general));
  g_lowest_level.store(lowest);
}

void log_flush() {
  Log& l = log();
  const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(kPatienceMs);
  while (l.sink->done() + l.overrun() < l.queued.load() && std::chrono::steady_clock::now() < end)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

std::string log_problem() {
  const int error = log().sink->error();
  return error == 0 ? "" : problem_of(error);
}

std::uint64_t log_lines_lost() {
  return log().lost();
}

void print_error(const std::string& line) {
  pollfd writable{STDERR_FILENO, POLLOUT, 0};
  if (::poll(&writable, 1, kPatienceMs) <= 0) return;
  [[maybe_unused]] const ssize_t n = ::write(STDERR_FILENO, line.data(), line.size());
}

void print_last_error(const std::string& text) {
  if (g_format != LogFormat::kJson && !g_journal) {
    log_flush();
    print_error(text);
    return;
  }
  log_event(LogLevel::kError, "the program ends",
            {{"reason", text.substr(0, text.find_last_not_of('\n') + 1)}});
  log_flush();
}

bool log_enabled(LogLevel level, const char* file) {
  if (static_cast<int>(level) < g_lowest_level.load(std::memory_order_relaxed)) return false;
  const std::size_t room = room_of(file);
  const int own = room == kLogRooms.size() ? 0 : g_room_levels[room].load(std::memory_order_relaxed);
  return static_cast<int>(level) >= (own != 0 ? own - 1 : g_general_level.load(std::memory_order_relaxed));
}

void log_event(LogLevel level, std::string_view event, std::initializer_list<LogField> fields,
               const char* file) {
  if (!log_enabled(level, file)) return;
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

LogLimiter::LogLimiter(std::uint32_t burst, std::uint32_t each_second)
    : burst_(burst), each_second_(each_second) {
  const std::lock_guard lock(g_limiter_mutex);
  all_limiters().insert(this);
}

LogLimiter::~LogLimiter() {
  const std::lock_guard lock(g_limiter_mutex);
  all_limiters().erase(this);
}

void LogLimiter::fill(Budget& budget, std::uint64_t now_ns) const {
  const double seconds = static_cast<double>(now_ns - budget.filled_ns) / 1e9;
  budget.left = std::min<double>(burst_, budget.left + seconds * each_second_);
  budget.filled_ns = now_ns;
}

// Owners beyond kMostOwners share one budget.
LogLimiter::Budget& LogLimiter::budget_of(EventOwner owner, std::uint64_t now_ns) {
  if (budgets_.size() >= kMostOwners && !budgets_.contains(owner)) {
    for (auto& [_, budget] : budgets_) fill(budget, now_ns);
    std::erase_if(budgets_, [&](const auto& entry) {
      return entry.second.left >= burst_ && entry.second.suppressed.count == 0;
    });
    if (budgets_.size() >= kMostOwners) owner = kOtherOwners;
  }
  const auto [at, added] = budgets_.try_emplace(owner);
  if (added) at->second = {static_cast<double>(burst_), now_ns, {}};
  fill(at->second, now_ns);
  return at->second;
}

bool LogLimiter::admit(const Suppressed& line, Suppressed& before) {
  const std::lock_guard lock(g_limiter_mutex);
  Budget& budget = budget_of(line.owner, MonotonicClock().now_ns());
  if (budget.left < 1) {
    const std::uint64_t count = budget.suppressed.count + 1;
    budget.suppressed = line;
    budget.suppressed.count = count;
    return false;
  }
  budget.left -= 1;
  before = std::exchange(budget.suppressed, {});
  return true;
}

void LogLimiter::Suppressed::tell() const {
  if (count == 0) return;
  const LogField name("event_name", event);
  const LogField number("count", count);
  if (owner < 0) {
    if (recorded) {
      record_event(kind, level, kSuppressed, {name, number}, kDaemonOwner, file);
    } else {
      log_event(level, kSuppressed, {name, number}, file);
    }
  } else {
    record_event(kind, level, kSuppressed, {name, number, {"uid", owner}}, owner, file);
  }
}

void LogLimiter::tell_suppressed() {
  std::vector<Suppressed> all;
  {
    const std::lock_guard lock(g_limiter_mutex);
    const std::uint64_t now = MonotonicClock().now_ns();
    for (LogLimiter* limiter : all_limiters()) {
      for (auto& [owner, budget] : limiter->budgets_) {
        if (budget.suppressed.count == 0) continue;
        limiter->fill(budget, now);
        if (budget.left < 1) continue;
        budget.left -= 1;
        all.push_back(std::exchange(budget.suppressed, {}));
      }
    }
  }
  for (const Suppressed& suppressed : all) suppressed.tell();
}

void LogLimiter::log(LogLevel level, std::string_view event, std::initializer_list<LogField> fields,
                     const char* file) {
  Suppressed before;
  if (!log_enabled(level, file)) return;
  if (!admit({kDaemonOwner, 0, std::string(event), level, {}, false, file}, before)) return;
  log_event(level, event, fields, file);
  before.tell();
}

void LogLimiter::record(EventKind kind, LogLevel level, std::string_view event,
                        std::initializer_list<LogField> fields, EventOwner owner, const char* file) {
  Suppressed before;
  if (!admit({owner, 0, std::string(event), level, kind, true, file}, before)) return;
  record_event(kind, level, event, fields, owner, file);
  before.tell();
}

}  // namespace epd
