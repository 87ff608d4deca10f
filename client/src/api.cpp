// The C functions of sessions, groups and memory. They check and copy arguments by the size rule.
#include "api.h"
#include "struct_size.h"

#include <cstdlib>

namespace {

using epd::Status;
using epd::client::Group;
using epd::client::guarded;
using epd::client::Handle;
using epd::client::log_line;
using epd::client::LogLevel;
using epd::client::ranged;
using epd::client::Session;
using epd::client::WaitBy;
namespace abi = epd::abi;

std::string socket_path(const char* given) {
  if (given != nullptr) return given;
  const char* from_environment = std::getenv("EPD_SOCKET");
  if (from_environment != nullptr && from_environment[0] != '\0') return from_environment;
  return epd::client::kDefaultSocket;
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
    EPD_RETURN_IF_ERROR(epd::client::read_region(region, index));
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
  return epd_group_advance(group, nullptr, timeout_ms, nullptr, info);
}

epd_status_t epd_group_advance(epd_group_t* group, epd_ticket_t* ticket, int32_t timeout_ms,
                               epd_result_t* result, epd_resume_info_t* info) {
  return ranged([&]() -> Status {
    EPD_OPEN(Group, g, group);
    if (result != nullptr) EPD_RETURN_IF_ERROR(epd::client::check_output(result, "result"));
    if (info != nullptr) EPD_RETURN_IF_ERROR(epd::client::check_output(info, "info"));
    epd_ticket_t none = 0;
    epd_result_t end{};
    epd_resume_info_t out{};
    Status status = g->session->advance(*g, ticket != nullptr ? *ticket : none, timeout_ms, end, out);
    if (result != nullptr && end.size != 0) epd::client::write_struct(result, end);
    if (!status.ok()) return status;
    if (end.size == 0 || end.status != EPD_OK)
      log_line(LogLevel::kInfo, "resumed",
               {{"group", g->group_name},
                {"rank", std::to_string(g->rank)},
                {"epoch", std::to_string(out.epoch)}});
    if (info != nullptr) epd::client::write_struct(info, out);
    return {};
  });
}

epd_status_t epd_group_restore(epd_group_t* group, int32_t timeout_ms, epd_resume_info_t* info) {
  return guarded([&]() -> Status {
    EPD_OPEN(Group, g, group);
    if (info != nullptr) EPD_RETURN_IF_ERROR(epd::client::check_output(info, "info"));
    const std::string name = g->group_name;
    const std::string rank = std::to_string(g->rank);
    epd_resume_info_t out{};
    EPD_RETURN_IF_ERROR(g->session->restore(*g, timeout_ms, out));
    log_line(LogLevel::kInfo, "restored",
             {{"group", name}, {"rank", rank}, {"epoch", std::to_string(out.epoch)}});
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

}  // extern "C"
