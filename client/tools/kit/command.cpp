#include "kit/command.h"

#include "common/fd.h"
#include "common/signal.h"
#include "kit/error.h"

#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <sstream>

#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

namespace epd::kit {
namespace {

using SteadyClock = std::chrono::steady_clock;

struct Pipe {
  Pipe() {
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC) != 0) fail_errno("making a pipe");
    read_end = UniqueFd(ends[0]);
    write_end = UniqueFd(ends[1]);
  }
  UniqueFd read_end, write_end;
};

pid_t spawn(const std::vector<std::string>& words, const CommandOptions& options, int out, int err) {
  std::vector<char*> argv;
  argv.reserve(words.size() + 1);
  for (const std::string& word : words) argv.push_back(const_cast<char*>(word.c_str()));
  argv.push_back(nullptr);
  const pid_t pid = ::fork();
  if (pid < 0) fail_errno("fork of " + words[0]);
  if (pid > 0) return pid;
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  const int in = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
  if (::dup2(in, STDIN_FILENO) < 0 || ::dup2(out, STDOUT_FILENO) < 0 || ::dup2(err, STDERR_FILENO) < 0)
    ::_exit(126);
  for (const std::string& variable : options.environment) ::putenv(const_cast<char*>(variable.c_str()));
  if (options.in_child) options.in_child();
  ::execvp(argv[0], argv.data());
  ::_exit(127);
}

// Until both ends have been closed, or `end`. False: it was `end`.
bool read_both(const Pipe& out, const Pipe& err, SteadyClock::time_point end, CommandResult& result) {
  std::array<pollfd, 2> ends{pollfd{out.read_end.get(), POLLIN, 0}, pollfd{err.read_end.get(), POLLIN, 0}};
  const std::array<std::string*, 2> texts{&result.out, &result.err};
  while (ends[0].fd >= 0 || ends[1].fd >= 0) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end - SteadyClock::now());
    if (left.count() <= 0) return false;
    if (::poll(ends.data(), ends.size(), static_cast<int>(left.count())) <= 0) continue;
    for (std::size_t i = 0; i < ends.size(); ++i) {
      if (ends[i].fd < 0 || ends[i].revents == 0) continue;
      char part[4096];
      const ssize_t got = ::read(ends[i].fd, part, sizeof(part));
      if (got > 0) texts[i]->append(part, static_cast<std::size_t>(got));
      if (got == 0 || (got < 0 && errno != EINTR)) ends[i].fd = -1;
    }
  }
  return true;
}

}  // namespace

CommandResult run_command(const std::vector<std::string>& words, const CommandOptions& options) {
  CommandResult result;
  Pipe out, err;
  const auto limit =
      std::chrono::duration_cast<SteadyClock::duration>(std::chrono::duration<double>(options.seconds));
  const auto end = SteadyClock::now() + limit;
  const pid_t pid = spawn(words, options, out.write_end.get(), err.write_end.get());
  out.write_end.reset();
  err.write_end.reset();
  if (!read_both(out, err, end, result)) {
    send_signal(pid, SIGKILL);
    result.err += "(killed after " + std::to_string(options.seconds) + " s)";
  }
  int status = 0;
  while (::waitpid(pid, &status, 0) < 0 && errno == EINTR) {
  }
  result.status = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  return result;
}

std::string must_run(const std::vector<std::string>& words, const CommandOptions& options) {
  CommandResult result = run_command(words, options);
  if (result.status == 0) return std::move(result.out);
  std::string line;
  for (const std::string& word : words) line += (line.empty() ? "" : " ") + word;
  const std::string said = result.err + result.out;
  fail("'" + line + "' ended with status " + std::to_string(result.status) +
       (said.empty() ? "" : ": " + said.substr(0, said.find_last_not_of('\n') + 1)));
}

bool has_command(const std::string& name) {
  const char* path = std::getenv("PATH");
  std::istringstream directories(path != nullptr ? path : "/usr/bin:/bin");
  for (std::string directory; std::getline(directories, directory, ':');) {
    if (::access((directory + "/" + name).c_str(), X_OK) == 0) return true;
  }
  return false;
}

BackgroundCommand::BackgroundCommand(const std::vector<std::string>& words, const CommandOptions& options) {
  const UniqueFd null(::open("/dev/null", O_WRONLY | O_CLOEXEC));
  pid_ = spawn(words, options, null.get(), null.get());
}

BackgroundCommand::~BackgroundCommand() {
  send_signal(pid_, SIGKILL);
  ::waitpid(pid_, nullptr, 0);
}

}  // namespace epd::kit
