// The C functions: they check and copy arguments by the size rule, stop exceptions, and keep the error text.
#include "exportable_memory.h"
#include "log.h"
#include "ranges.h"
#include "session.h"
#include "struct_size.h"

#include <cstdlib>
#include <new>

namespace {

using epd::Status;
using epd::client::Group;
using epd::client::Handle;
using epd::client::log_line;
using epd::client::LogLevel;
using epd::client::report;
using epd::client::Session;
using epd::client::SubmitRequest;
using epd::client::WaitBy;
namespace abi = epd::abi;

// An opaque handle is the address of a Handle, which outlives its object (handle.h). The C types are never
// defined.
Session* object_of(const epd_session_t* session) {
  return reinterpret_cast<const Handle<Session>*>(session)->object();
}
Group* object_of(const epd_group_t* group) {
  return reinterpret_cast<const Handle<Group>*>(group)->object();
}

// WOULD_BLOCK is an answer, not a failure.
void log_failure(const char* call, const Status& status) {
  const LogLevel level = status.code() == epd::StatusCode::kWouldBlock ? LogLevel::kDebug : LogLevel::kError;
  if (!epd::client::logs(level)) return;  // before any text is made: a poll may be refused again and again
  log_line(level, "call failed",
           {{"call", call}, {"status", epd::status_name(status.code())}, {"text", status.message()}});
}

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

// Runs the body of a C function. Nothing may be thrown into the caller.
template <typename Body>
epd_status_t guarded(Body body, const char* call = __builtin_FUNCTION()) noexcept {
  try {
    const Status status = body();
    if (!status.ok()) log_failure(call, status);
    return report(status);
  } catch (const std::bad_alloc&) {
    return report(epd::StatusCode::kResourceExhausted, "out of memory");
  } catch (const std::exception& error) {
    return report(epd::StatusCode::kInternal, error.what());
  } catch (...) {
    return report(epd::StatusCode::kInternal, "unknown exception");
  }
}

// The same in a range that profilers show, by the function's name without "epd_".
template <typename Body>
epd_status_t ranged(Body body, const char* call = __builtin_FUNCTION()) noexcept {
  const epd::client::Range range(call + sizeof("epd_") - 1);
  return guarded(body, call);
}

Status missing(const char* name) {
  return epd::invalid_argument(std::string(name) + " is NULL");
}

#define EPD_REQUIRE(pointer) \
  if ((pointer) == nullptr) return missing(#pointer)
#define EPD_RETURN_IF_ERROR(expression) \
  if (Status early = (expression); !early.ok()) return early

const Session& session_of(const Session& session) {
  return session;
}
const Session& session_of(const Group& group) {
  return *group.session;
}

// Sets `object` to the one behind the handle. Fails if the handle may not be used.
template <typename CHandle, typename Object>
Status open_handle(const CHandle* handle, const char* name, Object*& object) {
  if (handle == nullptr) return missing(name);
  object = object_of(handle);
  if (object == nullptr)
    return epd::invalid_argument(std::string(name) +
                                 " is a handle that is no more: detached, or left, already");
  return session_of(*object).in_home_process();
}

// Declares `object`, and returns from the function if the handle may not be used.
#define EPD_OPEN(Type, object, handle) \
  Type* object = nullptr;              \
  EPD_RETURN_IF_ERROR(open_handle(handle, #handle, object))

std::string socket_path(const char* given) {
  if (given != nullptr) return given;
  const char* from_environment = std::getenv("EPD_SOCKET");
  if (from_environment != nullptr && from_environment[0] != '\0') return from_environment;
  return "/run/epd/epd.sock";
}

Status read_wait_by(const epd_wait_by_t& given, WaitBy& wait_by) {
  const std::uint32_t number = epd::client::number_in(given);
  if (number > EPD_WAIT_BY_EVENT)
    return epd::client::bad_value("wait_by", number,
                                  "0 (EPD_WAIT_BY_MEMOP), 1 (EPD_WAIT_BY_KERNEL) or 2 (EPD_WAIT_BY_EVENT)");
  wait_by = static_cast<WaitBy>(number);
  if (wait_by != WaitBy::kMemop) return {};
  const char* from_environment = std::getenv("EPD_WAIT_BY");
  const std::string text = from_environment != nullptr ? from_environment : "";
  if (text == "kernel") wait_by = WaitBy::kKernel;
  if (text == "event") wait_by = WaitBy::kEvent;
  if (text.empty() || text == "memop" || wait_by != WaitBy::kMemop) return {};
  return epd::invalid_argument("EPD_WAIT_BY is \"" + text + "\"; allowed: event, kernel or memop");
}

epd_buffers_t regions_of(const Group& group, std::uint32_t slot) {
  using abi::Region;
  const auto at = [&](Region region) { return group.region(slot, region); };
  const auto floats = [&](Region region) { return static_cast<float*>(at(region)); };
  const auto ints = [&](Region region) { return static_cast<std::int32_t*>(at(region)); };
  epd_buffers_t out{};
  out.x = at(Region::kX);
  out.topk_idx = at(Region::kTopkIdx);
  out.topk_weights = floats(Region::kTopkWeights);
  out.recv_x = at(Region::kRecvX);
  out.recv_scales = at(Region::kRecvScales);
  out.recv_topk_idx = at(Region::kRecvTopkIdx);
  out.recv_topk_weights = floats(Region::kRecvTopkWeights);
  out.recv_src = ints(Region::kRecvSrc);
  out.rank_offsets = ints(Region::kRankOffsets);
  out.expert_counts = ints(Region::kExpertCounts);
  out.y = at(Region::kY);
  out.out = at(Region::kOut);
  out.x_scales = at(Region::kXScales);
  out.expert_offsets = ints(Region::kExpertOffsets);
  out.source_ranges = ints(Region::kSourceRanges);
  out.y_weights = floats(Region::kYWeights);
  out.bias[0] = at(Region::kBias0);
  out.bias[1] = at(Region::kBias1);
  out.out_weights = floats(Region::kOutWeights);
  return out;
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

epd_status_t epd_session_attach(const epd_attach_options_t* options, epd_session_t** session) {
  return guarded([&]() -> Status {
    EPD_REQUIRE(session);
    epd_attach_options_t o{};
    if (options != nullptr) EPD_RETURN_IF_ERROR(epd::client::read_struct(options, "options", o));
    EPD_RETURN_IF_ERROR(epd::client::check_limit(o.timeout_ms, "5000"));
    const auto deadline = epd::client::Deadline::in_ms(o.timeout_ms != 0 ? o.timeout_ms : 5000);
    epd::client::Attachment attachment;
    WaitBy wait_by{};
    EPD_RETURN_IF_ERROR(read_wait_by(o.wait_by, wait_by));
    EPD_RETURN_IF_ERROR(epd::client::attach(
        {socket_path(o.socket_path), o.device != nullptr ? o.device : "", deadline, wait_by}, attachment));
    auto made = std::make_unique<Session>(std::move(attachment));
    auto handle = std::make_unique<Handle<Session>>();
    EPD_RETURN_IF_ERROR(made->prepare());
    const epd_session_info_t info = made->info();
    log_line(LogLevel::kInfo, "attached",
             {{"library", epd_version()},
              {"daemon", info.daemon},
              {"session", std::to_string(info.session_id)},
              {"device", info.device}});
    *session = reinterpret_cast<epd_session_t*>(Handle<Session>::give(std::move(handle), *made.release()));
    return {};
  });
}

epd_status_t epd_session_detach(epd_session_t* session) {
  return guarded([&]() -> Status {
    if (session == nullptr) return {};
    EPD_OPEN(Session, s, session);
    if (s->in_hook_thread()) return epd::invalid_argument("a hook may not detach its own session");
    const std::string number = std::to_string(s->info().session_id);
    delete s;
    log_line(LogLevel::kInfo, "detached", {{"session", number}});
    return {};
  });
}

epd_status_t epd_session_info(const epd_session_t* session, epd_session_info_t* info) {
  return guarded([&]() -> Status {
    EPD_OPEN(Session, s, session);
    EPD_REQUIRE(info);
    EPD_RETURN_IF_ERROR(epd::client::check_output(info, "info"));
    epd::client::write_struct(info, s->info());
    return {};
  });
}

epd_status_t epd_session_check(const epd_session_t* session) {
  return guarded([&]() -> Status {
    EPD_OPEN(Session, s, session);
    return s->check();
  });
}

epd_status_t epd_region_bytes(const epd_group_config_t* config, epd_region_t region, uint64_t* bytes) {
  return guarded([&]() -> Status {
    EPD_REQUIRE(bytes);
    epd_group_config_t c{};
    EPD_RETURN_IF_ERROR(epd::client::read_struct(config, "config", c));
    abi::GroupShape shape{};
    EPD_RETURN_IF_ERROR(epd::client::read_shape(c, shape));
    uint32_t index = 0;
    EPD_RETURN_IF_ERROR(epd::client::read_region(region, "region", index));
    *bytes = abi::region_bytes(shape, static_cast<abi::Region>(index));
    return {};
  });
}

epd_status_t epd_group_bytes(const epd_group_config_t* config, epd_device_kind_t kind,
                             epd_group_bytes_t* bytes) {
  return guarded([&]() -> Status {
    EPD_REQUIRE(bytes);
    EPD_RETURN_IF_ERROR(epd::client::check_output(bytes, "bytes"));
    epd_group_config_t c{};
    EPD_RETURN_IF_ERROR(epd::client::read_struct(config, "config", c));
    epd_group_bytes_t out{};
    EPD_RETURN_IF_ERROR(epd::client::read_bytes(c, kind, out));
    epd::client::write_struct(bytes, out);
    return {};
  });
}

epd_status_t epd_group_join(epd_session_t* session, const epd_group_config_t* config, epd_group_t** group) {
  return guarded([&]() -> Status {
    EPD_OPEN(Session, s, session);
    EPD_REQUIRE(group);
    epd_group_config_t c{};
    EPD_RETURN_IF_ERROR(epd::client::read_struct(config, "config", c));
    Group* joined = nullptr;
    auto handle = std::make_unique<Handle<Group>>();
    EPD_RETURN_IF_ERROR(s->join(c, joined));
    joined->group_name = c.name;
    log_line(LogLevel::kInfo, "joined",
             {{"group", joined->group_name},
              {"rank", std::to_string(joined->rank)},
              {"ranks", std::to_string(joined->shape.num_ranks)},
              {"session", std::to_string(s->info().session_id)}});
    *group = reinterpret_cast<epd_group_t*>(Handle<Group>::give(std::move(handle), *joined));
    return {};
  });
}

epd_status_t epd_group_leave(epd_group_t* group) {
  return guarded([&]() -> Status {
    if (group == nullptr) return {};
    EPD_OPEN(Group, g, group);
    Session& session = *g->session;
    if (session.in_hook_thread()) return epd::invalid_argument("a hook may not leave a group");
    const std::string name = g->group_name;
    const std::string rank = std::to_string(g->rank);
    session.leave(g, epd::client::Deadline::in_ms(epd::client::kLeaveMs));
    log_line(LogLevel::kInfo, "left", {{"group", name}, {"rank", rank}});
    return {};
  });
}

uint32_t epd_group_rank(const epd_group_t* group) {
  uint32_t rank = UINT32_MAX;
  guarded([&]() -> Status {
    EPD_OPEN(Group, g, group);
    rank = g->rank;
    return {};
  });
  return rank;
}

int epd_group_active(const epd_group_t* group, uint32_t rank) {
  int active = 0;
  guarded([&]() -> Status {
    EPD_OPEN(Group, g, group);
    active = rank < g->shape.num_ranks && g->board.active(rank) ? 1 : 0;
    return {};
  });
  return active;
}

uint32_t epd_group_sum_ranks(const epd_group_t* group) {
  uint32_t sum_ranks = 0;
  guarded([&]() -> Status {
    EPD_OPEN(Group, g, group);
    sum_ranks = g->sum_ranks;
    return {};
  });
  return sum_ranks;
}

epd_status_t epd_group_active_mask(const epd_group_t* group, const int32_t** mask) {
  return guarded([&]() -> Status {
    EPD_OPEN(Group, g, group);
    EPD_REQUIRE(mask);
    *mask = epd::client::active_mask_of(*g);
    return {};
  });
}

epd_status_t epd_group_waits(const epd_group_t* group, int64_t* ready_ns, int64_t* arrived_ns) {
  return guarded([&]() -> Status {
    EPD_OPEN(Group, g, group);
    const auto read = [](const std::atomic<std::uint64_t>& time_ns, int64_t& to) {
      to = static_cast<int64_t>(time_ns.load(std::memory_order_relaxed));
    };
    for (std::uint32_t rank = 0; rank < g->shape.num_ranks; ++rank) {
      const abi::PeerWait& waited = g->board.waited_for(rank);
      if (ready_ns != nullptr) read(waited.ready_ns, ready_ns[rank]);
      if (arrived_ns != nullptr) read(waited.arrived_ns, arrived_ns[rank]);
    }
    return {};
  });
}

epd_status_t epd_group_buffers(const epd_group_t* group, uint32_t slot, epd_buffers_t* buffers) {
  return guarded([&]() -> Status {
    EPD_OPEN(Group, g, group);
    EPD_REQUIRE(buffers);
    EPD_RETURN_IF_ERROR(epd::client::check_output(buffers, "buffers"));
    if (slot >= g->shape.depth) {
      return epd::client::bad_value("slot", slot, "0 .. " + std::to_string(g->shape.depth - 1));
    }
    epd::client::write_struct(buffers, regions_of(*g, slot));
    return {};
  });
}

epd_status_t epd_group_resume(epd_group_t* group, int32_t timeout_ms, epd_resume_info_t* info) {
  return ranged([&]() -> Status {
    EPD_OPEN(Group, g, group);
    if (info != nullptr) EPD_RETURN_IF_ERROR(epd::client::check_output(info, "info"));
    epd_resume_info_t out{};
    EPD_RETURN_IF_ERROR(g->session->resume(*g, timeout_ms, out));
    log_line(
        LogLevel::kInfo, "resumed",
        {{"group", g->group_name}, {"rank", std::to_string(g->rank)}, {"epoch", std::to_string(out.epoch)}});
    if (info != nullptr) epd::client::write_struct(info, out);
    return {};
  });
}

epd_status_t epd_group_check(epd_group_t* group, epd_progress_t* progress) {
  return guarded([&]() -> Status {
    EPD_OPEN(Group, g, group);
    if (progress != nullptr) EPD_RETURN_IF_ERROR(epd::client::check_output(progress, "progress"));
    epd_progress_t out{};
    Status status = g->session->operations().check(*g, out);
    if (progress != nullptr) epd::client::write_struct(progress, out);
    return status;
  });
}

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

epd_status_t epd_memory_register(epd_session_t* session, void* address, size_t bytes) {
  return guarded([&]() -> Status {
    EPD_OPEN(Session, s, session);
    return s->register_memory(address, bytes);
  });
}

epd_status_t epd_memory_unregister(epd_session_t* session, void* address) {
  return guarded([&]() -> Status {
    EPD_OPEN(Session, s, session);
    return s->unregister_memory(address);
  });
}

void* epd_memory_alloc(size_t bytes, int device, void* /*stream*/) {
  void* address = nullptr;
  guarded([&] { return epd::client::allocate_exportable(bytes, device, address); });
  return address;
}

void epd_memory_free(void* address, size_t /*bytes*/, int /*device*/, void* /*stream*/) {
  guarded([&] { return epd::client::free_exportable(address); });
}

}  // extern "C"
