// A control plane without a daemon behind it, for tests that run epctl:
//   fake_control SOCKET [ATTACH_SOCKET]
// Serves until standard input ends or a drain has been asked for, then removes its sockets. Prints
// "ready" once it listens. Lines on standard input change what it says:
//   fail CODE MESSAGE   every call answers with that status (epd's number)
//   work                it answers again
//   empty               no devices, sessions, groups, operations, options
//   sick                host:1 hangs, the last reload failed
//   down                host:1 restarts
//   hang                calls take two seconds
//   draining            a drain goes on, with 700 ms left, and no end comes of it
//   lingers             when it ends, it removes its sockets, and its process goes on for a second
//   dies                a drain ends it at once, and its sockets stay
//   read_only           callers may read and change nothing
//   event TEXT          something happens
//   event_of UID TEXT   a user does something
//   asked               prints what was asked for that changes something, one line each, before "done"
#include "common/fd.h"
#include "control/control_server.h"
#include "support/fake_control_facade.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <sstream>
#include <string>
#include <thread>

namespace epd::test {
namespace {

using supervisor::Operator;

class SlowFacade final : public supervisor::ControlFacade {
 public:
  Result<v1::GetStatusResponse> status() override { return slow(fake_.status()); }
  Result<std::string> boot_id() override { return slow(fake_.boot_id()); }
  Result<supervisor::HealthFacts> health() override { return slow(fake_.health()); }
  Result<v1::ListDevicesResponse> devices() override { return slow(fake_.devices()); }
  Result<v1::ListSessionsResponse> sessions() override { return slow(fake_.sessions()); }
  Result<v1::ListGroupsResponse> groups() override { return slow(fake_.groups()); }
  Result<v1::ListOperationsResponse> operations() override { return slow(fake_.operations()); }
  Result<v1::ListFarEnginesResponse> far_engines() override { return slow(fake_.far_engines()); }
  Result<v1::ListNodesResponse> nodes() override { return slow(fake_.nodes()); }
  Result<v1::GetConfigResponse> config() override { return slow(fake_.config()); }
  Status authorize(const Operator& by, supervisor::Right wanted, const std::string& what) override {
    return fake_.authorize(by, wanted, what);
  }
  Status drain(const Operator& by, std::uint32_t timeout_ms) override { return fake_.drain(by, timeout_ms); }
  Result<v1::GetOperationResponse> operation(std::uint64_t session_id, std::uint64_t ticket) override {
    return slow(fake_.operation(session_id, ticket));
  }
  Result<v1::GetStatisticsResponse> statistics() override { return slow(fake_.statistics()); }
  Result<v1::GetWaitsResponse> waits(const supervisor::WaitsWanted& wanted) override {
    return slow(fake_.waits(wanted));
  }
  Result<EventBatch> events(std::uint64_t after, std::size_t limit, std::uint32_t wait_ms) override {
    return fake_.events(after, limit, wait_ms);
  }
  Result<v1::ReloadConfigResponse> reload(const Operator& by) override { return fake_.reload(by); }
  Result<v1::SetOptionsResponse> set_options(const Operator& by,
                                             const supervisor::OptionSettings& options) override {
    return fake_.set_options(by, options);
  }
  Status set_device(const Operator& by, const std::string& device,
                    std::optional<std::uint32_t> sms) override {
    return fake_.set_device(by, device, sms);
  }
  Result<v1::SetGroupResponse> set_group(const Operator& by, const std::string& group,
                                         const supervisor::GroupSettingsChange& change) override {
    return fake_.set_group(by, group, change);
  }
  Status evict_session(const Operator& by, std::uint64_t session_id, const std::string& reason) override {
    return fake_.evict_session(by, session_id, reason);
  }
  Status restart_device(const Operator& by, const std::string& device) override {
    return fake_.restart_device(by, device);
  }
  Result<v1::EvictRankResponse> evict_rank(const Operator& by, const std::string& group, std::uint32_t rank,
                                           const std::string& reason) override {
    return fake_.evict_rank(by, group, rank, reason);
  }

  FakeControlFacade& fake() { return fake_; }
  void set_slow() { slow_.store(true); }

  // What obey() and main() share.
  bool lingers = false;
  bool dies = false;

 private:
  template <typename T>
  T slow(T answer) {
    if (slow_.load()) std::this_thread::sleep_for(std::chrono::seconds(2));
    return answer;
  }

