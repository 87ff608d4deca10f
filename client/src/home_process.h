// Distinguishes the process that attached from processes forked off it.
#pragma once

#include "errors.h"

#include <sys/types.h>
#include <atomic>

namespace epd::client {

// A page that the kernel clears in a forked child (MADV_WIPEONFORK). Reading it costs a load, where getpid()
// costs a system call.
class HomeProcess {
 public:
  HomeProcess() = default;
  HomeProcess(const HomeProcess&) = delete;
  HomeProcess& operator=(const HomeProcess&) = delete;
  ~HomeProcess();

  static Status make(HomeProcess& out);  // once
  // After make().
  bool here() const { return mark_->load(std::memory_order_relaxed) != 0; }
  pid_t pid() const { return pid_; }

 private:
  std::atomic<int>* mark_ = nullptr;
  pid_t pid_ = 0;
};

}  // namespace epd::client
