#include "supervisor/supervisor.h"

#include "ask.h"
#include "common/build_info.h"
#include "device_list.h"
#include "messages.h"
#include "node.h"
#include "system_calls.h"

#include <sys/random.h>
#include <unistd.h>
#include <functional>
#include <memory>
#include <utility>

namespace epd::supervisor {
namespace {

// The status of a request to the loop. It is wrapped because a Result<Status> could not tell two statuses
// apart.
struct Done {
  Status status;
};

template <typename T>
Result<T> flat(Result<Result<T>> answer) {
  return answer.ok() ? std::move(answer).value() : Result<T>(answer.status());
}

class Facade final : public ControlFacade {
 public:
  Facade(Node& node, EventLog& events) : node_(node), events_(events) {}

  Result<v1::GetStatusResponse> status() override {
    return ask<v1::GetStatusResponse>(node_.loop(), [this] {
      v1::GetStatusResponse response;
      *response.mutable_daemon() = node_.reads().daemon_status();
      response.mutable_devices()->Swap(node_.reads().list_devices().mutable_devices());
      return response;
    });
  }
  Result<std::string> boot_id() override { return on_loop(&ControlReads::boot_id); }
  Result<HealthFacts> health() override { return on_loop(&ControlReads::health); }
  Result<v1::ListDevicesResponse> devices() override { return on_loop(&ControlReads::list_devices); }
  Result<v1::ListSessionsResponse> sessions() override { return on_loop(&ControlReads::list_sessions); }
  Result<v1::ListGroupsResponse> groups() override {
    auto list = on_loop(&ControlReads::list_groups);
    if (list.ok()) ControlReads::mark_stopped_clients(*list);
    return list;
  }
  Result<v1::ListNodesResponse> nodes() override {
    auto list =
        flat(ask<Result<v1::ListNodesResponse>>(node_.loop(), [this] { return node_.reads().list_nodes(); }));
    if (list.ok()) node_.reads().add_certificate(*list);
    return list;
  }
  Result<v1::ListFarEnginesResponse> far_engines() override {
    return flat(on_loop(&ControlReads::list_far_engines));
  }
  Result<v1::ListOperationsResponse> operations() override {
    auto stopped = on_loop(&ControlReads::stopped_engines);
    if (!stopped.ok()) return stopped.status();
    v1::ListOperationsResponse list = node_.reads().list_operations(*stopped);
    sort(list);
    return list;
  }
  Result<v1::GetStatisticsResponse> statistics() override { return node_.reads().statistics(); }
  Result<v1::GetWaitsResponse> waits(const WaitsWanted& wanted) override {
    using Groups = std::vector<WaitingGroup>;
    auto groups = flat(ask<Result<Groups>>(node_.loop(), [this, wanted]() -> Result<Groups> {
      if (wanted.group.empty()) return node_.reads().waiting_groups({});
      Result<const membership::Group*> group = node_.commands().find_group(wanted.group);
      return group.ok() ? Result<Groups>(node_.reads().waiting_groups((*group)->id)) : group.status();
    }));
    if (!groups.ok()) return groups.status();
    v1::GetWaitsResponse message = message_of(*groups, wanted);
    if (wanted.in_progress) {
      Result<v1::ListOperationsResponse> list = operations();
      if (!list.ok()) return list.status();
      add_in_progress(message, *list, wanted);
    }
    return message;
  }
  Result<EventBatch> events(std::uint64_t after, std::size_t limit, std::uint32_t wait_ms) override {
    return events_.read(after, limit, wait_ms);
  }
  Result<v1::GetOperationResponse> operation(std::uint64_t session_id, std::uint64_t ticket) override {
    return flat(ask<Result<v1::GetOperationResponse>>(
        node_.loop(), [this, session_id, ticket] { return node_.reads().explain(session_id, ticket); }));
  }
  Result<v1::GetConfigResponse> config() override {
    auto entries = on_loop(&ControlReads::config_entries);
    return entries.ok() ? Result<v1::GetConfigResponse>(message_of(std::move(entries).value()))
                        : entries.status();
  }
  Status authorize(const Operator& by, Right wanted, const std::string& what) override {
    return node_.commands().authorize(by, wanted, what);
  }
  Status drain(const Operator& by, std::uint32_t timeout_ms) override {
    constexpr std::uint32_t kMaxDrainMs = 86'400'000;  // as timeouts.drain_ms
    if (timeout_ms > kMaxDrainMs) {
      return invalid_argument("timeout_ms is " + std::to_string(timeout_ms) + "; allowed: 0.." +
                              std::to_string(kMaxDrainMs) + " (0: as configured)");
    }
    return act(by, [this, by, timeout_ms] {
      node_.lifecycle().drain(by, timeout_ms);
      return Status();
    });
  }
  Result<v1::ReloadConfigResponse> reload(const Operator& by) override {
    return flat(ask<Result<v1::ReloadConfigResponse>>(
        node_.loop(),
        [this, by]() -> Result<v1::ReloadConfigResponse> {
          auto changes = node_.lifecycle().reload(by);
          if (!changes.ok()) return changes.status();
          v1::ReloadConfigResponse response;
          response.set_generation(node_.reads().daemon_status().config_generation());
          *response.mutable_changes() = messages_of(*changes);
          return response;
        },
        by.has_gone));
  }
  Result<v1::SetOptionsResponse> set_options(const Operator& by, const OptionSettings& options) override {
    return flat(ask<Result<v1::SetOptionsResponse>>(
        node_.loop(),
        [this, by, options]() -> Result<v1::SetOptionsResponse> {
          auto changes = node_.lifecycle().set_options(by, options);
          if (!changes.ok()) return changes.status();
          v1::SetOptionsResponse response;
          *response.mutable_changes() = messages_of(*changes);
          return response;
        },
        by.has_gone));
  }
  Status set_device(const Operator& by, const std::string& device,
                    std::optional<std::uint32_t> sms) override {
    return act(by, [this, by, device, sms] { return node_.commands().set_device(by, device, sms); });
  }
  Result<v1::SetGroupResponse> set_group(const Operator& by, const std::string& group,
                                         const GroupSettingsChange& change) override {
    return change_group<v1::SetGroupResponse>(
        by, [this, by, group, change] { return node_.commands().set_group(by, group, change); });
  }
  Status evict_session(const Operator& by, std::uint64_t session_id, const std::string& reason) override {
    return act(by, [this, by, session_id, reason] {
      return node_.commands().evict_session(by, session_id, reason);
    });
  }
  Result<v1::EvictRankResponse> evict_rank(const Operator& by, const std::string& group, std::uint32_t rank,
                                           const std::string& reason) override {
    return change_group<v1::EvictRankResponse>(
        by, [this, by, group, rank, reason] { return node_.commands().evict_rank(by, group, rank, reason); });
  }
  Status restart_device(const Operator& by, const std::string& device) override {
    return act(by, [this, by, device] { return node_.commands().restart_device(by, device); });
  }

