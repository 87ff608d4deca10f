// The engines of all devices: started, watched, killed when they hang, restarted with back-off.
// Knows nothing of sessions and groups.
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

// kStopped: ready, but its engine stands still: stopped by a signal or a debugger, or hung. In the order of
// control.proto.
enum class DeviceState { kStarting, kReady, kRestarting, kFailed, kStopped };

// What the fleet tells its owner. None of these may call back into stop or destroy the fleet.
class FleetHost {
 public:
  virtual ~FleetHost() = default;
  // kReady has come; the engine knows nothing yet.
  virtual void engine_ready(std::uint32_t device) = 0;
  virtual void engine_message(std::uint32_t device, const Packet& packet) = 0;
  // It is dead, or is about to be and does nothing any more; everything it had sent has been delivered.
  // `text` says how, for clients to read. `device_failed`: because the device has.
  virtual void engine_down(std::uint32_t device, const std::string& text, bool device_failed) = 0;
  // The device takes no new process yet. Said now and then.
  virtual void engine_waits(std::uint32_t device) = 0;
  // It serves, and is about to be killed. `then` does that, if it is still there: to be called once, now or
  // soon.
  virtual void before_kill(std::uint32_t device, std::function<void()> then) = 0;
  // After engine_down: it will not be started again.
  virtual void engine_failed(std::uint32_t device, const std::string& text) = 0;
};

class EngineFleet {
 public:
  struct Options {
    std::string binary;
    LogLevel log_level = LogLevel::kInfo;
    LogFormat log_format = LogFormat::kLogfmt;
    std::uint32_t watchdog_ms = 10'000;
    std::uint32_t backoff_min_ms = 10;
    std::uint32_t backoff_max_ms = 5'000;
    std::uint32_t max_restarts_per_minute = 10;
    transport::NetworkOptions network;
  };
  struct DeviceToServe {
    std::string name;
    device::LaunchMode mode = device::LaunchMode::kLaunched;
  };

  // `clock`: the one that engines write their heartbeats by. Deadlines go by the loop's.
  EngineFleet(Loop& loop, const Clock& clock, FleetHost& host, Options options)
      : loop_(loop), clock_(clock), host_(host), options_(std::move(options)) {}
  ~EngineFleet();

  // Makes the pages and bells and starts every engine.
  Status start(const std::vector<DeviceToServe>& devices);
  void set_options(Options options) { options_ = std::move(options); }

  // Nothing happens if the engine is down.
  template <typename T>
  void send(std::uint32_t device, abi::LinkType type, const T& body, const FdList& fds = {}) {
    if (is_ready(device)) after_send(device, devices_[device].process->send(type, body, fds));
  }
  void kill(std::uint32_t device, const std::string& why);
  // For an engine that does not answer. One that somebody has stopped (SIGSTOP, a debugger) can't: it is left
  // alone, which is logged once for each time, and has a second to answer when it goes on.
  void kill_unless_stopped(std::uint32_t device, const std::string& why);

  // Starts the engine anew, whatever state it is in; the deaths so far are forgotten.
  void restart(std::uint32_t device, const std::string& why);

  void tick();
  std::uint64_t next_due_ns() const;

  // kStop to all; SIGKILL to those that are still there after `grace_ms`. No restarts from now on.
  void stop(std::uint32_t grace_ms);
  bool all_stopped() const;

  std::uint32_t size() const { return static_cast<std::uint32_t>(devices_.size()); }
  const std::string& name(std::uint32_t device) const { return devices_[device].name; }
  // By which engines of other nodes reach its engine; "": they don't.
  const std::string& far_address(std::uint32_t device) const { return devices_[device].far_address; }
  DeviceState state(std::uint32_t device) const { return devices_[device].state; }
  bool is_ready(std::uint32_t device) const { return devices_[device].state == DeviceState::kReady; }
  bool all_settled() const;  // each ready or failed
  // Of messages that wait for room in links.
  std::uint64_t queued_descriptors() const;
  int page_fd(std::uint32_t device) const { return devices_[device].page_fd.get(); }
  int bell_fd(std::uint32_t device) const { return devices_[device].bell.get(); }
  // Valid, at the same address, from start() to the fleet's end; may be read from any thread.
  const abi::EnginePage& page(std::uint32_t device) const {
    return *devices_[device].page.as<abi::EnginePage>();
  }
  // kStopped in place of kReady if the engine stood still when it was last looked at. Costs nothing.
  DeviceState seen_state(std::uint32_t device) const;
  // The same, after another look at its process.
  DeviceState state_now(std::uint32_t device) const;
  std::int32_t engine_pid(std::uint32_t device) const;  // 0: there is none
  std::uint32_t restarts(std::uint32_t device) const { return devices_[device].restarts; }
  // "signal 9", "exit 1", "" if never.
  const std::string& last_exit(std::uint32_t device) const { return devices_[device].last_exit; }
  std::uint64_t heartbeat_age_ms(std::uint32_t device) const;
  const EngineProcess* process(std::uint32_t device) const {
    return devices_[device].process.get();
  }                                                                                       // or null
  std::uint32_t max_sms(std::uint32_t device) const { return devices_[device].max_sms; }  // 0: not known yet
  // Whether every engine that should run has moved since the last call.
  bool all_loops_advanced();

 private:
  struct Device {
    std::string name;
    device::LaunchMode mode = device::LaunchMode::kLaunched;
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
    std::string kill_reason;  // why we killed it, until it is dead
    bool down_told = false;   // by its last word, before it is dead
    std::uint64_t started_ns = 0;
    std::uint64_t ready_ns = 0;
    std::uint64_t start_at_ns = 0;  // when down: the next start; 0 = none
    std::uint64_t say_busy_ns = 0;  // when to say again that the GPU takes nobody
    std::uint64_t kill_at_ns = 0;   // it has closed its link: patience until then
    std::uint64_t reap_at_ns = 0;   // it has ended, but for threads on their way out: to be looked at again
    std::uint64_t backoff_ms = 0;
    std::deque<std::uint64_t> deaths;  // of the last minute
    std::uint64_t beat = 0;            // its heartbeat when it was last looked at; 0 = it is not ready
    std::uint64_t beat_since_ns = 0;   // and since when it has been that
    bool looked_stopped = false;
    std::uint64_t spared_until_ns = 0;  // it goes on after a stop: time to answer what it owes
    std::uint64_t loops_seen = 0;
  };

  void stop_watching(Loop::WatchId& watch, int fd);
  Status make_device(const DeviceToServe& served);
  void spawn(std::uint32_t device);
  void on_link(std::uint32_t device, std::uint32_t events);
  void read_link(std::uint32_t device);
  void on_device_failed(std::uint32_t device);
  void on_exit(std::uint32_t device);
  void try_again(std::uint32_t device);
  void start_later(std::uint32_t device, const Status& status);
  void schedule_restart(std::uint32_t device);
  void after_send(std::uint32_t device, const Status& status);
  void check_alive(std::uint32_t device);
  bool is_stopped(std::uint32_t device, const std::string& noticed_by);
  void clear_page(Device& device) const;
  std::uint64_t check_period_ns() const;
  // When the engine last showed that it turns; 0: it never has.
  std::uint64_t last_sign_ns(std::uint32_t device) const;

  Loop& loop_;
  const Clock& clock_;
  FleetHost& host_;
  Options options_;
  std::vector<Device> devices_;
  std::uint64_t next_check_ns_ = 0;
  std::uint64_t kill_all_ns_ = 0;  // stopping: when patience ends
  bool stopping_ = false;
};

}  // namespace epd::supervisor
