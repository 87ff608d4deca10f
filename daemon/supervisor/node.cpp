#include "node.h"

#include "base/event.h"
#include "common/build_info.h"
#include "messages.h"

#include <sys/epoll.h>
#include <sys/resource.h>
#include <algorithm>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace epd::supervisor {
namespace {

std::uint64_t descriptor_limit() {
  rlimit limit{};
  return ::getrlimit(RLIMIT_NOFILE, &limit) == 0 ? limit.rlim_cur : 1024;
}

session::SessionTable::Options session_options(const DaemonLife& life, const DeviceList& devices,
                                               const session::SessionLimits& limits) {
  session::SessionTable::Options options;
  options.daemon = std::string("epd ") + build_info().version;
  options.boot_id = life.boot_id;
  for (std::uint32_t i = 0; i < devices.size(); ++i) {
    const DeviceList::Device& device = devices[i];
    options.devices.push_back({device.name.text(), device.name.kind, device.facts.uuid});
  }
  options.limits = limits;
  return options;
}

membership::NodeUp describe(const DeviceList& devices, const std::array<std::uint8_t, 16>& boot_id) {
  membership::NodeUp node;
  node.boot = hexadecimal(boot_id);
  for (const DeviceList::Device& device : devices.all())
    node.devices.push_back({device.name.text(), device.unreachable});
  return node;
}

}  // namespace

Node::Node(const Ground& ground, SupervisorOptions options, DeviceList devices)
    : options_(std::move(options)),
      life_(ground.life),
      deadlines_(ground.deadlines),
      config_(options_.config, options_.sources),
      devices_(std::move(devices)),
      descriptors_(descriptor_limit()),
      rooms_{ground.loop, ground.clock, life_, config_, devices_, sessions_, fleet_, memory_, deciders_},
      settings_(rooms_),
      orders_(rooms_, settings_),
      removals_(rooms_),
      gpu_work_(rooms_),
      maps_(rooms_, orders_),
      lifecycle_(rooms_, {orders_, settings_, gpu_work_}, options_),
      session_events_(rooms_, {orders_, removals_, gpu_work_, maps_, lifecycle_, closer_, descriptors_}),
      engine_events_(rooms_, {orders_, removals_, gpu_work_, maps_, settings_}),
      network_watch_(rooms_, {lifecycle_}),
      reads_(rooms_, {settings_, gpu_work_, lifecycle_, network_watch_, cluster_, options_.config.cluster}),
      commands_(rooms_, {orders_, settings_, gpu_work_, lifecycle_}),
      memory_(rooms_, closer_, descriptors_),
      deciders_(ground.deadlines, config_.membership_limits(), describe(devices_, life_.boot_id)),
      sessions_(session_options(life_, devices_, config_.session_limits()), ground.deadlines, session_events_,
                {closer_, descriptors_}),
      fleet_(ground.loop, ground.clock, engine_events_, config_.fleet_options(options_.engine_binary)) {}

Status Node::start() {
  if (Status status = lifecycle_.watch_signals(); !status.ok()) return status;
  Result<session::Listener> listener =
      session::Listener::open({config_->socket, config_->socket_mode, config_->socket_gid});
  if (!listener.ok()) return listener.status();
  if (Status status = sessions_.listen(std::move(*listener)); !status.ok()) return status;
  Result<Loop::WatchId> watch =
      loop().add(sessions_.poll_fd(), EPOLLIN, [this](std::uint32_t) { sessions_.process(); });
  if (!watch.ok()) return watch.status();
  if (Status status = join_cluster(); !status.ok()) return status;
  if (Status status = gpu_work_.start(); !status.ok()) return status;
  std::vector<std::string> devices;
  for (const DeviceList::Device& device : devices_.all()) devices.push_back(device.name.text());
  return fleet_.start(devices);
}

Status Node::join_cluster() {
  const std::optional<cluster::Settings>& settings = options_.config.cluster;
  if (!settings) return {};
  membership::NodeUp node = describe(devices_, life_.boot_id);
  node.name = settings->node;
  const membership::ClusterTimes times{settings->heartbeat_ms, settings->node_timeout_ms,
                                       options_.config.cluster_orphan_ms};
  membership::Agent& agent = deciders_.make_agent(times, config_.membership_limits(), node);
  const auto post = [this](std::function<void()> task) { return loop().post(std::move(task)); };
  const auto most_groups_of = [this](std::uint32_t uid) { return config_->most_groups_of(uid); };
  Result<std::unique_ptr<cluster::Cluster>> cluster = cluster::Cluster::start(
      *settings, {deadlines_, post, life_.boot_id, build_info().version, agent, config_.membership_limits(),
                  options_.config.cluster_orphan_ms, most_groups_of});
  if (!cluster.ok()) return cluster.status();
  cluster_ = std::move(*cluster);
  return {};
}

void Node::run() {
  loop().run([this] { return turn(); });
  cluster_.reset();  // its threads post to the loop
}

// Called once per turn of the loop: carries out what the events have led to, and what is due.
std::uint64_t Node::turn() {
  orders_.carry_out_all();
  sessions_.tick();
  deciders_.tick();
  removals_.tick();
  fleet_.tick();
  network_watch_.tick();
  orders_.carry_out_all();
  lifecycle_.tick();
  orders_.carry_out_all();
  const std::uint64_t cluster_due_ns = turn_of_cluster();
  LogLimiter::tell_suppressed();
  return std::min({sessions_.next_due_ns(), deciders_.next_due_ns(), fleet_.next_due_ns(),
                   removals_.next_due_ns(), lifecycle_.next_due_ns(), network_watch_.next_due_ns(),
                   cluster_due_ns});
}

std::uint64_t Node::turn_of_cluster() {
  if (cluster_ == nullptr) return std::numeric_limits<std::uint64_t>::max();
  const DaemonPhase phase = lifecycle_.phase();
  if (phase == DaemonPhase::kDraining && told_cluster_ == DaemonPhase::kServing) cluster_->drain();
  if (phase == DaemonPhase::kStopping && told_cluster_ != DaemonPhase::kStopping) {
    cluster_->tick();  // sends the leaves of its ranks first
    cluster_->leave();
  }
  if (phase != DaemonPhase::kStarting) told_cluster_ = phase;
  // Decisions of a coordinator on this node about this node's events come at once.
  do {
    cluster_->tick();
  } while (orders_.carry_out_all());
  return cluster_->next_due_ns();
}

}  // namespace epd::supervisor
