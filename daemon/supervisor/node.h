// The supervisor's state: everything below runs on its loop.
#pragma once

#include "arena_store.h"
#include "base/closer.h"
#include "base/descriptors.h"
#include "base/event.h"
#include "device_choice.h"
#include "fleet.h"
#include "loop.h"
#include "membership/registry.h"
#include "mps.h"
#include "notify.h"
#include "session/session_table.h"
#include "supervisor/supervisor.h"

#include <array>
#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace epd {

namespace v1 {
class CudaDevice;
class Operation;
class Wait;
}  // namespace v1

// Connects the rooms: sessions and engines report events, the registry decides, and what it wants
// done is done here. Split over node.cpp (sessions, engines), group_messages.cpp (the registry's actions),
// lifecycle.cpp (signals, drain, reload, notification), operator.cpp (set, evict), gpus.cpp (GPUs and MPS)
// and what the control plane sees: control_reads.cpp, explain.cpp (one operation).
class Node final : public SessionHost, public FleetHost, public membership::MemberMemory {
 public:
  explicit Node(SupervisorOptions options);
  Status start();
  int run();

  Loop& loop() { return *loop_; }
  void on_serving(std::function<void(bool)> callback) { on_serving_ = std::move(callback); }
  void drain(const Operator& by, std::uint32_t timeout_ms);  // 0: the configured one; again: no change

  // control_reads.cpp
  v1::DaemonStatus daemon_status() const;
  v1::ListDevicesResponse list_devices() const;
  v1::ListSessionsResponse list_sessions() const;
  v1::ListGroupsResponse list_groups() const;
  std::vector<ConfigEntry> config_entries() const { return config_.entries; }
  // From any thread: these read only the engines' pages. Operations are not sorted yet.
  v1::ListOperationsResponse list_operations() const;
  v1::GetStatisticsResponse statistics() const;
  EventLog& event_log() { return event_log_; }

  // explain.cpp
  Result<v1::GetOperationResponse> explain(std::uint64_t session_id, std::uint64_t ticket) const;

  // operator.cpp; see ControlFacade
  Status authorize(const Operator& by, Right wanted, const std::string& what);  // from any thread
  Status set_device(const Operator& by, const std::string& name, std::uint32_t sms);
  Status set_group(const Operator& by, const std::string& name, const GroupSettingsChange& change);
  Status evict_session(const Operator& by, std::uint64_t session_id, const std::string& reason);
  Status evict_rank(const Operator& by, const std::string& name, std::uint32_t rank,
                    const std::string& reason);
  Status restart_device(const Operator& by, const std::string& name);

 private:
  enum class Phase { kStarting, kServing, kDraining, kStopping };

  // SessionHost
  Status may_attach(const PeerIdentity& peer) override;
  Status may_use_device(const PeerIdentity& peer, std::uint32_t device) override;
  Quota max_sessions_of(const PeerIdentity& peer) override;
  std::uint64_t ending_sessions(std::uint32_t uid) const override;
  int engine_bell(std::uint32_t device) const override { return fleet_->bell_fd(device); }
  void session_opened(const Session& session) override;
  void session_closed(Session session, const std::string& how) override;
  void join_requested(const Session& session, std::uint32_t request_id, const abi::Join& join,
                      std::vector<UniqueFd> memory) override;
  void leave_requested(const Session& session, std::uint32_t request_id, const abi::Leave& leave) override;

  // FleetHost
  void engine_ready(std::uint32_t device) override;
  void engine_message(std::uint32_t device, const Packet& packet) override;
  void engine_down(std::uint32_t device, const std::string& text, bool device_failed) override;
  void engine_waits(std::uint32_t device) override;
  void before_kill(std::uint32_t device, std::function<void()> then) override;
  void engine_failed(std::uint32_t device, const std::string& text) override;

  // MemberMemory
  Status check_reach(std::uint32_t device, std::uint32_t other) const override;
  Status check_commands(std::uint32_t device) const override;
  Status acquire(const membership::MemoryOwner& owner, const UserQuotas& quotas, const abi::GroupShape& shape,
                 const abi::Bindings& bindings, const membership::ClientMemory& memory) override;
  void release(std::uint64_t group_id, std::uint32_t rank) override;
  std::uint64_t next_index(std::uint64_t group_id, std::uint32_t rank) override;
  void close_streams_later(std::uint32_t device, std::uint64_t group_id, std::uint32_t rank) override;
  void mark_lost(std::uint64_t group_id, std::uint32_t rank, const std::string& text, StatusCode cause,
                 std::int32_t culprit_rank) override;

  struct NodeDevice : ServedDevice {
    std::vector<std::uint32_t> unreachable;  // indices
  };

  // What is told to an engine outside of carry_out(): after everything that the registry has decided before.
  template <typename T>
  void send(std::uint32_t device, abi::LinkType type, const T& body, const FdList& fds = {}) {
    carry_out_actions();
    fleet_->send(device, type, body, fds);
  }

  // node.cpp
  std::uint64_t turn();
  Status keep_memory(std::uint32_t uid, std::vector<UniqueFd> memory, membership::ClientMemory& out);
  void tell_session(const Session& session);
  void session_failed(const abi::SessionFailed& message);
  void check_removals();
  Status admitting() const;
  void apply_limits();
  EngineFleet::Options fleet_options() const;
  abi::Settings settings(std::uint32_t device) const;

