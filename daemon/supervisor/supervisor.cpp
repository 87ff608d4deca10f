#include "supervisor/supervisor.h"

#include "node.h"

#include <chrono>
#include <future>

namespace epd {
namespace {

constexpr std::chrono::seconds kAnswerTime{2};

// Asks the loop and waits. What the loop fills is shared, so that giving up early is safe.
template <typename T>
Result<T> ask(Loop& loop, std::function<T()> question) {
  auto answer = std::make_shared<std::promise<T>>();
  std::future<T> future = answer->get_future();
  const bool posted = loop.post([answer, question = std::move(question)] { answer->set_value(question()); });
  answer.reset();
  if (!posted) return Status(StatusCode::kAborted, "the daemon is stopping");
  if (future.wait_for(kAnswerTime) != std::future_status::ready) {
    return Status(StatusCode::kDeadlineExceeded, "the supervisor's loop has not answered within " +
                                                     std::to_string(kAnswerTime.count()) + " s");
  }
  try {
    return future.get();
  } catch (const std::future_error&) {  // the loop stopped before it came to the question
    return Status(StatusCode::kAborted, "the daemon is stopping");
  }
}

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
  Status drain(std::uint32_t timeout_ms) override {
    return ask<bool>(node_.loop(),
                     [this, timeout_ms] {
                       node_.drain(timeout_ms);
                       return true;
                     })
        .status();
  }
  Status set_device(const std::string& device, std::uint32_t sms) override {
    return act([this, device, sms] { return node_.set_device(device, sms); });
  }
  Status set_group(const std::string& group, const GroupSettingsChange& change) override {
    return act([this, group, change] { return node_.set_group(group, change); });
  }
  Status evict_session(std::uint64_t session_id, const std::string& reason) override {
    return act([this, session_id, reason] { return node_.evict_session(session_id, reason); });
  }
  Status evict_rank(const std::string& group, std::uint32_t rank, const std::string& reason) override {
    return act([this, group, rank, reason] { return node_.evict_rank(group, rank, reason); });
  }

 private:
  Status act(std::function<Status()> action) {
    const Result<Done> done =
        ask<Done>(node_.loop(), [action = std::move(action)] { return Done{action()}; });
    return done.ok() ? done.value().status : done.status();
  }

  Node& node_;
};

class SupervisorImpl final : public Supervisor {
 public:
  SupervisorImpl(SupervisorOptions options, std::unique_ptr<Airlock> airlock)
      : node_(std::move(options), std::move(airlock)), facade_(node_) {}
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
  Result<std::unique_ptr<Airlock>> airlock = Airlock::create();
  if (!airlock.ok()) return airlock.status();
  auto supervisor = std::make_unique<SupervisorImpl>(std::move(options), std::move(*airlock));
  if (Status status = supervisor->start(); !status.ok()) return status;
  return Result<std::unique_ptr<Supervisor>>(std::move(supervisor));
}

}  // namespace epd
