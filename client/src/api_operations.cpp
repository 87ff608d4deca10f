// The C functions of operations and tickets. They check and copy arguments by the size rule.
#include "api.h"
#include "struct_size.h"

namespace {

using epd::Status;
using epd::client::Group;
using epd::client::guarded;
using epd::client::log_line;
using epd::client::LogLevel;
using epd::client::ranged;
using epd::client::SubmitRequest;
namespace abi = epd::abi;

void log_submission(const Group& group, const SubmitRequest& request, epd_ticket_t ticket) {
  if (!epd::client::logs(LogLevel::kDebug)) return;
  const char* op = request.op == abi::Op::kDispatch  ? "dispatch"
                   : request.op == abi::Op::kCombine ? "combine"
                                                     : "noop";
  log_line(LogLevel::kDebug, "submitted",
           {{"group", group.group_name},
            {"rank", std::to_string(group.rank)},
            {"op", op},
            {"slot", std::to_string(request.slot)},
            {"ticket", std::to_string(ticket)}});
}

// An argument that is 0 or 1, and the flag that it sets.
struct Switch {
  const char* name;
  std::uint32_t value;
  std::uint32_t flag;
};

template <std::size_t N>
Status read_switches(const Switch (&switches)[N], std::uint32_t& flags) {
  for (const Switch& s : switches) {
    if (s.value > 1) return epd::client::bad_value(s.name, s.value, "0 or 1");
    if (s.value != 0) flags |= s.flag;
  }
  return {};
}

// The caller's own memory; `copy` is what the request points to.
Status read_memory(const epd_memory_t* given, epd_memory_t& copy, SubmitRequest& request) {
  if (given == nullptr) return {};
  EPD_RETURN_IF_ERROR(epd::client::read_struct(given, "memory", copy));
  if (copy.reserved != 0) return epd::client::bad_value("memory.reserved", copy.reserved, "0");
  request.memory = &copy;
  return {};
}

// The arguments that dispatch and combine have in common.
template <typename Args>
Status read_args(const Args& a, void* stream, SubmitRequest& request) {
  request.slot = a.slot;
  request.timeout_ms = static_cast<std::uint32_t>(a.timeout_ms);
  request.sms = a.sms;
  request.handle = a.handle;
  request.num_tokens = a.num_tokens;
  request.num_tokens_at = a.num_tokens_at;
  request.stream = {stream};
  return epd::client::check_limit(a.timeout_ms, "the daemon's default");
}

Status read_dispatch(const epd_dispatch_args_t& a, void* stream, SubmitRequest& request) {
  request.op = abi::Op::kDispatch;
  request.keep = a.keep_handle != 0;
  EPD_RETURN_IF_ERROR(read_args(a, stream, request));
  request.row_format = a.row_format;
  if (a.omit_weights == 0) request.flags = abi::kFlagWeights;
  return read_switches({{"omit_weights", a.omit_weights, 0},
                        {"keep_handle", a.keep_handle, 0},
                        {"defer_receive", a.defer_receive, abi::kFlagDefer},
                        {"zero_padding", a.zero_padding, abi::kFlagZeroPadding},
                        {"mark_unused", a.mark_unused, abi::kFlagMarkUnused}},
                       request.flags);
}

Status read_combine(const epd_combine_args_t& a, void* stream, SubmitRequest& request) {
  request.op = abi::Op::kCombine;
  EPD_RETURN_IF_ERROR(read_args(a, stream, request));
  if (a.memory == nullptr && a.num_tokens != 0)
    return epd::client::bad_value("num_tokens", a.num_tokens, "0 without memory: n is its dispatch's");
  if (a.memory == nullptr && a.num_tokens_at != nullptr)
    return epd::invalid_argument("num_tokens_at is given without memory; allowed: NULL, n is its dispatch's");
  if (a.num_biases > abi::kMaxBiases)
    return epd::client::bad_value("num_biases", a.num_biases, "0 .. " + std::to_string(abi::kMaxBiases));
  const std::uint32_t returned = epd::client::number_in(a.return_weights);
  if (returned > EPD_RETURN_WEIGHTS_SUM)
    return epd::client::bad_value(
        "return_weights", returned,
        "0 (EPD_RETURN_WEIGHTS_NONE), 1 (EPD_RETURN_WEIGHTS_OWN) or 2 (EPD_RETURN_WEIGHTS_SUM)");
  request.flags =
      a.num_biases << abi::kBiasShift | abi::return_flags(static_cast<abi::ReturnWeights>(returned));
  return read_switches(
      {{"weighted", a.weighted, abi::kFlagWeights}, {"defer_receive", a.defer_receive, abi::kFlagDefer}},
      request.flags);
}

}  // namespace

