#include "kit/session.h"

#include "kit/error.h"

#include <cstdio>
#include <thread>
#include <utility>

namespace epd::kit {

namespace {
constexpr std::chrono::seconds kSilence{1};  // a daemon that was started just now is there by then
}  // namespace

SessionPtr attach(const std::string& socket, const std::string& device, std::chrono::milliseconds patience,
                  epd_wait_by_t wait_by) {
  epd_attach_options_t options;
  epd_attach_options_init(&options);
  options.socket_path = socket.empty() ? nullptr : socket.c_str();
  options.device = device.c_str();
  options.wait_by = wait_by;
  const auto begin = std::chrono::steady_clock::now();
  bool told = false;
  for (;;) {
    epd_session_t* session = nullptr;
    const epd_status_t status = epd_session_attach(&options, &session);
    if (status == EPD_OK) return SessionPtr(session);
    // No daemon listens yet, or it is starting and its engine is not ready.
    const bool starting = status == EPD_DAEMON_LOST || status == EPD_ENGINE_RESTARTED;
    const auto waited = std::chrono::steady_clock::now() - begin;
    if (!starting || waited > patience) require(status, "attach to " + device);
    if (waited > kSilence && !std::exchange(told, true)) {
      std::fprintf(stderr, "waiting for a daemon, up to %lld s: %s\n",
                   static_cast<long long>(std::chrono::duration_cast<std::chrono::seconds>(patience).count()),
                   epd_last_error());
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
}

std::string daemon_name(const epd_session_t* session) {
  epd_session_info_t info;
  epd_session_info_init(&info);
  require(epd_session_info(session, &info), "session info");
  return info.daemon;
}

GroupPtr join(epd_session_t* session, const epd_group_config_t& config) {
  epd_group_t* group = nullptr;
  require(epd_group_join(session, &config, &group), std::string("join of group ") + config.name);
  return GroupPtr(group);
}

epd_buffers_t buffers_of(const epd_group_t* group, std::uint32_t slot) {
  epd_buffers_t buffers;
  epd_buffers_init(&buffers);
  require(epd_group_buffers(group, slot, &buffers), "buffers of slot " + std::to_string(slot));
  return buffers;
}

epd_ticket_t submit(epd_group_t* group, const epd_dispatch_args_t& args, void* stream, epd_handle_t* handle) {
  epd_ticket_t ticket = 0;
  require(epd_dispatch(group, &args, stream, &ticket, handle), "dispatch");
  return ticket;
}

epd_ticket_t submit(epd_group_t* group, const epd_combine_args_t& args, void* stream) {
  epd_ticket_t ticket = 0;
  require(epd_combine(group, &args, stream, &ticket), "combine");
  return ticket;
}

epd_ticket_t submit_dispatch(epd_group_t* group, std::uint32_t slot, std::uint32_t num_tokens,
                             epd_handle_t* handle) {
  epd_dispatch_args_t args;
  epd_dispatch_args_init(&args);
  args.slot = slot;
  args.num_tokens = num_tokens;
  return submit(group, args, EPD_NO_STREAM, handle);
}

epd_ticket_t submit_combine(epd_group_t* group, std::uint32_t slot, epd_handle_t handle) {
  epd_combine_args_t args;
  epd_combine_args_init(&args);
  args.slot = slot;
  args.handle = handle;
  return submit(group, args, EPD_NO_STREAM);
}

epd_result_t finish(epd_group_t* group, epd_ticket_t ticket, const char* what) {
  epd_result_t result;
  epd_result_init(&result);
  require(epd_ticket_wait(group, ticket, EPD_FOREVER, &result), what);
  return result;
}

double now_us() {
  const auto since = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double, std::micro>(since).count();
}

}  // namespace epd::kit
