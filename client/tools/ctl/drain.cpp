// epctl drain.
#include "commands.h"
#include "socket.h"
#include "text.h"

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
  const auto failure = connection.try_call(v1::GetStatusRequest(), status);
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
End end_of(const std::string& socket, const UniqueFd& process, steady_clock::time_point give_up) {
  const bool seen = process.valid();
  if (seen && !wait_for_exit(process, give_up)) return End::kLate;
  return leaves_its_socket(socket, seen ? milliseconds(0) : kMayClose) ? End::kDied : End::kOrderly;
}

End wait_for_end(const Context& context, const std::string& boot_id, const UniqueFd& process,
                 milliseconds time) {
  const auto give_up = steady_clock::now() + time + kMargin;
  std::uint64_t told = ~std::uint64_t{0};
  while (steady_clock::now() < give_up) {
    v1::GetStatusResponse status;
    const Seen seen = look(context.connection, boot_id, status);
    if (seen == Seen::kGone) return end_of(context.arguments.socket, process, give_up);
    if (seen == Seen::kDraining && status.has_daemon() && status.daemon().sessions() != told) {
      told = status.daemon().sessions();
      if (!context.arguments.json && told != 0)
        context.output.error << "waiting for " << counted(told, "session") << '\n';
    }
    std::this_thread::sleep_for(kPoll);
  }
  return End::kLate;
}

}  // namespace

Exit run_drain(const Context& context) {
  // Read before, because an idle daemon may exit before it can answer again.
  const auto before = context.connection.call<v1::GetStatusResponse>(v1::GetStatusRequest());
  const UniqueFd process = context.arguments.wait
                               ? listening_process(context.arguments.socket, before.daemon().pid())
                               : UniqueFd();
  v1::DrainRequest request;
  request.set_timeout_ms(context.arguments.drain_ms);
  const auto response = context.connection.call<v1::DrainResponse>(request);

  Json document = to_json(response);
  const v1::DaemonStatus& daemon = response.has_daemon() ? response.daemon() : before.daemon();
  const milliseconds time(daemon.drain_left_ms());  // none: it leaves already
  if (!context.arguments.json) {
    context.output.out << "draining: "
                       << (daemon.sessions() == 0
                               ? "no sessions"
                               : counted(daemon.sessions(), "session") + " may finish within " +
                                     format_ms(daemon.drain_left_ms()))
                       << std::endl;
  }
  if (!context.arguments.wait) return context.answer(document, "");
  const auto start = steady_clock::now();
  const End end = wait_for_end(context, before.daemon().boot_id(), process, time);
  const auto waited = std::chrono::duration_cast<milliseconds>(steady_clock::now() - start).count();
  const std::string waited_text = format_ms(static_cast<std::uint64_t>(waited));
  const std::string name = "the daemon (pid " + std::to_string(before.daemon().pid()) + ")";
  if (end == End::kDied)
    throw Failure{Exit::kUnreachable, "DAEMON_LOST",
                  name + " has died before its end: its socket is left behind; see its log"};
  if (end == End::kLate)
    throw Failure{Exit::kRefused, "DEADLINE_EXCEEDED",
                  name + " still runs after " + waited_text + "; see its log and: epctl sessions"};
  document["gone"] = true;
  document["waited_ms"] = waited;
  return context.answer(document, "the daemon has gone after " + waited_text + "\n");
}

}  // namespace epd::ctl
