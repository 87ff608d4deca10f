#include "cluster/cluster.h"

#include "agent_side.h"
#include "base/event.h"
#include "cluster/settings.h"
#include "coordinator_side.h"
#include "frames.h"
#include "grpc.h"

#include <sys/random.h>
#include <algorithm>
#include <chrono>
#include <utility>

namespace epd::cluster {
namespace {

std::uint64_t seconds_of_wall_clock() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return static_cast<std::uint64_t>(
      std::max<std::int64_t>(1, std::chrono::duration_cast<std::chrono::seconds>(now).count()));
}

// From the kernel. It never fails for so few bytes once the machine is up.
std::uint64_t random_number() {
  std::uint64_t number = 0;
  EPD_CHECK(::getrandom(&number, sizeof(number), 0) == sizeof(number));
  return number;
}

class ClusterImpl final : public Cluster {
 public:
  ClusterImpl(const Settings& settings, Ground ground) : settings_(settings), ground_(std::move(ground)) {}
  Status start();

  void drain() override { side_->drain(); }
  void leave() override { side_->leave(); }
  void tick() override { side_->tick(); }
  std::uint64_t next_due_ns() const override { return side_->next_due_ns(); }
  View view() const override {
    View view = side_->view();
    if (good_files_ != nullptr) view.certificate_expires_unix_s = good_files_->expires_unix_s();
    return view;
  }
  std::vector<SpanningGroup> spanning_groups() const override { return side_->spanning_groups(); }
  const Settings& settings() const override { return settings_; }

 private:
  std::unique_ptr<Side> make_side();
  void say() const;

  const Settings settings_;
  const Ground ground_;
  Refusals refusals_;
  std::unique_ptr<GoodFiles> good_files_;  // null with cluster.insecure
  Credentials credentials_;
  std::unique_ptr<Side> side_;
  std::unique_ptr<Dialer> dialer_;
  std::unique_ptr<Server> server_;
};

std::unique_ptr<Side> ClusterImpl::make_side() {
  Self self{settings_, ground_.clock, refusals_, {}, ground_.agent};
  self.description.set_name(settings_.node);
  self.description.set_boot_id(std::string(ground_.boot_id.begin(), ground_.boot_id.end()));
  self.description.set_address(settings_.advertise);
  self.description.set_listen(settings_.listen);
  self.description.set_daemon_version(ground_.version);
  if (!settings_.coordinates())
    return std::make_unique<AgentSide>(std::move(self), [this] { return dialer_->dial(); });
  CoordinatorSide::Options options{ground_.limits, ground_.orphan_ms,     seconds_of_wall_clock(),
                                   random_number,  seconds_of_wall_clock, ground_.most_groups_of};
  return std::make_unique<CoordinatorSide>(
      std::move(self), std::move(options),
      [this](const SocketAddress& address, std::function<void(bool)> answer) {
        server_->door().probe(address, [post = ground_.post, answer = std::move(answer)](bool refused) {
          post([answer, refused] { answer(refused); });
        });
      });
}

Status ClusterImpl::start() {
  say();
  if (!settings_.insecure) {
    Result<std::unique_ptr<GoodFiles>> files = GoodFiles::open(settings_);
    if (!files.ok()) return files.status();
    good_files_ = std::move(*files);
    if (Status status = good_files_->begin(); !status.ok()) return status;
  }
  credentials_ = make_credentials(good_files_.get());
  side_ = make_side();
  if (!settings_.coordinates())
    dialer_ = std::make_unique<Dialer>(settings_.coordinator, credentials_, ground_.post, *side_);
  Server::Callbacks callbacks;
  callbacks.post = ground_.post;
  callbacks.opened = [this](std::shared_ptr<Stream> stream) { side_->on_opened(std::move(stream)); };
  callbacks.events = side_.get();
  Result<std::unique_ptr<Server>> server =
      Server::start(settings_, credentials_, std::move(callbacks), refusals_);
  if (!server.ok()) return server.status();
  server_ = std::move(*server);
  return {};
}

void ClusterImpl::say() const {
  log_event(LogLevel::kInfo, "cluster",
            {{"name", settings_.name},
             {"node", settings_.node},
             {"listen", settings_.listen},
             {"coordinator", settings_.coordinates() ? "this node" : settings_.coordinator}});
  if (settings_.insecure) {
    record_event(EventKind::kOther, LogLevel::kWarning, "cluster is insecure",
                 {{"reason", "cluster.insecure = true: plain text, and nobody is authenticated"}});
  }
}

}  // namespace

Result<std::unique_ptr<Cluster>> Cluster::start(const Settings& settings, Ground ground) {
  auto cluster = std::make_unique<ClusterImpl>(settings, std::move(ground));
  if (Status status = cluster->start(); !status.ok()) return status;
  return std::unique_ptr<Cluster>(std::move(cluster));
}

}  // namespace epd::cluster
