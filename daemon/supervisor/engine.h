// The engine of one device through all its lives: it is started, watched, killed when it hangs, and started
// again after growing pauses. It knows nothing of sessions and groups.
#pragma once

#include "common/memory.h"
#include "engine_process.h"
#include "loop.h"

#include <deque>
#include <functional>
#include <optional>
#include <string>
#include <variant>

namespace epd::supervisor {

// kStopped: it was ready, but its engine is stopped by a signal or a debugger, or hangs. The order is that of
// control.proto.
enum class DeviceState { kStarting, kReady, kRestarting, kFailed, kStopped };

// kPlanned: the daemon ended it, for an operator or for a new network, and starts another one at once.
// kOutOfMemory: the kernel's OOM killer ended it.
enum class EngineEnd { kDied, kDeviceFailed, kPlanned, kOutOfMemory };

// The owner of the engines receives their news here. None of these functions may stop or destroy the fleet.
class FleetHost {
 public:
  virtual ~FleetHost() = default;
  // kReady has come. The engine has not been told anything yet.
  virtual void engine_ready(std::uint32_t device) = 0;
  virtual void engine_message(std::uint32_t device, const Packet& packet) = 0;
  // The engine is dead, or is about to die and does nothing any more. Everything that it had sent has been
  // delivered. `text` says how it ended, for clients to read.
  virtual void engine_down(std::uint32_t device, const std::string& text, EngineEnd end) = 0;
  // The device accepts no new process yet. Called every few seconds.
  virtual void engine_waits(std::uint32_t device) = 0;
  // The engine is ready and is about to be killed. `then` kills it, if it still runs. To be called once, now
  // or soon.
  virtual void before_kill(std::uint32_t device, std::function<void()> then) = 0;
  // Called after engine_down: the engine will not be started again.
  virtual void engine_failed(std::uint32_t device, const std::string& text) = 0;
};

struct EngineOptions {
  std::string binary;
  LogLevels log_levels;
  LogFormat log_format = LogFormat::kLogfmt;
  std::uint32_t watchdog_ms = 10'000;
  std::uint32_t backoff_min_ms = 10;
  std::uint32_t backoff_max_ms = 5'000;
  std::uint32_t max_restarts_per_minute = 10;
  transport::NetworkOptions network;
};

// How often the kernel's OOM killer has ended a process of this daemon's cgroup, or of the machine.
class OomKills {
 public:
  OomKills();
  // Whether the count has grown within the last second: the OOM killer often ends several engines together.
  bool grew_lately(std::uint64_t now_ns);

 private:
  std::uint64_t count_;
  std::uint64_t grew_ns_ = 0;  // when it was last seen to have grown; 0: never
};

// The parts that all engines share.
struct FleetContext {
  Loop& loop;
  const Clock& clock;  // engines write their heartbeats by it; deadlines use the loop's
  FleetHost& host;
  EngineOptions options;
  OomKills oom;
  bool stopping = false;  // nothing is started any more
};

// The memory of an engine that outlives its processes: the page that it writes, and its bell.
class EngineMemory {
 public:
  static Result<EngineMemory> make();
  // Mapped at one address until the fleet is destroyed. Any thread may read it.
  const abi::EnginePage& page() const { return *page_.as<abi::EnginePage>(); }
  int page_fd() const { return page_fd_.get(); }
  int bell_fd() const { return bell_.get(); }
  // Clears the parts of the page that peers read, so that they mislead nobody while no engine writes them.
  void clear();

 private:
  UniqueFd page_fd_;
  Mapping page_;
  UniqueFd bell_;
};

class Engine {
 public:
  // Makes its memory.
  static Result<std::unique_ptr<Engine>> make(FleetContext& context, std::uint32_t device, std::string name);
  Engine(const Engine&) = delete;
  ~Engine();

  void start();
  // Does nothing if the engine is down.
  template <typename T>
  void send(abi::LinkType type, const T& body, const FdList& fds = {}) {
    if (is_ready()) after_send(running()->process->send(type, body, fds));
  }
  // Asks the process to end.
  void send_stop();
  void kill(const std::string& why);
  // Kills an engine that does not answer, unless somebody has stopped it (SIGSTOP, a debugger): a stopped
  // engine can't answer. That is logged once for each stop. The engine has a second to answer when it
  // continues.
  void kill_unless_stopped(const std::string& why);
  // Starts the engine again, whatever its state, as an operator wants. That is no death, and former deaths no
  // longer count.
  void restart(const std::string& why);

