#include "mps.h"

#include "common/signal.h"
#include "process_state.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <exception>
#include <sstream>

namespace epd::supervisor {
namespace {

constexpr std::uint64_t kMsNs = 1'000'000;
constexpr std::size_t kMostOutput = std::size_t{64} * 1024;

struct Pipe {
  UniqueFd read;
  UniqueFd write;
};

Result<Pipe> make_pipe() {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) return errno_status("pipe2");
  return Pipe{UniqueFd(ends[0]), UniqueFd(ends[1])};
}

// Starts the program with its standard streams in the pipes and no signal blocked.
Result<pid_t> spawn(const std::string& program, const Pipe& in, const Pipe& out) {
  posix_spawn_file_actions_t files;
  posix_spawnattr_t attributes;
  ::posix_spawn_file_actions_init(&files);
  ::posix_spawnattr_init(&attributes);
  ::posix_spawn_file_actions_adddup2(&files, in.read.get(), STDIN_FILENO);
  ::posix_spawn_file_actions_adddup2(&files, out.write.get(), STDOUT_FILENO);
  ::posix_spawn_file_actions_adddup2(&files, out.write.get(), STDERR_FILENO);
  sigset_t none;
  sigset_t pipe_signal;
  ::sigemptyset(&none);
  ::sigemptyset(&pipe_signal);
  ::sigaddset(&pipe_signal, SIGPIPE);
  ::posix_spawnattr_setsigmask(&attributes, &none);
  ::posix_spawnattr_setsigdefault(&attributes, &pipe_signal);
  ::posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
  char* arguments[] = {const_cast<char*>(program.c_str()), nullptr};
  pid_t pid = -1;
  const int error = ::posix_spawnp(&pid, program.c_str(), &files, &attributes, arguments, environ);
  ::posix_spawn_file_actions_destroy(&files);
  ::posix_spawnattr_destroy(&attributes);
  if (error == 0) return pid;
  return Status(StatusCode::kUnsupported,
                program + " can't be started: " + std::strerror(error) + " (mps.control)");
}

bool has_ended(int pidfd) {
  pollfd entry{pidfd, POLLIN, 0};
  return ::poll(&entry, 1, 0) > 0;
}

std::vector<pid_t> numbers_in(const std::string& text) {
  std::vector<pid_t> numbers;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    const bool digits =
        !line.empty() && line.size() < 10 && line.find_first_not_of("0123456789 \r") == std::string::npos;
    if (digits) numbers.push_back(static_cast<pid_t>(std::atoi(line.c_str())));
  }
  return numbers;
}

bool lists_any(const std::string& text, const std::vector<pid_t>& pids) {
  const std::vector<pid_t> listed = numbers_in(text);
  return std::find_first_of(listed.begin(), listed.end(), pids.begin(), pids.end()) != listed.end();
}

// One line that can't break a log.
std::string one_line(std::string text) {
  while (!text.empty() && (text.back() == '\n' || text.back() == ' ')) text.pop_back();
  for (char& c : text) {
    if (c < 0x20 || c > 0x7e) c = ' ';
  }
  return text.size() > 200 ? text.substr(0, 200) + "..." : text;
}

// The last check before it is terminated.
Status still_there(const MpsControl::Target& target) {
  const std::string process = "process " + std::to_string(target.pid);
  if (target.left != nullptr && target.left->load())
    return not_found("the session of " + process + " has ended meanwhile");
  if (is_ending(target.pid)) return not_found(process + " is ending by itself");
  return has_ended(target.pidfd.get()) ? not_found(process + " has ended") : Status{};
}

// The program always exits with 0. Its last line, after the error, has what the server returned.
Status judge_termination(const std::string& said) {
  const std::string line = one_line(said);
  if (line == "0") return {};
  const std::string text = "terminate_client: " + line;
  if (line != "201") return internal_error(text);  // CUDA_ERROR_INVALID_CONTEXT
  return internal_error(text + ": perhaps it was leaving just then");
}

}  // namespace

Result<std::unique_ptr<MpsControl>> MpsControl::start(Loop& loop, const Clock& clock, Options options) {
  Result<UniqueFd> stop = make_eventfd();
  if (!stop.ok()) return stop.status();
  std::unique_ptr<MpsControl> control(new MpsControl(loop, clock, std::move(options), std::move(*stop)));
  control->thread_ = std::thread([raw = control.get()] { raw->work(); });
  return control;
}

MpsControl::~MpsControl() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  ring_eventfd(stop_.get());
  asked_.notify_all();
  thread_.join();
}

void MpsControl::probe(std::vector<pid_t> ours, Answer answer) {
  Question question;
  question.probe = true;
  question.target.ours = std::move(ours);
  question.answer = std::move(answer);
  ask(std::move(question));
}

void MpsControl::terminate(Target target, Answer answer) {
  Question question;
  question.target = std::move(target);
  question.answer = std::move(answer);
  ask(std::move(question));
}

void MpsControl::ask(Question question) {
  question.due_ns = clock_.now_ns() + options_.timeout_ms * kMsNs;
  {
    const std::lock_guard lock(mutex_);
    questions_.push_back(std::move(question));
  }
  asked_.notify_one();
}

