// A control plane without a daemon behind it, for tests that run epctl:
//   fake_control SOCKET [ATTACH_SOCKET]
// Serves until standard input ends or a drain has been asked for, then removes its sockets. Prints
// "ready" once it listens. Lines on standard input change what it says:
//   fail CODE MESSAGE   every call answers with that status (epd's number)
//   work                it answers again
//   empty               no devices, sessions, groups, operations, options
//   sick                host:1 hangs, the last reload failed
//   down                host:1 restarts
//   draining            a drain is under way, with 700 ms left, and never ends
//   lingers             when it ends, it removes its sockets, and its process continues for a second
//   dies                a drain ends it at once, and its sockets stay
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
#include <chrono>
#include <cstdio>
#include <cstring>
#include <sstream>
#include <string>
#include <thread>

namespace epd::test {
namespace {

// The requests go to this facade; the flags say how the program ends.
struct Fake {
  FakeControlFacade facade;
  bool lingers = false;
  bool dies = false;
};

void obey(const std::string& line, Fake& state) {
  std::istringstream words(line);
  std::string verb;
  words >> verb;
  FakeControlFacade& fake = state.facade;
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
    state.lingers = true;
  } else if (verb == "dies") {
    state.dies = true;
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

void serve(Fake& state) {
  std::string pending;
  while (!state.facade.drained()) {
    pollfd input{STDIN_FILENO, POLLIN, 0};
    if (::poll(&input, 1, 20) == 0) continue;
    char buffer[512];
    const ssize_t got = ::read(STDIN_FILENO, buffer, sizeof(buffer));
    if (got <= 0) return;
    pending.append(buffer, static_cast<std::size_t>(got));
    for (std::size_t end = 0; (end = pending.find('\n')) != std::string::npos; pending.erase(0, end + 1)) {
      obey(pending.substr(0, end), state);
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
  Fake state;
  const std::string attach_path = argc > 2 ? argv[2] : "";
  UniqueFd attach;
  if (!attach_path.empty()) attach = listen_on(attach_path);
  state.facade.change([&](FakeControlFacade::Views& views) {
    views.daemon.set_control_path(argv[1]);
    views.daemon.set_socket_path(attach_path);
  });
  control::ControlOptions options;
  options.socket_path = argv[1];
  auto server = control::ControlServer::start(state.facade, options);
  if (!server.ok()) {
    std::fprintf(stderr, "%s\n", server.status().to_string().c_str());
    return 1;
  }
  (*server)->set_serving(true);
  std::printf("ready\n");
  std::fflush(stdout);
  serve(state);
  if (state.dies) ::_exit(0);
  (*server)->shutdown();
  if (!attach_path.empty()) ::unlink(attach_path.c_str());
  if (state.lingers) std::this_thread::sleep_for(std::chrono::seconds(1));
  return 0;
}

}  // namespace
}  // namespace epd::test

int main(int argc, char** argv) {
  return epd::test::main(argc, argv);
}