  // gpus.cpp
  Status find_devices();
  Status find_unreachable();
  Status start_mps_control();
  void probe_mps_control();
  std::vector<pid_t> engine_pids() const;
  void terminate_work(std::uint32_t device, pid_t pid, int pidfd,
                      std::shared_ptr<const std::atomic<bool>> left, std::function<void()> then);
  void expel(const Session& session, const Status& status);
  void stop_expelling(std::uint64_t session_id);
  void end_dying_sessions(std::uint32_t device);

  // control_reads.cpp
  void fill_cuda(v1::CudaDevice& message, const NodeDevice& device) const;

  // explain.cpp
  v1::Wait wait_of(const membership::Group& group, std::uint32_t rank, const v1::Operation* its) const;
  std::string silent_engines(const membership::Group& group) const;
  Status no_such_operation(std::uint64_t session_id, std::uint64_t ticket) const;

  // operator.cpp
  Result<std::uint32_t> find_device(const std::string& name) const;
  Result<std::uint64_t> find_group(const std::string& name) const;
  abi::GroupSettings group_settings(const membership::Group& group, std::uint32_t device) const;
  void record_losses(std::uint64_t session_id, std::optional<std::uint32_t> member_id,
                     const std::string& how) const;

  // group_messages.cpp
  void carry_out_actions();
  void carry_out(const membership::StartGroup& action);
  void carry_out(const membership::SendRank& action);
  void carry_out(const membership::SendMember& action);
  void carry_out(const membership::SendStopMember& action);
  void carry_out(const membership::SendBreak& action);
  void carry_out(const membership::SendRelease& action);
  void carry_out(const membership::SendResume& action);
  void carry_out(const membership::SendRemoveGroup& action);
  void carry_out(const membership::CloseStreams& action);
  void carry_out(const membership::KillEngine& action);
  void carry_out(const membership::ReplyJoined& action);
  void carry_out(const membership::ReplyLeft& action);
  void carry_out(const membership::ReplyRefused& action);
  void carry_out(const membership::WakeSession& action);

  void send_rank(std::uint32_t device, const membership::Group& group, std::uint32_t rank,
                 std::uint64_t active_since);
  void send_member(const membership::Group& group, const membership::Member& member);

  // lifecycle.cpp
  Status watch_signals();
  void on_signal();
  void advance_phase();
  void begin_stopping();
  void reload(const Operator& by);
  void publish_access();
  void notify_status(const std::string& prefix);
  std::uint64_t next_lifecycle_due_ns() const;

  EventLog event_log_;
  const SupervisorOptions options_;
  Config config_;
  std::mutex access_mutex_;
  std::shared_ptr<const AccessPolicy> access_;  // config_.access, for other threads; guarded by access_mutex_
  MonotonicClock clock_;                        // for what people, engines and systemd are told
  LoopClock loop_clock_{clock_};                // for deadlines
  std::array<std::uint8_t, 16> boot_id_{};
  std::uint64_t started_ns_ = 0;
  std::unique_ptr<Loop> loop_;
  ServiceNotifier notifier_;
  std::vector<NodeDevice> devices_;  // by index
  DescriptorBudget descriptors_;
  Closer closer_;
  ArenaStore arenas_;
  membership::GroupRegistry registry_;
  std::unique_ptr<SessionTable> sessions_;
  std::unique_ptr<EngineFleet> fleet_;
  std::unique_ptr<MpsControl> mps_;  // null: nobody to ask
  std::string mps_error_;
  // Sessions whose clients' work MPS is asked to terminate; set when they end before it has.
  std::map<std::uint64_t, std::shared_ptr<std::atomic<bool>>> expelled_;
  UniqueFd signals_;

  // Per device: sessions whose kRemoveSession is unanswered. They count as sessions: what the engine was to
  // be told of them may still wait in its link, with descriptors.
  struct Removal {
    std::uint64_t due_ns;  // when patience ends
    std::uint32_t uid;
    DescriptorShare descriptors;
  };
  std::vector<std::map<std::uint64_t, Removal>> removals_;

  // Per device: streams for its next engine to close.
  struct OpenStreams {
    abi::CloseStreams message;
    UniqueFd user;
  };
  std::vector<std::vector<OpenStreams>> open_streams_;

  // Set by the operator, and stronger than configuration and joins.
  std::vector<std::optional<std::uint32_t>> device_sms_;         // by device
  std::map<std::uint64_t, GroupSettingsChange> group_settings_;  // by group

  bool carrying_out_ = false;

  // What was logged last.
  std::tuple<std::uint64_t, std::uint64_t, std::uint32_t> last_break_;  // group, epoch, fatal
  std::pair<std::uint64_t, std::uint64_t> last_resume_;                 // group, epoch

  Phase phase_ = Phase::kStarting;
  std::function<void(bool)> on_serving_;
  std::uint64_t drain_due_ns_ = 0;
  std::uint64_t next_ping_ns_ = 0;
  std::string last_status_;
  std::uint64_t config_generation_ = 1;
  std::string last_reload_error_;
};

}  // namespace epd