  FakeControlFacade fake_;
  std::atomic<bool> slow_{false};
};

void obey(const std::string& line, SlowFacade& facade) {
  std::istringstream words(line);
  std::string verb;
  words >> verb;
  FakeControlFacade& fake = facade.fake();
  if (verb == "fail") {
    int code = 0;
    std::string message;
    words >> code;
    std::getline(words >> std::ws, message);
    fake.fail({static_cast<StatusCode>(code), message});
  } else if (verb == "work") {
    fake.fail({});
  } else if (verb == "empty") {
    fake.change([](FakeControlFacade::Views& views) {
      const v1::DaemonStatus daemon = views.daemon;
      views = {};
      views.daemon = daemon;
    });
  } else if (verb == "sick") {
    fake.change([](FakeControlFacade::Views& views) {
      views.devices.mutable_devices(1)->set_heartbeat_age_ms(60'000);
      views.daemon.set_last_reload_error("limits.max_sessions is \"many\"");
    });
  } else if (verb == "down") {
    fake.change([](FakeControlFacade::Views& views) {
      views.devices.mutable_devices(1)->set_state(v1::DEVICE_STATE_RESTARTING);
    });
  } else if (verb == "draining") {
    fake.change([](FakeControlFacade::Views& views) {
      views.daemon.set_state(v1::DAEMON_STATE_DRAINING);
      views.daemon.set_drain_left_ms(700);
    });
  } else if (verb == "lingers") {
    facade.lingers = true;
  } else if (verb == "dies") {
    facade.dies = true;
  } else if (verb == "read_only") {
    fake.allow(supervisor::Right::kRead);
  } else if (verb == "hang") {
    facade.set_slow();
  } else if (verb == "event" || verb == "event_of") {
    Event event;
    if (verb == "event_of") words >> event.owner;
    std::getline(words >> std::ws, event.text);
    fake.event_log().add(event);
  } else if (verb == "asked") {
    for (const std::string& text : fake.asked()) std::printf("%s\n", text.c_str());
  }
  std::printf("done\n");
  std::fflush(stdout);
}

UniqueFd listen_on(const std::string& path) {
  UniqueFd fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::strncpy(address.sun_path, path.c_str(), sizeof(address.sun_path) - 1);
  const bool good = ::bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0 &&
                    ::listen(fd.get(), 1) == 0 && ::chmod(path.c_str(), 0600) == 0;
  if (!good) std::perror(path.c_str());
  return fd;
}

void serve(SlowFacade& facade) {
  std::string pending;
  while (!facade.fake().drained()) {
    pollfd input{STDIN_FILENO, POLLIN, 0};
    if (::poll(&input, 1, 20) == 0) continue;
    char buffer[512];
    const ssize_t got = ::read(STDIN_FILENO, buffer, sizeof(buffer));
    if (got <= 0) return;
    pending.append(buffer, static_cast<std::size_t>(got));
    for (std::size_t end = 0; (end = pending.find('\n')) != std::string::npos; pending.erase(0, end + 1)) {
      obey(pending.substr(0, end), facade);
    }
  }
  // Long enough for a waiting epctl to see the daemon drain.
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
}

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: fake_control SOCKET [ATTACH_SOCKET]\n");
    return 2;
  }
  SlowFacade facade;
  const std::string attach_path = argc > 2 ? argv[2] : "";
  UniqueFd attach;
  if (!attach_path.empty()) attach = listen_on(attach_path);
  facade.fake().change([&](FakeControlFacade::Views& views) {
    views.daemon.set_control_path(argv[1]);
    views.daemon.set_socket_path(attach_path);
  });
  control::ControlOptions options;
  options.socket_path = argv[1];
  auto server = control::ControlServer::start(facade, options);
  if (!server.ok()) {
    std::fprintf(stderr, "%s\n", server.status().to_string().c_str());
    return 1;
  }
  (*server)->set_serving(true);
  std::printf("ready\n");
  std::fflush(stdout);
  serve(facade);
  if (facade.dies) ::_exit(0);
  (*server)->shutdown();
  if (!attach_path.empty()) ::unlink(attach_path.c_str());
  if (facade.lingers) std::this_thread::sleep_for(std::chrono::seconds(1));
  return 0;
}

}  // namespace
}  // namespace epd::test

int main(int argc, char** argv) {
  return epd::test::main(argc, argv);
}