 private:
  template <typename T>
  Result<T> on_loop(T (ControlReads::*read)() const) {
    return ask<T>(node_.loop(), [this, read] { return (node_.reads().*read)(); });
  }

  // The answer names the group that was meant.
  template <typename Response>
  Result<Response> change_group(const Operator& by, std::function<Result<membership::GroupLabel>()> change) {
    auto label = flat(ask<Result<membership::GroupLabel>>(node_.loop(), std::move(change), by.has_gone));
    if (!label.ok()) return label.status();
    Response response;
    response.set_group_id(label->id);
    response.set_name(label->name);
    return response;
  }

  Status act(const Operator& by, std::function<Status()> action) {
    const Result<Done> done = ask<Done>(
        node_.loop(), [action = std::move(action)] { return Done{action()}; }, by.has_gone);
    return done.ok() ? done.value().status : done.status();
  }

  Node& node_;
  EventLog& events_;
};

// The first line of the log.
void tell_start(const SupervisorOptions& options, const DeviceList& devices) {
  const bool has_file = ::access(options.sources.path.c_str(), F_OK) == 0;
  log_event(LogLevel::kInfo, "epd starts",
            {{"version", build_info().version},
             {"commit", build_info().commit},
             {"pid", ::getpid()},
             {"config", has_file ? options.sources.path : "defaults: there is no " + options.sources.path},
             {"devices", devices.text()}});
  devices.tell();
}

class SupervisorImpl final : public Supervisor {
 public:
  SupervisorImpl() { event_log_.install(); }
  Status start(SupervisorOptions options);

  ControlFacade& control() override { return *facade_; }
  void on_serving(std::function<void(bool)> callback) override {
    node_->lifecycle().on_serving(std::move(callback));
  }
  int run() override {
    node_->run();
    return 0;
  }

 private:
  EventLog event_log_;
  MonotonicClock clock_;
  LoopClock loop_clock_{clock_};
  std::unique_ptr<Loop> loop_;
  std::unique_ptr<Node> node_;
  std::unique_ptr<Facade> facade_;
};

Status SupervisorImpl::start(SupervisorOptions options) {
  if (Status status = check_system_calls(); !status.ok()) return status;
  DaemonLife life{{}, clock_.now_ns()};
  if (::getrandom(life.boot_id.data(), life.boot_id.size(), 0) != static_cast<ssize_t>(life.boot_id.size()))
    return errno_status("getrandom");
  Result<std::unique_ptr<Loop>> loop = Loop::create(loop_clock_);
  if (!loop.ok()) return loop.status();
  loop_ = std::move(*loop);
  Result<DeviceList> devices = DeviceList::find(options.config);
  if (!devices.ok()) return devices.status();
  tell_start(options, *devices);
  node_ = std::make_unique<Node>(Node::Ground{*loop_, clock_, loop_clock_, life}, std::move(options),
                                 std::move(*devices));
  facade_ = std::make_unique<Facade>(*node_, event_log_);
  return node_->start();
}

}  // namespace

Result<std::unique_ptr<Supervisor>> Supervisor::create(SupervisorOptions options) {
  auto supervisor = std::make_unique<SupervisorImpl>();
  if (Status status = supervisor->start(std::move(options)); !status.ok()) return status;
  return Result<std::unique_ptr<Supervisor>>(std::move(supervisor));
}

}  // namespace epd::supervisor
