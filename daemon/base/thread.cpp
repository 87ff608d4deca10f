#include "base/thread.h"

#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <atomic>
#include <cstddef>
#include <cstring>
#include <exception>
#include <latch>
#include <thread>
#include <vector>

namespace epd {

// ---- thread

namespace {

constexpr std::size_t kStackBytes = 256 << 10;

Status no_thread(const std::string& why) {
  return {StatusCode::kResourceExhausted, "no thread can be started: " + why};
}

}  // namespace

Status start_detached_thread(void* (*run)(void*), void* argument) {
  pthread_attr_t attributes;
  ::pthread_attr_init(&attributes);
  ::pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
  ::pthread_attr_setstacksize(&attributes, kStackBytes);
  pthread_t thread;
  const int error = ::pthread_create(&thread, &attributes, run, argument);
  ::pthread_attr_destroy(&attributes);
  if (error == 0) return {};
  return no_thread(std::strerror(error));
}

Status try_threads(unsigned count) {
  std::vector<std::thread> threads;
  threads.reserve(count);
  std::latch end(1);
  Status status;
  try {
    while (threads.size() < count) threads.emplace_back([&end] { end.wait(); });
  } catch (const std::exception& error) {  // also of memory
    status = {StatusCode::kResourceExhausted, std::to_string(threads.size()) + " threads can be started: " +
                                                  error.what() + "; allowed: " + std::to_string(count) +
                                                  " or more (limits: TasksMax, pids.max, ulimit -u and -v)"};
  }
  end.count_down();
  for (std::thread& thread : threads) thread.join();
  return status;
}

Status room_for_grpc_server() {
  // Threads that gRPC 1.51 needs, by limits of cgroups (2 cores, 2026-11-28): a daemon that starts aborted
  // with room for up to 13, and one that started another server with room for one.
  constexpr unsigned kFirst = 16;
  constexpr unsigned kLater = 4;
  static std::atomic<bool> first{true};
  const Status status = try_threads(first ? kFirst : kLater);
  if (status.ok()) first = false;
  return status;
}

bool task_lives(pid_t tid) {
  return ::syscall(SYS_tgkill, ::getpid(), tid, 0) == 0;
}

// ---- end

namespace {

volatile sig_atomic_t g_code = 0;

// A signal handler: makes system calls only.
void end_now(int /*signal*/) {
  static constexpr char kText[] = "epd: the process did not end in time, so it is ended now\n";
  pollfd writable{STDERR_FILENO, POLLOUT, 0};
  if (::poll(&writable, 1, 0) > 0) {
    [[maybe_unused]] const ssize_t n = ::write(STDERR_FILENO, kText, sizeof(kText) - 1);
  }
  ::_exit(g_code);
}

}  // namespace

void end_within(unsigned seconds, int code) {
  g_code = code;
  ::signal(SIGALRM, end_now);
  sigset_t own;
  ::sigemptyset(&own);
  ::sigaddset(&own, SIGALRM);
  ::pthread_sigmask(SIG_UNBLOCK, &own, nullptr);
  ::alarm(seconds);
}

}  // namespace epd
