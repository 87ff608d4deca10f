#include "engine_process.h"

#include "base/thread.h"
#include "common/signal.h"
#include "device_choice.h"
#include "transport/ucx.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>
#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <fstream>

#ifndef P_PIDFD
#define P_PIDFD 3
#endif

namespace epd::supervisor {
namespace {

constexpr int kFirstEngineFd = 3;
constexpr int kNumEngineFds = 3;  // link, page, bell
constexpr int kParkingFd = 64;    // above those, so that no dup2 overwrites one that is still needed
constexpr int kLinkBufferBytes = 1 << 20;

// Like the next: system calls only.
void tell_not_executed(const char* binary, int error) {
  const char* const reason = ::strerrordesc_np(error);
  const bool needs_proc = error == ENOENT && std::strncmp(binary, "/proc/", 6) == 0;
  const std::array<const char*, 6> parts{"epd: the engine's binary ",
                                         binary,
                                         " can't be executed: ",
                                         reason == nullptr ? "" : reason,
                                         needs_proc ? "; is /proc mounted?" : "",
                                         "\n"};
  std::array<iovec, parts.size()> line{};
  for (std::size_t i = 0; i < parts.size(); ++i)
    line[i] = {const_cast<char*>(parts[i]), std::strlen(parts[i])};
  [[maybe_unused]] const ssize_t n = ::writev(STDERR_FILENO, line.data(), static_cast<int>(line.size()));
}

// The oom_score_adj of an engine of this process is higher than that of this process. So the kernel ends an
// engine first when memory is short, and the others continue.
std::string oom_score_of_engine() {
  constexpr int kMore = 500;
  constexpr int kMost = 1000;
  int own = 0;
  std::ifstream("/proc/self/oom_score_adj") >> own;
  return std::to_string(std::min(own + kMore, kMost));
}

// Likewise system calls only. Where /proc can't be written, the kernel chooses by memory alone.
void set_oom_score(const char* score) {
  const int file = ::open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC);
  if (file < 0) return;
  [[maybe_unused]] const ssize_t n = ::write(file, score, std::strlen(score));
  ::close(file);
}

// The program that an engine's process executes.
struct EngineImage {
  const char* binary;
  char* const* arguments;
  char* const* environment;
  const char* oom_score;
};

// Runs between fork and exec of a process with other threads: system calls only.
[[noreturn]] void become_engine(const std::array<int, kNumEngineFds>& fds, pid_t supervisor, int death_signal,
                                const EngineImage& image) {
  ::prctl(PR_SET_PDEATHSIG, death_signal);
  if (::getppid() != supervisor) ::_exit(127);  // it died before the line above
  set_oom_score(image.oom_score);
  ::setpgid(0, 0);  // a terminal's Ctrl-C is for the supervisor alone
  // And so are these, which `pkill -HUP epd` sends to engines too. SIGTERM ends engines of GPUs
  // (engine_main).
  for (const int signal : {SIGHUP, SIGINT, SIGALRM}) ::signal(signal, SIG_IGN);
  if (death_signal != SIGTERM) ::signal(SIGTERM, SIG_IGN);
  std::array<int, kNumEngineFds> parked{};
  for (int i = 0; i < kNumEngineFds; ++i) {
    parked[i] = ::fcntl(fds[i], F_DUPFD, kParkingFd);
    if (parked[i] < 0) ::_exit(127);
  }
  for (int i = 0; i < kNumEngineFds; ++i) {
    if (::dup2(parked[i], kFirstEngineFd + i) < 0) ::_exit(127);
  }
  ::syscall(SYS_close_range, kFirstEngineFd + kNumEngineFds, ~0u, 0);
  sigset_t none;
  ::sigemptyset(&none);
  ::sigprocmask(SIG_SETMASK, &none, nullptr);
  ::execve(image.binary, image.arguments, image.environment);
  tell_not_executed(image.binary, errno);
  ::_exit(127);
}

void add_network(const transport::NetworkOptions& network, std::vector<std::string>& words) {
  if (network.library.empty()) return;
  for (const auto& [flag, value] : {std::pair<const char*, std::string>("--network-library", network.library),
                                    {"--network-devices", network.devices},
                                    {"--network-transports", network.transports},
                                    {"--network-batch-bytes", std::to_string(network.batch_bytes)},
                                    {"--network-window-bytes", std::to_string(network.window_bytes)},
                                    {"--network-max-bytes", std::to_string(network.max_bytes)},
                                    {"--network-peer-timeout-ms", std::to_string(network.peer_timeout_ms)},
                                    {"--network-check", abi::far_check_name(network.check)}}) {
    words.emplace_back(flag);
    words.push_back(value);
  }
}

// epd's own variables, and those that UCX reads when it is loaded.
std::vector<std::string> environment_of(const EngineCommand& command) {
  std::vector<std::string> variables;
  for (char** variable = environ; *variable != nullptr; ++variable) variables.emplace_back(*variable);
  if (command.network.library.empty()) return variables;
  for (const auto& [name, value] : transport::ucx_environment()) {
    const std::string prefix = name + "=";
    std::erase_if(variables, [&](const std::string& variable) { return variable.starts_with(prefix); });
    variables.push_back(prefix + value);
  }
  return variables;
}

std::vector<char*> pointers_to(std::vector<std::string>& words) {
  std::vector<char*> pointers;
  pointers.reserve(words.size() + 1);
  for (std::string& word : words) pointers.push_back(word.data());
  pointers.push_back(nullptr);
  return pointers;
}

// Waits for the end of the process of that number.
void* wait_for_end(void* pid) {
  const auto number = static_cast<pid_t>(reinterpret_cast<std::intptr_t>(pid));
  while (::waitpid(number, nullptr, 0) < 0 && errno == EINTR) {
  }
  return nullptr;
}

}  // namespace

