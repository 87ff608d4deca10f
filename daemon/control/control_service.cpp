#include "services.h"

#include "answers.h"
#include "base/clock.h"
#include "common/build_info.h"
#include "connections.h"
#include "proto/attach.h"
#include "proto/wire.h"

#include <grpcpp/grpcpp.h>
#include <array>
#include <charconv>
#include <cstdio>
#include <exception>
#include <string_view>
#include <utility>
#include "epd/v1/control.grpc.pb.h"

namespace epd::control {
namespace {

using supervisor::Operator;
using supervisor::Right;

// Returns what the supervisor has filled.
template <typename Message>
grpc::Status answer(Result<Message> filled, Message& response) {
  if (!filled.ok()) return to_grpc(filled.status());
  response = std::move(filled).value();
  clean_strings(response);
  return grpc::Status::OK;
}

// A watcher may notice the end of its caller or of the daemon this late.
constexpr std::uint32_t kWatchSliceMs = 200;
constexpr std::size_t kEventsPerMessage = 64;
constexpr std::uint32_t kMaxPairs = 4096;                     // of a group, in an answer
constexpr std::size_t kMaxWaitsBytes = std::size_t{3} << 20;  // gRPC's clients take 4 MiB by default

std::optional<std::uint64_t> number(std::string_view text) {
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (text.empty() || error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

void fill(v1::WatchEventsResponse& message, const EventBatch& batch) {
  const std::uint64_t now = MonotonicClock().now_ns();
  message.set_lost(batch.lost);
  for (const Event& event : batch.events) {
    v1::Event& out = *message.add_events();
    out.set_sequence(event.sequence);
    out.set_kind(static_cast<v1::EventKind>(event.kind));
    out.set_level(log_level_word(event.level));
    out.set_text(clean_text(event.text));
    out.set_unix_ms(event.unix_ms);
    out.set_age_ms(now > event.monotonic_ns ? (now - event.monotonic_ns) / 1'000'000 : 0);
    for (const auto& [key, value] : event.fields) (*out.mutable_fields())[key] = clean_text(value);
  }
}

class ControlService final : public v1::Control::Service {
 public:
  ControlService(supervisor::ControlFacade& facade, const Callers& callers, const std::atomic<bool>& stopping,
                 CallTimes& times)
      : facade_(facade), callers_(callers), stopping_(stopping), times_(times) {}

  grpc::Status GetStatus(grpc::ServerContext* context, const v1::GetStatusRequest* /*request*/,
                         v1::GetStatusResponse* response) override {
    return pass_on(
        {*context, __func__}, "see the status", [this] { return facade_.status(); }, *response);
  }

  grpc::Status ListDevices(grpc::ServerContext* context, const v1::ListDevicesRequest* /*request*/,
                           v1::ListDevicesResponse* response) override {
    return pass_on(
        {*context, __func__}, "list devices", [this] { return facade_.devices(); }, *response);
  }

  grpc::Status ListSessions(grpc::ServerContext* context, const v1::ListSessionsRequest* /*request*/,
                            v1::ListSessionsResponse* response) override {
    return pass_on(
        {*context, __func__}, "list sessions", [this] { return facade_.sessions(); }, *response);
  }

  grpc::Status ListGroups(grpc::ServerContext* context, const v1::ListGroupsRequest* /*request*/,
                          v1::ListGroupsResponse* response) override {
    return pass_on(
        {*context, __func__}, "list groups", [this] { return facade_.groups(); }, *response);
  }

  grpc::Status ListNodes(grpc::ServerContext* context, const v1::ListNodesRequest* /*request*/,
                         v1::ListNodesResponse* response) override {
    return pass_on(
        {*context, __func__}, "list nodes", [this] { return facade_.nodes(); }, *response);
  }

  grpc::Status ListFarEngines(grpc::ServerContext* context, const v1::ListFarEnginesRequest* /*request*/,
                              v1::ListFarEnginesResponse* response) override {
    return pass_on(
        {*context, __func__}, "see the network", [this] { return facade_.far_engines(); }, *response);
  }

  grpc::Status ListOperations(grpc::ServerContext* context, const v1::ListOperationsRequest* /*request*/,
                              v1::ListOperationsResponse* response) override {
    return pass_on(
        {*context, __func__}, "list operations", [this] { return facade_.operations(); }, *response);
  }

  grpc::Status GetOperation(grpc::ServerContext* context, const v1::GetOperationRequest* request,
                            v1::GetOperationResponse* response) override {
    return serve(
        {*context, __func__}, Right::kRead, "look at an operation",
        [&](const Operator& /*by*/) -> grpc::Status {
          const std::string_view id = request->id();
          const std::size_t colon = id.find(':');
          const auto session = number(id.substr(0, colon));
          const auto ticket = colon == std::string_view::npos ? std::nullopt : number(id.substr(colon + 1));
          if (!session || !ticket) {
            return to_grpc(
                invalid_argument("operation \"" + clean_text(id) +
                                 "\" has no such form; allowed: SESSION:TICKET, as epctl ops prints"));
          }
          return answer(facade_.operation(*session, *ticket), *response);
        });
  }

  grpc::Status GetStatistics(grpc::ServerContext* context, const v1::GetStatisticsRequest* /*request*/,
                             v1::GetStatisticsResponse* response) override {
    return pass_on(
        {*context, __func__}, "see statistics", [this] { return facade_.statistics(); }, *response);
  }

  grpc::Status GetWaits(grpc::ServerContext* context, const v1::GetWaitsRequest* request,
                        v1::GetWaitsResponse* response) override {
    supervisor::WaitsWanted wanted{request->group(), request->group().empty() ? 0 : abi::kMaxRanks,
                                   kMaxPairs};
    if (request->max_pairs() != 0) wanted.max_pairs = request->max_pairs();
    wanted.in_progress = true;
    return serve(
        {*context, __func__}, Right::kRead, "see waits", [&](const Operator& /*by*/) -> grpc::Status {
          if (wanted.max_pairs > kMaxPairs) {
            return to_grpc(invalid_argument("max_pairs is " + std::to_string(wanted.max_pairs) +
                                            "; allowed: 0.." + std::to_string(kMaxPairs) + " (0: the most)"));
          }
          grpc::Status status = answer(facade_.waits(wanted), *response);
          if (!status.ok() || response->ByteSizeLong() <= kMaxWaitsBytes) return status;
          const std::string text = "the waits of " + std::to_string(response->groups_size()) +
                                   " groups are " + std::to_string(response->ByteSizeLong()) +
                                   " bytes; allowed: " + std::to_string(kMaxWaitsBytes) + ": name one group";
          response->Clear();
          return to_grpc(resource_exhausted(text));
        });
  }

  grpc::Status WatchEvents(grpc::ServerContext* context, const v1::WatchEventsRequest* request,
                           grpc::ServerWriter<v1::WatchEventsResponse>* writer) override {
    return serve({*context, __func__}, Right::kRead, "watch events",
                 [&](const Operator& by) -> grpc::Status { return watch(*context, by, *request, *writer); });
  }

  grpc::Status ReloadConfig(grpc::ServerContext* context, const v1::ReloadConfigRequest* /*request*/,
                            v1::ReloadConfigResponse* response) override {
    return serve({*context, __func__}, Right::kChange, "reload the configuration",
                 [&](const Operator& by) -> grpc::Status { return answer(facade_.reload(by), *response); });
  }

  grpc::Status SetOptions(grpc::ServerContext* context, const v1::SetOptionsRequest* request,
                          v1::SetOptionsResponse* response) override {
    return serve(
        {*context, __func__}, Right::kChange, "set options", [&](const Operator& by) -> grpc::Status {
          supervisor::OptionSettings options;
          for (const auto& [key, value] : request->values()) options[key] = value;
          for (const std::string& key : request->unset()) {
            if (!options.try_emplace(key).second)
              return to_grpc(
                  invalid_argument(key + " is to be both set and unset, or unset twice; allowed: once"));
          }
          if (options.empty())
            return to_grpc(invalid_argument("nothing to set; allowed: log.level, limits.*"));
          return answer(facade_.set_options(by, options), *response);
        });
  }

  grpc::Status SetDevice(grpc::ServerContext* context, const v1::SetDeviceRequest* request,
                         v1::SetDeviceResponse* /*response*/) override {
    return serve(
        {*context, __func__}, Right::kChange, "set a device", [&](const Operator& by) -> grpc::Status {
          if (request->has_sms() == request->unset_sms())
            return to_grpc(invalid_argument(request->has_sms()
                                                ? "sms is to be both set and unset; allowed: one of them"
                                                : "nothing to set; allowed: sms"));
          return to_grpc(facade_.set_device(
              by, request->device(), request->has_sms() ? std::optional(request->sms()) : std::nullopt));
        });
  }

  grpc::Status SetGroup(grpc::ServerContext* context, const v1::SetGroupRequest* request,
                        v1::SetGroupResponse* response) override {
    return serve(
        {*context, __func__}, Right::kChange, "set a group", [&](const Operator& by) -> grpc::Status {
          supervisor::GroupSettingsChange change;
          if (request->has_sms()) change.sms = request->sms();
          if (request->has_priority()) change.priority = request->priority();
          if (request->has_linger_us()) change.linger_us = request->linger_us();
          change.unset_sms = request->unset_sms();
          change.unset_priority = request->unset_priority();
          change.unset_linger_us = request->unset_linger_us();
          const char* const both = change.sms && change.unset_sms               ? "sms"
                                   : change.priority && change.unset_priority   ? "priority"
                                   : change.linger_us && change.unset_linger_us ? "linger_us"
                                                                                : nullptr;
          if (both != nullptr) {
            return to_grpc(
                invalid_argument(std::string(both) + " is to be both set and unset; allowed: one of them"));
          }
          return answer(facade_.set_group(by, request->group(), change), *response);
        });
  }

  grpc::Status EvictSession(grpc::ServerContext* context, const v1::EvictSessionRequest* request,
                            v1::EvictSessionResponse* /*response*/) override {
    return serve({*context, __func__}, Right::kChange, "evict a session",
                 [&](const Operator& by) -> grpc::Status {
                   return to_grpc(facade_.evict_session(by, request->session_id(), request->reason()));
                 });
  }

  grpc::Status EvictRank(grpc::ServerContext* context, const v1::EvictRankRequest* request,
                         v1::EvictRankResponse* response) override {
    return serve({*context, __func__}, Right::kChange, "evict a rank",
                 [&](const Operator& by) -> grpc::Status {
                   return answer(facade_.evict_rank(by, request->group(), request->rank(), request->reason()),
                                 *response);
                 });
  }

  grpc::Status RestartDevice(grpc::ServerContext* context, const v1::RestartDeviceRequest* request,
                             v1::RestartDeviceResponse* /*response*/) override {
    return serve({*context, __func__}, Right::kChange, "restart a device",
                 [&](const Operator& by) -> grpc::Status {
                   return to_grpc(facade_.restart_device(by, request->device()));
                 });
  }

  grpc::Status GetConfig(grpc::ServerContext* context, const v1::GetConfigRequest* /*request*/,
                         v1::GetConfigResponse* response) override {
    return pass_on(
        {*context, __func__}, "see the configuration", [this] { return facade_.config(); }, *response);
  }

  grpc::Status Drain(grpc::ServerContext* context, const v1::DrainRequest* request,
                     v1::DrainResponse* response) override {
    return serve({*context, __func__}, Right::kChange, "drain", [&](const Operator& by) -> grpc::Status {
      if (Status status = facade_.drain(by, request->timeout_ms()); !status.ok()) return to_grpc(status);
      // The drain has begun, even if the next call fails: an idle daemon may have ended already.
      v1::GetStatusResponse status;
      if (answer(facade_.status(), status).ok()) response->mutable_daemon()->Swap(status.mutable_daemon());
      return grpc::Status::OK;
    });
  }

  grpc::Status GetVersion(grpc::ServerContext* context, const v1::GetVersionRequest* /*request*/,
                          v1::GetVersionResponse* response) override {
    return serve({*context, __func__}, Right::kRead, "see the version",
                 [&](const Operator& /*by*/) -> grpc::Status {
                   auto boot_id = facade_.boot_id();
                   if (!boot_id.ok()) return to_grpc(boot_id.status());
                   response->set_version(build_info().version);
                   response->set_boot_id(*boot_id);
                   response->set_grpc_version(grpc::Version());
                   response->set_commit(build_info().commit);
                   response->set_cuda_kernels(build_info().cuda_kernels);
                   response->set_abi_version_min(abi::kAbiVersionMin);
                   response->set_abi_version_max(abi::kAbiVersion);
                   std::array<char, 20> hash{};
                   std::snprintf(hash.data(), hash.size(), "%016llx",
                                 static_cast<unsigned long long>(abi::layout_hash()));
                   response->set_layout_hash(hash.data());
                   return grpc::Status::OK;
                 });
  }

 private:
  struct Call {
    const grpc::ServerContext& context;
    const char* name;  // of the method
  };

  // Every call goes through here. It finds the caller, asks whether it may, lets no exception leave a
  // handler, and counts the time.
  template <typename Handler>
  grpc::Status serve(const Call& call, Right right, const char* what, const Handler& handler) {
    const std::uint64_t begin_ns = MonotonicClock().now_ns();
    grpc::Status status = handle(call, right, what, handler);
    const auto took = static_cast<double>(MonotonicClock().now_ns() - begin_ns) * 1e-9;
    times_.add(call.name, took, status.ok() ? std::string_view() : code_name(status.error_code()));
    return status;
  }

  template <typename Handler>
  grpc::Status handle(const Call& call, Right right, const char* what, const Handler& handler) {
    try {
      Result<Operator> by = callers_.caller_of(call.context);
      if (!by.ok()) return to_grpc(by.status());
      if (Status status = facade_.authorize(*by, right, what); !status.ok()) return to_grpc(status);
      return handler(*by);
    } catch (const std::exception& error) {
      return to_grpc(internal_error(std::string("can't ") + what + ": " + error.what()));
    }
  }

  template <typename Read, typename Message>
  grpc::Status pass_on(const Call& call, const char* what, const Read& read, Message& response) {
    return serve(call, Right::kRead, what,
                 [&](const Operator& /*by*/) { return answer<Message>(read(), response); });
  }

  // Holds only this thread: the events are copied in small pieces, and Write waits for the reader. The watch
  // ends when the caller's right is withdrawn.
  grpc::Status watch(const grpc::ServerContext& context, const Operator& by,
                     const v1::WatchEventsRequest& request,
                     grpc::ServerWriter<v1::WatchEventsResponse>& writer) {
    std::uint64_t seen = request.since();
    while (!context.IsCancelled() && !stopping_.load()) {
      if (Status status = facade_.authorize(by, Right::kRead, "follow events"); !status.ok())
        return to_grpc(status);
      auto batch = facade_.events(seen, kEventsPerMessage, request.follow() ? kWatchSliceMs : 0);
      if (!batch.ok()) return to_grpc(batch.status());
      if (seen > batch->newest) {
        return to_grpc(invalid_argument("since is " + std::to_string(seen) + "; allowed: 0.." +
                                        std::to_string(batch->newest) + " (the newest event)"));
      }
      if (batch->events.empty()) {
        if (!request.follow()) return grpc::Status::OK;
        continue;
      }
      seen = batch->events.back().sequence;
      v1::WatchEventsResponse response;
      fill(response, *batch);
      if (!writer.Write(response)) break;
    }
    return stopping_.load() ? to_grpc({StatusCode::kAborted, "the daemon is stopping"})
                            : grpc::Status::CANCELLED;
  }

  supervisor::ControlFacade& facade_;
  const Callers& callers_;
  const std::atomic<bool>& stopping_;
  CallTimes& times_;
};

}  // namespace

std::unique_ptr<grpc::Service> make_control_service(supervisor::ControlFacade& facade, const Callers& callers,
                                                    const std::atomic<bool>& stopping, CallTimes& times) {
  return std::make_unique<ControlService>(facade, callers, stopping, times);
}

}  // namespace epd::control
