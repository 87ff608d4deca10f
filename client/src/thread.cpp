#include "thread.h"

#include <pthread.h>
#include <csignal>
#include <system_error>

namespace epd::client {

Status start_thread(const char* name, std::function<void()> body, std::thread& thread) {
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  std::error_code error;
  try {
    thread = std::thread(std::move(body));
  } catch (const std::system_error& failed) {
    error = failed.code();
  }
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (error) return errno_status(std::string("starting the thread ") + name, error.value());
  ::pthread_setname_np(thread.native_handle(), name);
  return {};
}

}  // namespace epd::client
