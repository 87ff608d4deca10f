// The engines of all devices: starts them, watches them, kills those that hang, and restarts them with
// growing pauses. Knows nothing of sessions and groups.
#pragma once

#include "common/memory.h"
#include "engine_process.h"
#include "loop.h"

#include <deque>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace epd::supervisor {

// kStopped: it was ready, but its engine stands still: stopped by a signal or a debugger, or hung. The order
// is that of control.proto.
enum class DeviceState { kStarting, kReady, kRestarting, kFailed, kStopped };

// kPlanned: the daemon ended it, for an operator or for a new network, and starts another one at once.
// kOutOfMemory: the kernel's OOM killer ended it.
enum class EngineEnd { kDied, kDeviceFailed, kPlanned, kOutOfMemory };

// What the fleet tells its owner. None of these functions may call stop() or destroy the fleet.
class FleetHost {
 public:
  virtual ~FleetHost() = default;
  // kReady has come. The engine has not been told anything yet.
  virtual void engine_ready(std::uint32_t device) = 0;
  virtual void engine_message(std::uint32_t device, const Packet& packet) = 0;
  // The engine is dead, or is about to die and does nothing any more. Everything that it had sent has been
  // delivered. `text` says how it ended, for clients to read.
  virtual void engine_down(std::uint32_t device, const std::string& text, EngineEnd end) = 0;
  // The device accepts no new process yet. Called now and then.
  virtual void engine_waits(std::uint32_t device) = 0;
  // The engine is ready and is about to be killed. `then` kills it, if it still runs. To be called once, now
  // or soon.
  virtual void before_kill(std::uint32_t device, std::function<void()> then) = 0;
  // Called after engine_down: the engine will not be started again.
  virtual void engine_failed(std::uint32_t device, const std::string& text) = 0;
};

class EngineFleet {
 public:
  struct Options {
    std::string binary;
    LogLevels log_levels;
    LogFormat log_format = LogFormat::kLogfmt;
    std::uint32_t watchdog_ms = 10'000;
    std::uint32_t backoff_min_ms = 10;
    std::uint32_t backoff_max_ms = 5'000;
    std::uint32_t max_restarts_per_minute = 10;
    transport::NetworkOptions network;
  };

  // `clock` is the one by which engines write their heartbeats. Deadlines use the loop's clock.
  EngineFleet(Loop& loop, const Clock& clock, FleetHost& host, Options options)
      : loop_(loop), clock_(clock), host_(host), options_(std::move(options)) {}
  ~EngineFleet();

  // Makes the pages and bells, and starts every engine.
  Status start(const std::vector<std::string>& devices);
  void set_options(Options options) { options_ = std::move(options); }
  void set_network(transport::NetworkOptions network) { options_.network = std::move(network); }

  // Does nothing if the engine is down.
  template <typename T>
  void send(std::uint32_t device, abi::LinkType type, const T& body, const FdList& fds = {}) {
    if (is_ready(device)) after_send(device, devices_[device].process->send(type, body, fds));
  }
  void kill(std::uint32_t device, const std::string& why);
  // For an engine that does not answer. An engine that somebody has stopped (SIGSTOP, a debugger) can't
  // answer: it is left alone, which is logged once for each time. It has a second to answer when it
  // continues.
  void kill_unless_stopped(std::uint32_t device, const std::string& why);

  // Starts the engine again, whatever its state, as an operator wants. That is no death, and former deaths no
  // longer count.
  void restart(std::uint32_t device, const std::string& why);

  void tick();
  std::uint64_t next_due_ns() const;

  // Sends kStop to all engines, and SIGKILL to those that still run after `grace_ms`. From now on there are
  // no restarts.
  void stop(std::uint32_t grace_ms);
  bool all_stopped() const;

