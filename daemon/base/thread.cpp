#include "base/thread.h"

#include <pthread.h>
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
  // By limits of cgroups (gRPC 1.51, 2 cores, 2026-11-28): a daemon that starts aborted with room for up to
  // 13 threads, and one that started another server with room for one.
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

}  // namespace epd
