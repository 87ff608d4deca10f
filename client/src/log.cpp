#include "log.h"

#include <sys/time.h>
#include <unistd.h>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <string_view>

namespace epd::client {

namespace log_detail {
std::atomic<int> level{static_cast<int>(LogLevel::kUnread)};
}  // namespace log_detail

namespace {

constexpr std::array<std::pair<std::string_view, LogLevel>, 4> kWords = {{{"off", LogLevel::kOff},
                                                                          {"error", LogLevel::kError},
                                                                          {"info", LogLevel::kInfo},
                                                                          {"debug", LogLevel::kDebug}}};

const char* word_of(LogLevel level) {
  for (const auto& [word, each] : kWords) {
    if (each == level) return word.data();
  }
  return "off";
}

// Some of it comes from other processes, and must not end the line.
void append_quoted(std::string& line, std::string_view text) {
  line += '"';
  for (const char c : text) {
    if (c == '"' || c == '\\') line += '\\';
    line += static_cast<unsigned char>(c) < 0x20 || c == 0x7f ? ' ' : c;
  }
  line += '"';
}

std::string now() {
  timeval time{};
  ::gettimeofday(&time, nullptr);
  std::tm parts{};
  ::gmtime_r(&time.tv_sec, &parts);
  std::array<char, 40> text{};
  const std::size_t size = std::strftime(text.data(), text.size(), "%Y-%m-%dT%H:%M:%S", &parts);
  std::snprintf(text.data() + size, text.size() - size, ".%06ldZ", static_cast<long>(time.tv_usec));
  return text.data();
}

bool is_pending(int signal) {
  sigset_t pending;
  return ::sigpending(&pending) == 0 && ::sigismember(&pending, signal) == 1;
}

// Keeps SIGPIPE away from this thread, and takes the one back that a write has raised meanwhile. The
// application's handlers and masks stay as they are.
class NoSigpipe {
 public:
  NoSigpipe() {
    ::sigemptyset(&sigpipe_);
    ::sigaddset(&sigpipe_, SIGPIPE);
    was_pending_ = is_pending(SIGPIPE);
    blocks_ = ::pthread_sigmask(SIG_BLOCK, &sigpipe_, &before_) == 0;
  }
  ~NoSigpipe() {
    if (!blocks_) return;
    if (!was_pending_ && is_pending(SIGPIPE)) {
      const timespec at_once{};
      while (::sigtimedwait(&sigpipe_, nullptr, &at_once) < 0 && errno == EINTR) {
      }
    }
    ::pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }
  NoSigpipe(const NoSigpipe&) = delete;
  NoSigpipe& operator=(const NoSigpipe&) = delete;

 private:
  sigset_t sigpipe_{};
  sigset_t before_{};
  bool was_pending_ = false;
  bool blocks_ = false;
};

// One write, so that lines of several threads and processes do not mix. Nobody may read them any more.
void write_line(const std::string& line) {
  const int error = errno;
  {
    const NoSigpipe guard;
    [[maybe_unused]] const ssize_t n = ::write(STDERR_FILENO, line.data(), line.size());
  }
  errno = error;
}

}  // namespace

LogLevel log_detail::read_level() {
  const char* variable = std::getenv("EPD_LOG");
  const std::string_view text = variable == nullptr || *variable == '\0' ? "off" : variable;
  LogLevel found = LogLevel::kUnread;
  for (const auto& [word, each] : kWords) {
    if (word == text) found = each;
  }
  const bool known = found != LogLevel::kUnread;
  if (!known) found = LogLevel::kOff;
  int unread = static_cast<int>(LogLevel::kUnread);
  const bool first = level.compare_exchange_strong(unread, static_cast<int>(found));
  if (first && !known) {
    std::string line = "libepd: EPD_LOG is ";
    append_quoted(line, text);
    write_line(line + "; allowed: off, error, info, debug\n");
  }
  return found;
}

void log_line(LogLevel level, const char* event,
              std::initializer_list<std::pair<const char*, std::string>> fields) {
  if (!logs(level)) return;
  std::string line = now() + " level=" + word_of(level) +
                     " process=\"libepd\" pid=" + std::to_string(::getpid()) + " event=";
  append_quoted(line, event);
  for (const auto& [key, value] : fields) {
    line.append(" ").append(key).append("=");
    append_quoted(line, value);
  }
  write_line(line + "\n");
}

}  // namespace epd::client