  std::uint32_t size() const { return static_cast<std::uint32_t>(devices_.size()); }
  const std::string& name(std::uint32_t device) const { return devices_[device].name; }
  // The address by which engines of other nodes reach the engine; "": they can't.
  const std::string& far_address(std::uint32_t device) const { return devices_[device].far_address; }
  DeviceState state(std::uint32_t device) const { return devices_[device].state; }
  bool is_ready(std::uint32_t device) const { return devices_[device].state == DeviceState::kReady; }
  bool all_settled() const;  // each is ready or failed
  // Descriptors of messages that wait for room in links.
  std::uint64_t queued_descriptors() const;
  int page_fd(std::uint32_t device) const { return devices_[device].page_fd.get(); }
  int bell_fd(std::uint32_t device) const { return devices_[device].bell.get(); }
  // Valid, at the same address, from start() until the fleet is destroyed. Any thread may read it.
  const abi::EnginePage& page(std::uint32_t device) const {
    return *devices_[device].page.as<abi::EnginePage>();
  }
  // kStopped instead of kReady if the engine stood still at the last look. Costs nothing.
  DeviceState seen_state(std::uint32_t device) const;
  // The same after another look at the process.
  DeviceState state_now(std::uint32_t device) const;
  std::int32_t engine_pid(std::uint32_t device) const;  // 0: there is no process
  std::uint32_t restarts(std::uint32_t device) const { return devices_[device].restarts; }
  // For example "signal 9" or "exit 1"; "" if there was none.
  const std::string& last_exit(std::uint32_t device) const { return devices_[device].last_exit; }
  std::uint64_t heartbeat_age_ms(std::uint32_t device) const;
  const EngineProcess* process(std::uint32_t device) const {
    return devices_[device].process.get();
  }                                                                                       // or null
  std::uint32_t max_sms(std::uint32_t device) const { return devices_[device].max_sms; }  // 0: not known yet
  // Whether every engine that should run has made a round since the last call.
  bool all_loops_advanced();

 private:
  struct Device {
    std::string name;
    UniqueFd page_fd;
    Mapping page;
    UniqueFd bell;
    DeviceState state = DeviceState::kStarting;
    std::unique_ptr<EngineProcess> process;
    Loop::WatchId link_watch = 0;
    Loop::WatchId exit_watch = 0;
    bool watching_write = false;
    std::uint32_t max_sms = 0;
    std::string far_address;
    std::uint32_t restarts = 0;
    std::string last_exit;
    std::string kill_reason;  // why it was killed, until it is dead
    bool down_told = false;   // engine_down was called before the process ended
    std::uint64_t started_ns = 0;
    std::uint64_t ready_ns = 0;
    std::uint64_t start_at_ns = 0;  // when down: time of the next start; 0 = none
    std::uint64_t say_busy_ns = 0;  // when to say again that the GPU accepts no process
    std::uint64_t kill_at_ns = 0;   // it has closed its link: when it is killed
    std::uint64_t reap_at_ns = 0;   // it has ended but for some threads: when to look again
    std::uint64_t backoff_ms = 0;
    std::deque<std::uint64_t> deaths;  // in the last minute
    bool restart_wanted = false;       // the process is ended for `restart`, which is no death
    std::uint64_t beat = 0;            // its heartbeat at the last look; 0 = it is not ready
    std::uint64_t beat_since_ns = 0;   // since when the heartbeat has been the same
    bool looked_stopped = false;
    std::uint64_t spared_until_ns = 0;  // it continues after a stop: until when it may still answer
    std::uint64_t loops_seen = 0;
  };

  void stop_watching(Loop::WatchId& watch, int fd);
  Status make_device(const std::string& name);
  void spawn(std::uint32_t device);
  void on_link(std::uint32_t device, std::uint32_t events);
  void read_link(std::uint32_t device);
  void on_device_failed(std::uint32_t device);
  void on_exit(std::uint32_t device);
  void try_again(std::uint32_t device);
  void start_later(std::uint32_t device, const Status& status);
  void schedule_restart(std::uint32_t device, EngineEnd end);
  void after_send(std::uint32_t device, const Status& status);
  void check_alive(std::uint32_t device);
  bool is_stopped(std::uint32_t device, const std::string& noticed_by);
  // Of its end, "" or words behind others.
  static std::string hint_at_cause(const Device& device, bool out_of_memory);
  // Whether the OOM killer ended it, of an engine that has just ended.
  bool is_out_of_memory(const Device& device);
  void clear_page(Device& device) const;
  std::uint64_t check_period_ns() const;
  // When the engine last showed that its loop runs; 0: never.
  std::uint64_t last_sign_ns(std::uint32_t device) const;

  Loop& loop_;
  const Clock& clock_;
  FleetHost& host_;
  Options options_;
  std::vector<Device> devices_;
  std::uint64_t next_check_ns_ = 0;
  std::uint64_t kill_all_ns_ = 0;  // while stopping: when remaining engines are killed
  bool stopping_ = false;
  std::uint64_t oom_kills_ = 0;    // as last read
  std::uint64_t oom_grew_ns_ = 0;  // when it was last seen to have grown; 0: never
};

}  // namespace epd::supervisor
