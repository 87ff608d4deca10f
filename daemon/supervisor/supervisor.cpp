#include "supervisor/supervisor.h"

#include "node.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <future>

namespace epd {
namespace {

using std::chrono::steady_clock;

constexpr std::chrono::seconds kAnswerTime{2};
constexpr std::chrono::milliseconds kLookTime{20};  // at whether the caller is still there

// A question belongs to one of two: the loop takes it, or the caller gives it up. So a caller either hears what
// came of it, or it does not happen.
enum class Claim { kOpen, kTaken, kGivenUp };

template <typename T>
struct Question {
  std::atomic<Claim> claim{Claim::kOpen};
  std::promise<T> answer;
};

bool take(std::atomic<Claim>& claim, Claim how) {
  Claim open = Claim::kOpen;
  return claim.compare_exchange_strong(open, how);
}

template <typename T>
Result<T> answer_of(std::future<T>& future) {
  try {
    return future.get();
  } catch (const std::future_error&) {  // the loop stopped before it came to the question
    return Status(StatusCode::kAborted, "the daemon is stopping");
  } catch (const std::exception& error) {
    return internal_error(std::string("the supervisor could not answer: ") + error.what());
  }
}

// True if it is ready before the time is over, and before the caller has gone.
template <typename T>
bool wait(std::future<T>& future, const std::function<bool()>& has_gone) {
  const auto due = steady_clock::now() + kAnswerTime;
  while (!has_gone || !has_gone()) {
    const auto until = has_gone ? std::min(due, steady_clock::now() + kLookTime) : due;
    if (future.wait_until(until) == std::future_status::ready) return true;
    if (until == due) return false;
  }
  return false;
}

// Asks the loop and waits. What the loop fills is shared, so that giving up early is safe.
template <typename T>
Result<T> ask(Loop& loop, std::function<T()> what, const std::function<bool()>& has_gone = {}) {
  auto question = std::make_shared<Question<T>>();
  std::future<T> future = question->answer.get_future();
  std::weak_ptr<Question<T>> asked = question;
  const bool posted = loop.post([question = std::move(question), what = std::move(what)] {
    if (!take(question->claim, Claim::kTaken)) return;
    try {
      question->answer.set_value(what());
    } catch (...) {
      question->answer.set_exception(std::current_exception());
    }
  });
  if (!posted) return Status(StatusCode::kAborted, "the daemon is stopping");
  if (wait(future, has_gone)) return answer_of(future);
  const auto open = asked.lock();
  if (open != nullptr && take(open->claim, Claim::kGivenUp)) {
    return Status(StatusCode::kDeadlineExceeded,
                  "the supervisor's loop has not answered in time (at most " +
                      std::to_string(kAnswerTime.count()) + " s); nothing was done, and nothing will be");
  }
  // The loop has it in hand, which takes it no time.
  if (future.wait_for(kAnswerTime) == std::future_status::ready) return answer_of(future);
  return Status(StatusCode::kDeadlineExceeded,
                "the supervisor's loop has begun and not ended within " +
                    std::to_string(kAnswerTime.count()) + " s; epctl events will tell what came of it");
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
  Status authorize(const Operator& by, Right wanted, const std::string& what) override {
    return node_.authorize(by, wanted, what);
  }
  Status drain(const Operator& by, std::uint32_t timeout_ms) override {
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
    const Result<Done> done =
        ask<Done>(node_.loop(), [action = std::move(action)] { return Done{action()}; }, by.has_gone);
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
