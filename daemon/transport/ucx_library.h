// libucp, opened when first asked for: programs that open no transport by UCX don't have it.
#pragma once

#include "common/status.h"

#include <ucp/api/ucp.h>

// It takes the list for something else.
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

// One for the process: INVALID_ARGUMENT if it is not the one that was loaded first. Threads: any.
Result<const UcxLibrary*> ucx_library(const std::string& file);

}  // namespace epd::transport