extern "C" {

epd_status_t epd_dispatch(epd_group_t* group, const epd_dispatch_args_t* args, void* stream,
                          epd_ticket_t* ticket, epd_handle_t* handle) {
  return ranged([&]() -> Status {
    EPD_OPEN(Group, g, group);
    EPD_REQUIRE(ticket);
    epd_dispatch_args_t a{};
    EPD_RETURN_IF_ERROR(epd::client::read_struct(args, "args", a));
    SubmitRequest request;
    epd_memory_t memory{};
    EPD_RETURN_IF_ERROR(read_dispatch(a, stream, request));
    EPD_RETURN_IF_ERROR(read_memory(a.memory, memory, request));
    if (request.keep) EPD_REQUIRE(handle);
    EPD_RETURN_IF_ERROR(g->session->operations().submit(*g, request, *ticket, handle));
    log_submission(*g, request, *ticket);
    return {};
  });
}

epd_status_t epd_combine(epd_group_t* group, const epd_combine_args_t* args, void* stream,
                         epd_ticket_t* ticket) {
  return ranged([&]() -> Status {
    EPD_OPEN(Group, g, group);
    EPD_REQUIRE(ticket);
    epd_combine_args_t a{};
    EPD_RETURN_IF_ERROR(epd::client::read_struct(args, "args", a));
    SubmitRequest request;
    epd_memory_t memory{};
    EPD_RETURN_IF_ERROR(read_combine(a, stream, request));
    EPD_RETURN_IF_ERROR(read_memory(a.memory, memory, request));
    EPD_RETURN_IF_ERROR(g->session->operations().submit(*g, request, *ticket, nullptr));
    log_submission(*g, request, *ticket);
    return {};
  });
}

epd_status_t epd_handle_release(epd_group_t* group, epd_handle_t handle) {
  return guarded([&]() -> Status {
    EPD_OPEN(Group, g, group);
    return g->session->operations().release_handle(*g, handle);
  });
}

epd_status_t epd_noop(epd_group_t* group, uint32_t slot, void* stream, epd_ticket_t* ticket) {
  return ranged([&]() -> Status {
    EPD_OPEN(Group, g, group);
    EPD_REQUIRE(ticket);
    SubmitRequest request{abi::Op::kNoop, slot};
    request.stream = {stream};
    EPD_RETURN_IF_ERROR(g->session->operations().submit(*g, request, *ticket, nullptr));
    log_submission(*g, request, *ticket);
    return {};
  });
}

epd_status_t epd_ticket_wait(epd_group_t* group, epd_ticket_t ticket, int32_t timeout_ms,
                             epd_result_t* result) {
  return ranged([&]() -> Status {
    EPD_OPEN(Group, g, group);
    if (result != nullptr) EPD_RETURN_IF_ERROR(epd::client::check_output(result, "result"));
    EPD_RETURN_IF_ERROR(epd::client::check_wait(timeout_ms));
    epd_result_t out{};
    Status status = g->session->operations().wait(*g, ticket, timeout_ms, &out);
    // out.size is set if the operation has ended. Otherwise the caller's struct stays unchanged.
    if (result != nullptr && out.size != 0) epd::client::write_struct(result, out);
    return status;
  });
}

epd_status_t epd_ticket_poll(epd_group_t* group, epd_ticket_t ticket, epd_result_t* result) {
  return epd_ticket_wait(group, ticket, EPD_NO_WAIT, result);
}

int epd_ticket_pending(epd_group_t* group, epd_ticket_t ticket) {
  int pending = 0;
  guarded([&]() -> Status {
    EPD_OPEN(Group, g, group);
    pending = g->session->operations().pending(*g, ticket) ? 1 : 0;
    return {};
  });
  return pending;
}

epd_status_t epd_ticket_counts(epd_group_t* group, epd_ticket_t ticket, int32_t timeout_ms,
                               epd_counts_t* counts) {
  return ranged([&]() -> Status {
    EPD_OPEN(Group, g, group);
    EPD_REQUIRE(counts);
    EPD_RETURN_IF_ERROR(epd::client::check_output(counts, "counts"));
    EPD_RETURN_IF_ERROR(epd::client::check_wait(timeout_ms));
    epd_counts_t out{};
    EPD_RETURN_IF_ERROR(g->session->operations().counts(*g, ticket, timeout_ms, out));
    epd::client::write_struct(counts, out);
    return {};
  });
}

epd_status_t epd_ticket_wait_sent(epd_group_t* group, epd_ticket_t ticket, int32_t timeout_ms) {
  return ranged([&]() -> Status {
    EPD_OPEN(Group, g, group);
    EPD_RETURN_IF_ERROR(epd::client::check_wait(timeout_ms));
    return g->session->operations().wait_sent(*g, ticket, timeout_ms);
  });
}

epd_status_t epd_ticket_wait_on_stream(epd_group_t* group, epd_ticket_t ticket, void* stream) {
  return ranged([&]() -> Status {
    EPD_OPEN(Group, g, group);
    return g->session->operations().wait_on_stream(*g, ticket, stream);
  });
}

epd_status_t epd_ticket_event(epd_group_t* group, epd_ticket_t ticket, void** event) {
  return guarded([&]() -> Status {
    EPD_OPEN(Group, g, group);
    EPD_REQUIRE(event);
    return g->session->streams().event_of(*g, ticket, *event);
  });
}

epd_status_t epd_ticket_drop(epd_group_t* group, epd_ticket_t ticket) {
  return guarded([&]() -> Status {
    EPD_OPEN(Group, g, group);
    return g->session->operations().drop(*g, ticket);
  });
}

epd_status_t epd_ticket_on_complete(epd_group_t* group, epd_ticket_t ticket, epd_hook_t hook, void* user) {
  return guarded([&]() -> Status {
    EPD_OPEN(Group, g, group);
    EPD_REQUIRE(hook);
    return g->session->operations().on_complete(*g, ticket, hook, user);
  });
}

}  // extern "C"