void MpsControl::work() {
  for (;;) {
    Question question;
    {
      std::unique_lock lock(mutex_);
      asked_.wait(lock, [this] { return stopping_ || !questions_.empty(); });
      if (stopping_) return;
      question = std::move(questions_.front());
      questions_.pop_front();
    }
    Result<std::string> result = internal_error("MPS could not be asked");
    try {
      result = question.probe ? probe_now(question) : terminate_now(question);
    } catch (const std::exception& error) {
      result = internal_error(std::string("MPS could not be asked: ") + error.what());
    }
    loop_.post([answer = std::move(question.answer), result = std::move(result)] { answer(result); });
  }
}

Result<std::string> MpsControl::probe_now(const Question& question) const {
  Result<std::string> servers = run("get_server_list", question.due_ns);
  if (!servers.ok()) return servers;
  for (const pid_t server : numbers_in(*servers)) {
    Result<std::string> listed = run("get_client_list " + std::to_string(server), question.due_ns);
    if (!listed.ok()) return listed;
    if (lists_any(*listed, question.target.ours)) return "server " + std::to_string(server);
  }
  return not_found(
      "MPS lists no engine of this daemon: it is in another PID namespace, or another MPS than theirs");
}

Result<std::string> MpsControl::terminate_now(const Question& question) const {
  const Target& target = question.target;
  const std::uint64_t begin = clock_.now_ns();
  const std::string pid = std::to_string(target.pid);
  Result<std::string> servers = run("get_server_list", question.due_ns);
  if (!servers.ok()) return servers;
  for (const pid_t server : numbers_in(*servers)) {
    Result<std::string> listed = run("get_client_list " + std::to_string(server), question.due_ns);
    if (!listed.ok()) return listed;
    if (!lists_any(*listed, {target.pid})) continue;
    if (!lists_any(*listed, target.ours)) {
      return not_found("MPS lists no engine of this daemon beside process " + pid +
                       ", so it may mean another one by that number (another PID namespace?)");
    }
    if (Status status = still_there(target); !status.ok()) return status;
    Result<std::string> said = run("terminate_client " + std::to_string(server) + " " + pid, question.due_ns);
    if (!said.ok()) return said;
    if (Status status = judge_termination(*said); !status.ok()) return status;
    return "terminated by server " + std::to_string(server) + " within " +
           std::to_string((clock_.now_ns() - begin) / kMsNs) + " ms";
  }
  return not_found("MPS knows no client " + pid);
}

// Runs one command and returns the program's answer: numbers, one a line, or nothing.
Result<std::string> MpsControl::run(const std::string& command, std::uint64_t due_ns) const {
  Result<Pipe> in = make_pipe();
  if (!in.ok()) return in.status();
  Result<Pipe> out = make_pipe();
  if (!out.ok()) return out.status();
  Result<pid_t> pid = spawn(options_.program, *in, *out);
  if (!pid.ok()) return pid.status();
  in->read.reset();
  out->write.reset();
  const std::string line = command + "\n";
  // The pipe has room. SIGPIPE is ignored. A program that does not read has ended, which the next read shows.
  [[maybe_unused]] const ssize_t written = ::write(in->write.get(), line.data(), line.size());
  in->write.reset();

  std::string text;
  bool in_time = false;
  pollfd entries[] = {{out->read.get(), POLLIN, 0}, {stop_.get(), POLLIN, 0}};
  while (text.size() < kMostOutput) {
    const std::uint64_t now = clock_.now_ns();
    // The program's output is read even if this thread comes late.
    const int left_ms = due_ns > now ? static_cast<int>((due_ns - now) / kMsNs + 1) : 0;
    const int ready = ::poll(entries, 2, left_ms);
    if (ready < 0 && errno == EINTR) continue;
    if (ready <= 0 || entries[1].revents != 0) break;
    char buffer[4096];
    const ssize_t n = ::read(out->read.get(), buffer, sizeof(buffer));
    if (n > 0) {
      text.append(buffer, static_cast<std::size_t>(n));
    } else if (n == 0 || errno != EINTR) {
      in_time = true;
      break;
    }
  }
  // It has closed its output, so it is about to end. Or it is late.
  const UniqueFd pidfd(static_cast<int>(::syscall(SYS_pidfd_open, *pid, 0)));
  entries[0] = {pidfd.get(), POLLIN, 0};
  const std::uint64_t now = clock_.now_ns();
  if (in_time && due_ns > now) ::poll(entries, 2, static_cast<int>((due_ns - now) / kMsNs + 1));
  int state = 0;
  if (::waitpid(*pid, &state, WNOHANG) == 0) {
    in_time = false;
    send_signal(*pid, SIGKILL);
    while (::waitpid(*pid, &state, 0) < 0 && errno == EINTR) {
    }
  }
  const std::string said = options_.program + " " + command;
  if (!in_time) {
    return Status(StatusCode::kDeadlineExceeded,
                  said + ": no answer in time; allowed: " + std::to_string(options_.timeout_ms) +
                      " ms (mps.timeout_ms)");
  }
  if (!WIFEXITED(state) || WEXITSTATUS(state) != 0) {
    return internal_error(said + ": " +
                          (WIFEXITED(state) ? "exit " + std::to_string(WEXITSTATUS(state))
                                            : "signal " + std::to_string(WTERMSIG(state))) +
                          (text.empty() ? "" : ", " + one_line(text)));
  }
  if (text.find_first_not_of(" \r\n") != std::string::npos && numbers_in(text).empty())
    return internal_error(said + ": " + one_line(text));  // as for a command that it does not know
  return text;
}

}  // namespace epd::supervisor
