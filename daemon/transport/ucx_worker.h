#pragma once

#include "common/status.h"
#include "transport/ucx.h"

#include <sys/types.h>
#include <ucp/api/ucp.h>
#include <vector>

// clang-format can't format this list.
// clang-format off
#define EPD_UCX_FUNCTIONS(X)                                                                          \
  X(ucp_get_version) X(ucp_get_version_string) X(ucp_config_read) X(ucp_config_modify)                \
  X(ucp_config_release) X(ucp_init_version) X(ucp_cleanup) X(ucp_worker_create)                       \
  X(ucp_worker_destroy) X(ucp_worker_get_address) X(ucp_worker_release_address)                       \
  X(ucp_worker_set_am_recv_handler) X(ucp_worker_progress) X(ucp_worker_arm) X(ucp_worker_get_efd)    \
  X(ucp_ep_create) X(ucp_ep_close_nbx) X(ucp_ep_flush_nbx) X(ucp_ep_print_info) X(ucp_am_send_nbx)    \
  X(ucp_am_recv_data_nbx) X(ucp_am_data_release) X(ucp_request_check_status) X(ucp_request_free) X(ucs_status_string)
// clang-format on

namespace epd::transport {

// libucp, opened on first use: a process that opens no UCX transport does not load it.
struct UcxLibrary {
// NOLINTNEXTLINE(bugprone-macro-parentheses): the name of a member
#define EPD_UCX_MEMBER(name) decltype(&::name) name = nullptr;
  EPD_UCX_FUNCTIONS(EPD_UCX_MEMBER)
#undef EPD_UCX_MEMBER
  std::uint32_t major = 0;
  std::uint32_t minor = 0;
  std::uint32_t release = 0;

  // "ucp_init_version: No such device"
  std::string describe(const char* what, ucs_status_t status) const;
};

// The process has one library. INVALID_ARGUMENT: another one was loaded first. May be called on any thread.
Result<const UcxLibrary*> ucx_library(const std::string& file);

// A socket on which this process listens by TCP.
struct Listener {
  int fd = -1;
  ino_t inode = 0;  // tells it from a later socket with this descriptor
  friend bool operator==(const Listener&, const Listener&) = default;
};

// Owns a UCX context with one worker.
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
