// A UCX context with one worker: owned.
#pragma once

#include "listeners.h"
#include "transport/ucx.h"
#include "ucx_library.h"

namespace epd::transport {

class UcxWorker {
 public:
  static Result<UcxWorker> open(const UcxOptions& options);
  UcxWorker(UcxWorker&& other) noexcept
      : ucx_(other.ucx_),
        context_(std::exchange(other.context_, nullptr)),
        worker_(std::exchange(other.worker_, nullptr)),
        event_fd_(other.event_fd_),
        listeners_(std::move(other.listeners_)) {}
  UcxWorker& operator=(UcxWorker&&) = delete;
  ~UcxWorker();

  const UcxLibrary& ucx() const { return *ucx_; }
  ucp_worker_h get() const { return worker_; }
  int event_fd() const { return event_fd_; }  // the worker's
  Result<Address> address() const;            // UCX's own
  // Whether UCX has closed a socket on which it listened.
  bool deaf() const;

 private:
  explicit UcxWorker(const UcxLibrary& ucx) : ucx_(&ucx) {}
  Status make_context(const UcxOptions& options);
  Status make_worker(const UcxOptions& options);

  const UcxLibrary* ucx_;
  ucp_context_h context_ = nullptr;
  ucp_worker_h worker_ = nullptr;
  int event_fd_ = -1;
  std::vector<Listener> listeners_;
};

}  // namespace epd::transport
