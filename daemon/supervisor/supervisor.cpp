#include "supervisor/supervisor.h"

#include "ask.h"
#include "node.h"

namespace epd {
namespace {

// Of what the loop was asked to do; wrapped, because a Result<Status> would be two things at once.
struct Done {
  Status status;
};

template <typename T>
Result<T> flat(Result<Result<T>> answer) {
  return answer.ok() ? std::move(answer).value() : Result<T>(answer.status());
}

class Facade final : public ControlFacade {
 public:
  explicit Facade(Node& node) : node_(node) {}

  Result<DaemonView> daemon() override {
    return ask<DaemonView>(node_.loop(), [this] { return node_.daemon_view(); });
  }
  Result<std::vector<DeviceView>> devices() override {
    return ask<std::vector<DeviceView>>(node_.loop(), [this] { return node_.device_views(); });
  }
  Result<std::vector<SessionView>> sessions() override {
    return ask<std::vector<SessionView>>(node_.loop(), [this] { return node_.session_views(); });
  }
  Result<std::vector<GroupView>> groups() override {
    return ask<std::vector<GroupView>>(node_.loop(), [this] { return node_.group_views(); });
  }
  Result<std::vector<OperationView>> operations() override { return node_.operation_views(); }
  Result<AllStatisticsView> statistics() override { return node_.statistics_view(); }
  Result<EventBatch> events(std::uint64_t after, std::size_t limit, std::uint32_t wait_ms) override {
    return node_.event_log().read(after, limit, wait_ms);
  }
  Result<OperationDetail> operation(std::uint64_t session_id, std::uint64_t ticket) override {
    return flat(ask<Result<OperationDetail>>(
        node_.loop(), [this, session_id, ticket] { return node_.operation_detail(session_id, ticket); }));
  }
  Result<std::vector<ConfigEntry>> config() override {
    return ask<std::vector<ConfigEntry>>(node_.loop(), [this] { return node_.config_view(); });
  }
  Status authorize(const Operator& by, Right wanted, const std::string& what) override {
    return node_.authorize(by, wanted, what);
  }
  Status drain(const Operator& by, std::uint32_t timeout_ms) override {
    constexpr std::uint32_t kMaxDrainMs = 86'400'000;  // as timeouts.drain_ms
    if (timeout_ms > kMaxDrainMs) {
      return invalid_argument("timeout_ms is " + std::to_string(timeout_ms) + "; allowed: 0.." +
                              std::to_string(kMaxDrainMs) + " (0: as configured)");
    }
    return act(by, [this, by, timeout_ms] {
      node_.drain(by, timeout_ms);
      return Status();
    });
  }
  Status set_device(const Operator& by, const std::string& device, std::uint32_t sms) override {
    return act(by, [this, by, device, sms] { return node_.set_device(by, device, sms); });
  }
  Status set_group(const Operator& by, const std::string& group, const GroupSettingsChange& change) override {
    return act(by, [this, by, group, change] { return node_.set_group(by, group, change); });
  }
  Status evict_session(const Operator& by, std::uint64_t session_id, const std::string& reason) override {
    return act(by, [this, by, session_id, reason] { return node_.evict_session(by, session_id, reason); });
  }
  Status evict_rank(const Operator& by, const std::string& group, std::uint32_t rank,
                    const std::string& reason) override {
    return act(by, [this, by, group, rank, reason] { return node_.evict_rank(by, group, rank, reason); });
  }
  Status restart_device(const Operator& by, const std::string& device) override {
    return act(by, [this, by, device] { return node_.restart_device(by, device); });
  }

 private:
  Status act(const Operator& by, std::function<Status()> action) {
    const Result<Done> done = ask<Done>(
        node_.loop(), [action = std::move(action)] { return Done{action()}; }, by.has_gone);
    return done.ok() ? done.value().status : done.status();
  }

  Node& node_;
};

class SupervisorImpl final : public Supervisor {
 public:
  explicit SupervisorImpl(SupervisorOptions options) : node_(std::move(options)), facade_(node_) {}
  Status start() { return node_.start(); }

  ControlFacade& control() override { return facade_; }
  void on_serving(std::function<void(bool)> callback) override { node_.on_serving(std::move(callback)); }
  int run() override { return node_.run(); }

 private:
  Node node_;
  Facade facade_;
};

}  // namespace

Result<std::unique_ptr<Supervisor>> Supervisor::create(SupervisorOptions options) {
  auto supervisor = std::make_unique<SupervisorImpl>(std::move(options));
  if (Status status = supervisor->start(); !status.ok()) return status;
  return Result<std::unique_ptr<Supervisor>>(std::move(supervisor));
}

}  // namespace epd
