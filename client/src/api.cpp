// The C functions: arguments checked and copied by the size rule, exceptions stopped, errors kept.
#include "session.h"
#include "struct_size.h"

#include <cstdlib>
#include <new>

namespace {

using epd::client::Group;
using epd::client::report;
using epd::client::Session;
using epd::client::Status;
namespace abi = epd::abi;

// The opaque handles are these objects; the C names are never defined.
Session* unwrap(const epd_session_t* session) {
  return reinterpret_cast<Session*>(const_cast<epd_session_t*>(session));
}
Group* unwrap(const epd_group_t* group) {
  return reinterpret_cast<Group*>(const_cast<epd_group_t*>(group));
}

// Runs the body of a C function. Nothing may be thrown into the caller.
template <typename Body>
epd_status_t guarded(Body body) noexcept {
  try {
    return report(body());
  } catch (const std::bad_alloc&) {
    return report(epd::StatusCode::kResourceExhausted, "out of memory");
  } catch (const std::exception& error) {
    return report(epd::StatusCode::kInternal, error.what());
  } catch (...) {
    return report(epd::StatusCode::kInternal, "unknown exception");
  }
}

Status missing(const char* name) {
  return epd::client::invalid_argument(std::string(name) + " is NULL");
}

#define EPD_REQUIRE(pointer) \
  if ((pointer) == nullptr) return missing(#pointer)
#define EPD_RETURN_IF_ERROR(expression) \
  if (Status early = (expression); !early.ok()) return early

std::string socket_path(const char* given) {
  if (given != nullptr) return given;
  const char* from_environment = std::getenv("EPD_SOCKET");
  if (from_environment != nullptr && from_environment[0] != '\0') return from_environment;
  return "/run/epd/epd.sock";
}

}  // namespace

extern "C" {

epd_status_t epd_session_attach(const epd_attach_options_t* options, epd_session_t** session) {
  return guarded([&]() -> Status {
    EPD_REQUIRE(session);
    epd_attach_options_t o{};
    if (options != nullptr) EPD_RETURN_IF_ERROR(epd::client::read_struct(options, "options", o));
    if (o.timeout_ms < 0) {
      return epd::client::bad_value("timeout_ms", o.timeout_ms, "0 (5000 ms) or more milliseconds");
    }
    const auto deadline = epd::client::Deadline::in_ms(o.timeout_ms != 0 ? o.timeout_ms : 5000);
    epd::client::Attachment attachment;
    EPD_RETURN_IF_ERROR(epd::client::attach(
        {socket_path(o.socket_path), o.device != nullptr ? o.device : "", deadline}, attachment));
    auto made = std::make_unique<Session>(std::move(attachment));
    EPD_RETURN_IF_ERROR(made->prepare());
    *session = reinterpret_cast<epd_session_t*>(made.release());
    return {};
  });
}

void epd_session_detach(epd_session_t* session) {
  guarded([&]() -> Status {
    if (session == nullptr) return {};
    if (unwrap(session)->in_hook_thread()) {
      return epd::client::invalid_argument("a hook may not detach its own session");
    }
    delete unwrap(session);
    return {};
  });
}

epd_status_t epd_session_info(const epd_session_t* session, epd_session_info_t* info) {
  return guarded([&]() -> Status {
    EPD_REQUIRE(session);
    EPD_REQUIRE(info);
    EPD_RETURN_IF_ERROR(epd::client::check_output(info, "info"));
    epd::client::write_struct(info, unwrap(session)->info());
    return {};
  });
}

epd_status_t epd_session_check(const epd_session_t* session) {
  return guarded([&]() -> Status {
    EPD_REQUIRE(session);
    return unwrap(session)->check();
  });
}

epd_status_t epd_group_join(epd_session_t* session, const epd_group_config_t* config, epd_group_t** group) {
  return guarded([&]() -> Status {
    EPD_REQUIRE(session);
    EPD_REQUIRE(group);
    epd_group_config_t c{};
    EPD_RETURN_IF_ERROR(epd::client::read_struct(config, "config", c));
    Group* joined = nullptr;
    EPD_RETURN_IF_ERROR(unwrap(session)->join(c, joined));
    *group = reinterpret_cast<epd_group_t*>(joined);
    return {};
  });
}

void epd_group_leave(epd_group_t* group) {
  guarded([&]() -> Status {
    if (group == nullptr) return {};
    Session& session = unwrap(group)->session;
    if (session.in_hook_thread()) return epd::client::invalid_argument("a hook may not leave a group");
    session.leave(unwrap(group), epd::client::Deadline::in_ms(epd::client::kLeaveMs));
    return {};
  });
}

uint32_t epd_group_rank(const epd_group_t* group) {
  return group != nullptr ? unwrap(group)->rank : UINT32_MAX;
}

int epd_group_active(const epd_group_t* group, uint32_t rank) {
  if (group == nullptr || rank >= unwrap(group)->shape.num_ranks) return 0;
  return unwrap(group)->board.active(rank) ? 1 : 0;
}

epd_status_t epd_group_buffers(const epd_group_t* group, uint32_t slot, epd_buffers_t* buffers) {
  return guarded([&]() -> Status {
    EPD_REQUIRE(group);
    EPD_REQUIRE(buffers);
    EPD_RETURN_IF_ERROR(epd::client::check_output(buffers, "buffers"));
    const Group& g = *unwrap(group);
    if (slot >= g.shape.depth) {
      return epd::client::bad_value("slot", slot, "0 .. " + std::to_string(g.shape.depth - 1));
    }
    using abi::Region;
    epd_buffers_t out = EPD_BUFFERS_INIT;
    out.x = g.region(slot, Region::kX);
    out.topk_idx = g.region(slot, Region::kTopkIdx);
    out.topk_weights = static_cast<float*>(g.region(slot, Region::kTopkWeights));
    out.recv_x = g.region(slot, Region::kRecvX);
    if (g.shape.payload == abi::Payload::kFp8Cast) {
      out.recv_scales = static_cast<float*>(g.region(slot, Region::kRecvScales));
    }
    out.recv_topk_idx = g.region(slot, Region::kRecvTopkIdx);
    out.recv_topk_weights = static_cast<float*>(g.region(slot, Region::kRecvTopkWeights));
    out.recv_src = static_cast<std::int32_t*>(g.region(slot, Region::kRecvSrc));
    out.rank_offsets = static_cast<std::int32_t*>(g.region(slot, Region::kRankOffsets));
    out.expert_counts = static_cast<std::int32_t*>(g.region(slot, Region::kExpertCounts));
    out.y = g.region(slot, Region::kY);
    out.out = g.region(slot, Region::kOut);
    epd::client::write_struct(buffers, out);
    return {};
  });
}

epd_status_t epd_group_resume(epd_group_t* group, int32_t timeout_ms, epd_resume_info_t* info) {
  return guarded([&]() -> Status {
    EPD_REQUIRE(group);
    if (info != nullptr) EPD_RETURN_IF_ERROR(epd::client::check_output(info, "info"));
    epd_resume_info_t out = EPD_RESUME_INFO_INIT;
    EPD_RETURN_IF_ERROR(unwrap(group)->session.resume(*unwrap(group), timeout_ms, out));
    if (info != nullptr) epd::client::write_struct(info, out);
    return {};
  });
}

epd_status_t epd_dispatch(epd_group_t* group, const epd_dispatch_args_t* args, epd_ticket_t* ticket,
                          epd_handle_t* handle) {
  return guarded([&]() -> Status {
    EPD_REQUIRE(group);
    EPD_REQUIRE(ticket);
    epd_dispatch_args_t a{};
    EPD_RETURN_IF_ERROR(epd::client::read_struct(args, "args", a));
    if (a.weights > 1) return epd::client::bad_value("weights", a.weights, "0 or 1");
    const std::uint32_t flags = a.weights != 0 ? std::uint32_t{abi::kFlagWeights} : 0;
    return unwrap(group)->session.submit(
        *unwrap(group), {abi::Op::kDispatch, a.slot, a.num_tokens, flags, a.timeout_ms, 0}, *ticket, handle);
  });
}

epd_status_t epd_combine(epd_group_t* group, const epd_combine_args_t* args, epd_ticket_t* ticket) {
  return guarded([&]() -> Status {
    EPD_REQUIRE(group);
    EPD_REQUIRE(ticket);
    epd_combine_args_t a{};
    EPD_RETURN_IF_ERROR(epd::client::read_struct(args, "args", a));
    if (a.weighted > 1) return epd::client::bad_value("weighted", a.weighted, "0 or 1");
    if (a.reserved != 0) return epd::client::bad_value("reserved", a.reserved, "0");
    const std::uint32_t flags = a.weighted != 0 ? std::uint32_t{abi::kFlagWeights} : 0;
    return unwrap(group)->session.submit(
        *unwrap(group), {abi::Op::kCombine, a.slot, 0, flags, a.timeout_ms, a.handle}, *ticket, nullptr);
  });
}

epd_status_t epd_noop(epd_group_t* group, uint32_t slot, epd_ticket_t* ticket) {
  return guarded([&]() -> Status {
    EPD_REQUIRE(group);
    EPD_REQUIRE(ticket);
    return unwrap(group)->session.submit(*unwrap(group), {abi::Op::kNoop, slot, 0, 0, 0, 0}, *ticket,
                                         nullptr);
  });
}

epd_status_t epd_ticket_wait(epd_group_t* group, epd_ticket_t ticket, int32_t timeout_ms,
                             epd_result_t* result) {
  return guarded([&]() -> Status {
    EPD_REQUIRE(group);
    if (result != nullptr) EPD_RETURN_IF_ERROR(epd::client::check_output(result, "result"));
    epd_result_t out{};
    Status status = unwrap(group)->session.wait_ticket(*unwrap(group), ticket, timeout_ms, &out);
    // out.size is set if the operation has ended; else the caller's struct is left alone.
    if (result != nullptr && out.size != 0) epd::client::write_struct(result, out);
    return status;
  });
}

epd_status_t epd_ticket_poll(epd_group_t* group, epd_ticket_t ticket, epd_result_t* result) {
  return epd_ticket_wait(group, ticket, 0, result);
}

int epd_ticket_pending(epd_group_t* group, epd_ticket_t ticket) {
  int pending = 0;
  guarded([&]() -> Status {
    EPD_REQUIRE(group);
    pending = unwrap(group)->session.pending(*unwrap(group), ticket) ? 1 : 0;
    return {};
  });
  return pending;
}

epd_status_t epd_ticket_counts(epd_group_t* group, epd_ticket_t ticket, int32_t timeout_ms,
                               epd_counts_t* counts) {
  return guarded([&]() -> Status {
    EPD_REQUIRE(group);
    EPD_REQUIRE(counts);
    EPD_RETURN_IF_ERROR(epd::client::check_output(counts, "counts"));
    epd_counts_t out = EPD_COUNTS_INIT;
    EPD_RETURN_IF_ERROR(unwrap(group)->session.counts(*unwrap(group), ticket, timeout_ms, out));
    epd::client::write_struct(counts, out);
    return {};
  });
}

epd_status_t epd_ticket_on_complete(epd_group_t* group, epd_ticket_t ticket, epd_hook_t hook, void* user) {
  return guarded([&]() -> Status {
    EPD_REQUIRE(group);
    EPD_REQUIRE(hook);
    return unwrap(group)->session.on_complete(*unwrap(group), ticket, hook, user);
  });
}

}  // extern "C"
