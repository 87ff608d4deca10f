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

 private:
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