Result<std::unique_ptr<EngineProcess>> EngineProcess::spawn(const EngineCommand& command) {
  Result<std::pair<UniqueFd, UniqueFd>> link = make_socketpair();
  if (!link.ok()) return link.status();
  // If that fails, messages that do not fit are queued.
  ::setsockopt(link->first.get(), SOL_SOCKET, SO_SNDBUF, &kLinkBufferBytes, sizeof(kLinkBufferBytes));
  ::setsockopt(link->second.get(), SOL_SOCKET, SO_SNDBUF, &kLinkBufferBytes, sizeof(kLinkBufferBytes));

  const char* format = command.log_format == LogFormat::kJson ? "json" : "logfmt";
  std::vector<std::string> words = {"epd",          "engine",
                                    "--device",     command.device,
                                    "--link-fd",    std::to_string(kFirstEngineFd),
                                    "--log-level",  to_text(command.log_levels),
                                    "--log-format", format};
  add_network(command.network, words);
  const std::vector<char*> arguments = pointers_to(words);
  std::vector<std::string> variables = environment_of(command);
  const std::vector<char*> environment = pointers_to(variables);
  const std::string oom_score = oom_score_of_engine();

  std::unique_ptr<EngineProcess> engine(new EngineProcess());
  const pid_t self = ::getpid();
  const pid_t pid = ::fork();
  if (pid < 0) {
    const bool no_process = errno == EAGAIN;  // there are too many
    Status status = errno_status("fork");
    return no_process ? resource_exhausted(status.message()) : status;
  }
  if (pid == 0) {
    // Under MPS a process that is killed inside a kernel takes the other clients of its GPU along. So an
    // engine of a GPU only gets a signal and ends by itself (engine_main).
    const bool on_gpu = command.device.starts_with("cuda:");
    become_engine({link->second.get(), command.page_fd, command.bell_fd}, self, on_gpu ? SIGTERM : SIGKILL,
                  {command.binary.c_str(), arguments.data(), environment.data(), oom_score.c_str()});
  }
  engine->pid_ = pid;
  engine->link_ = std::move(link->first);
  engine->pidfd_.reset(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
  if (!engine->pidfd_.valid()) return errno_status("pidfd_open");
  return engine;
}

EngineProcess::~EngineProcess() {
  if (pid_ > 0 && !reaped_) {
    send_signal(pid_, SIGKILL);
    (void)wait_for_end(reinterpret_cast<void*>(static_cast<std::intptr_t>(pid_)));
  }
}

void EngineProcess::kill() {
  if (!reaped_) send_signal(pid_, SIGKILL);
}

bool EngineProcess::has_left() const {
  pollfd entry{link_.get(), 0, 0};
  return ::poll(&entry, 1, 0) > 0 && (entry.revents & POLLHUP) != 0;
}

std::optional<std::string> EngineProcess::reap() {
  siginfo_t end{};
  if (::waitid(P_PID, static_cast<id_t>(pid_), &end, WEXITED | WNOHANG | WNOWAIT) != 0) {
    reaped_ = true;
    return "unknown";
  }
  if (end.si_pid == 0) return std::nullopt;
  reaped_ = true;
  void* const pid = reinterpret_cast<void*>(static_cast<std::intptr_t>(pid_));
  if (!start_detached_thread(wait_for_end, pid).ok()) (void)wait_for_end(pid);
  if (end.si_code != CLD_EXITED) return "signal " + std::to_string(end.si_status);
  exit_code_ = end.si_status;
  return "exit " + std::to_string(exit_code_);
}

Status EngineProcess::send_bytes(std::uint16_t type, const void* body, std::size_t bytes, const FdList& fds) {
  if (queue_.empty()) {
    Status status = send_packet(link_.get(), type, 0, body, bytes, fds);
    if (status.code() != StatusCode::kWouldBlock) return status;
  }
  Queued message;
  message.type = type;
  message.body.resize(bytes);
  if (bytes != 0) std::memcpy(message.body.data(), body, bytes);
  for (const int fd : fds) {
    Result<UniqueFd> copy = duplicate(fd);
    if (!copy.ok()) return copy.status();
    message.fds.push_back(std::move(*copy));
  }
  queued_descriptors_ += message.fds.size();
  queue_.push_back(std::move(message));
  return {};
}

Status EngineProcess::flush() {
  while (!queue_.empty()) {
    const Queued& next = queue_.front();
    std::vector<int> fds;
    for (const UniqueFd& fd : next.fds) fds.push_back(fd.get());
    Status status =
        send_packet(link_.get(), next.type, 0, next.body.data(), next.body.size(), std::move(fds));
    if (status.code() == StatusCode::kWouldBlock) return {};
    if (!status.ok()) return status;
    queued_descriptors_ -= next.fds.size();
    queue_.pop_front();
  }
  return {};
}

}  // namespace epd::supervisor
