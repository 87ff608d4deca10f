// epctl drain.
#include "commands.h"
#include "socket_file.h"
#include "units.h"

#include <chrono>
#include <optional>
#include <ostream>
#include <string>
#include <thread>

namespace epd::ctl {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr milliseconds kPoll(100);
constexpr milliseconds kMargin(10'000);   // beyond the sessions' time
constexpr milliseconds kMayClose(2'000);  // between the close of a socket and its removal

// What the daemon says while it drains. Its state is unknown when it no longer answers in full.
enum class Seen { kDraining, kGone, kStuck };

Seen look(Connection& connection, const std::string& boot_id, v1::GetStatusResponse& status) {
  const auto failure = connection.call(v1::GetStatusRequest(), status);
  // Another boot id means a new daemon on the same socket.
  if (!failure) return status.daemon().boot_id() == boot_id ? Seen::kDraining : Seen::kGone;
  if (failure->exit == Exit::kRefused) return Seen::kDraining;
  const bool answers_late = failure->status == "DEADLINE_EXCEEDED" || failure->status == "RESOURCE_EXHAUSTED";
  return answers_late ? Seen::kStuck : Seen::kGone;
}

enum class End { kOrderly, kDied, kLate };

// A daemon that ends as it should removes its socket just after it has closed it.
bool leaves_its_socket(const std::string& path, milliseconds patience) {
  const auto give_up = steady_clock::now() + patience;
  while (is_stale(path)) {
    if (steady_clock::now() >= give_up) return true;
    std::this_thread::sleep_for(kPoll);
  }
  return false;
}

// Of a daemon that answers no more.
End end_of(const std::string& socket, const Descriptor& process, steady_clock::time_point give_up) {
  const bool seen = process.get() >= 0;
  if (seen && !wait_for_exit(process, give_up)) return End::kLate;
  return leaves_its_socket(socket, seen ? milliseconds(0) : kMayClose) ? End::kDied : End::kOrderly;
}

End wait_for_end(const Arguments& arguments, Connection& connection, const std::string& boot_id,
                 const Descriptor& process, milliseconds time, Output& output) {
  const auto give_up = steady_clock::now() + time + kMargin;
  std::uint64_t told = ~std::uint64_t{0};
  while (steady_clock::now() < give_up) {
    v1::GetStatusResponse status;
    const Seen seen = look(connection, boot_id, status);
    if (seen == Seen::kGone) return end_of(arguments.socket, process, give_up);
    if (seen == Seen::kDraining && status.has_daemon() && status.daemon().sessions() != told) {
      told = status.daemon().sessions();
      if (!arguments.json && told != 0) output.error << "waiting for " << counted(told, "session") << '\n';
    }
    std::this_thread::sleep_for(kPoll);
  }
  return End::kLate;
}

// Nothing: it has ended as it should.
std::optional<Failure> failure_of(End end, std::int32_t pid, const std::string& waited) {
  const std::string daemon = "the daemon (pid " + std::to_string(pid) + ")";
  switch (end) {
    case End::kOrderly: break;
    case End::kDied:
      return Failure{Exit::kUnreachable, "DAEMON_LOST",
                     daemon + " has died before its end: its socket is left behind; see its log"};
    case End::kLate:
      return Failure{Exit::kRefused, "DEADLINE_EXCEEDED",
                     daemon + " still runs after " + waited + "; see its log and: epctl sessions"};
  }
  return std::nullopt;
}

}  // namespace

Exit run_drain(const Arguments& arguments, Connection& connection, Output& output) {
  // Read before, because an idle daemon may exit before it can answer again.
  v1::GetStatusResponse before;
  if (auto failure = connection.call(v1::GetStatusRequest(), before)) {
    return report(arguments, output, *failure);
  }
  const Descriptor process = connection.process(before.daemon().pid());
  v1::DrainRequest request;
  request.set_timeout_ms(arguments.drain_ms);
  v1::DrainResponse response;
  if (auto failure = connection.call(request, response)) return report(arguments, output, *failure);

  Json document = to_json(response);
  const v1::DaemonStatus& daemon = response.has_daemon() ? response.daemon() : before.daemon();
  const milliseconds time(daemon.drain_left_ms());  // none: it leaves already
  if (!arguments.json) {
    output.out << "draining: "
               << (daemon.sessions() == 0 ? "no sessions"
                                          : counted(daemon.sessions(), "session") + " may finish within " +
                                                format_ms(static_cast<std::uint64_t>(time.count())))
               << std::endl;
  }
  if (!arguments.wait) {
    if (arguments.json) write_json(output, document);
    return Exit::kOk;
  }
  const auto start = steady_clock::now();
  const End end = wait_for_end(arguments, connection, before.daemon().boot_id(), process, time, output);
  const auto waited = std::chrono::duration_cast<milliseconds>(steady_clock::now() - start).count();
  const std::string waited_text = format_ms(static_cast<std::uint64_t>(waited));
  if (auto failure = failure_of(end, before.daemon().pid(), waited_text))
    return report(arguments, output, *failure);
  if (arguments.json) {
    document["gone"] = true;
    document["waited_ms"] = waited;
    write_json(output, document);
  } else {
    output.out << "the daemon has gone after " << waited_text << '\n';
  }
  return Exit::kOk;
}

}  // namespace epd::ctl