  void reap_if_due(std::uint64_t now_ns);
  void start_or_kill_if_due(std::uint64_t now_ns);
  // Kills the engine if its heartbeat has been the same for `watchdog_ms`.
  void check_alive();
  std::uint64_t next_due_ns() const;

  const std::string& name() const { return name_; }
  // The address by which engines of other nodes reach the engine; "": they can't.
  const std::string& far_address() const { return far_address_; }
  DeviceState state() const;
  bool is_ready() const { return running() != nullptr && running()->stage == Stage::kReady; }
  bool is_being_killed() const { return running() != nullptr && !running()->kill_reason.empty(); }
  // kStopped instead of kReady if the engine was stopped at the last look. Costs nothing.
  DeviceState seen_state() const;
  // The same after another look at the process.
  DeviceState state_now() const;
  // Null: no process runs.
  const EngineProcess* process() const { return running() ? running()->process.get() : nullptr; }
  std::int32_t pid() const { return running() ? running()->process->pid() : 0; }  // 0: no process
  const EngineMemory& memory() const { return memory_; }
  std::uint32_t restarts() const { return restarts_; }
  // For example "signal 9" or "exit 1"; "" if there was none.
  const std::string& last_exit() const { return last_exit_; }
  std::uint64_t heartbeat_age_ms() const;
  std::uint32_t max_sms() const { return max_sms_; }  // 0: not known yet
  // Whether it has made a round since the last call, or is not ready.
  bool loop_advanced();

 private:
  enum class Stage {
    kStarting,
    kReady,
    kDeviceFailed,  // it has said so, and engine_down was called
  };
  // No process runs. The next one starts at that time; 0: none does.
  struct Down {
    std::uint64_t start_at_ns;
  };
  // It has died too often. Only an operator starts it again.
  struct Failed {};
  // A process, from its start until its end has been read.
  struct Running {
    enum class Next { kNothing, kKill /* its link is closed */, kReap /* some threads have yet to end */ };

    std::unique_ptr<EngineProcess> process;
    std::uint64_t started_ns = 0;
    Loop::WatchId link_watch = 0;
    Loop::WatchId exit_watch = 0;
    bool watching_write = false;
    Stage stage = Stage::kStarting;
    std::uint64_t ready_ns = 0;
    std::string kill_reason;      // "": it is not being killed
    bool restart_wanted = false;  // it is ended for restart()
    Next next = Next::kNothing;
    std::uint64_t next_ns = 0;
    std::uint64_t beat = 0;           // the heartbeat at the last look; 0: it was not ready
    std::uint64_t beat_since_ns = 0;  // since when the heartbeat has been the same
    bool looked_stopped = false;
    std::uint64_t spared_until_ns = 0;  // it continues after a stop: until then it may still answer
  };

  Engine(FleetContext& context, std::uint32_t device, std::string name)
      : context_(context), device_(device), name_(std::move(name)) {}
  // Null if there is no process.
  Running* running() { return std::get_if<Running>(&life_); }
  const Running* running() const { return std::get_if<Running>(&life_); }
  void stop_watching(Loop::WatchId& watch, int fd);
  void on_link(std::uint32_t events);
  void read_link();
  void on_ready(const Packet& packet);
  void on_device_failed();
  void after_send(const Status& status);
  void on_exit();
  bool is_stopped(const std::string& noticed_by);
  // Plans the next start. Returns whether its delay is to be logged, which it is every few seconds.
  bool start_after(std::uint64_t delay_ns);
  void schedule_restart(std::uint64_t started_ns, EngineEnd end);
  // When the engine last showed that its loop runs; 0: never.
  std::uint64_t last_sign_ns() const;

  FleetContext& context_;
  const std::uint32_t device_;
  const std::string name_;
  EngineMemory memory_;
  std::variant<Down, Running, Failed> life_{Down{0}};
  std::uint32_t num_starts_ = 0;
  std::uint32_t max_sms_ = 0;
  std::string far_address_;
  std::uint32_t restarts_ = 0;
  std::string last_exit_;
  std::uint64_t backoff_ms_ = 0;
  std::deque<std::uint64_t> deaths_;  // in the last minute
  std::uint64_t say_busy_ns_ = 0;     // when to say again that no process could be started
  std::uint64_t loops_seen_ = 0;
};

}  // namespace epd::supervisor
