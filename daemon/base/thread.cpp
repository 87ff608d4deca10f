#include "base/thread.h"

#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <cstddef>
#include <cstring>

namespace epd {
namespace {

constexpr std::size_t kStackBytes = 256 << 10;

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
  return {StatusCode::kResourceExhausted, std::string("no thread can be started: ") + std::strerror(error)};
}

bool task_lives(pid_t tid) {
  return ::syscall(SYS_tgkill, ::getpid(), tid, 0) == 0;
}

}  // namespace epd
