// epctl drain.
#include "commands.h"
#include "units.h"

#include <chrono>
#include <ostream>
#include <thread>

namespace epd::ctl {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr milliseconds kPoll(100);
constexpr milliseconds kMargin(10'000);  // beyond the sessions' time

std::string sessions_left(std::uint64_t count) {
  return std::to_string(count) + (count == 1 ? " session" : " sessions");
}

// What the daemon says while it drains. Its state is unknown when it no longer answers in full.
enum class Seen { kDraining, kGone, kStuck };

Seen look(Connection& connection, const std::string& boot_id, v1::GetStatusResponse& status) {
  const auto failure = connection.call(v1::GetStatusRequest(), status);
  // Another boot id means a new daemon on the same socket.
  if (!failure) return status.daemon().boot_id() == boot_id ? Seen::kDraining : Seen::kGone;
  if (failure->exit == Exit::kRefused) return Seen::kDraining;
  return failure->status == "DEADLINE_EXCEEDED" ? Seen::kStuck : Seen::kGone;
}

bool wait_until_gone(const Arguments& arguments, Connection& connection, const std::string& boot_id,
                     milliseconds time, Output& output) {
  const auto give_up = steady_clock::now() + time + kMargin;
  std::uint64_t told = ~std::uint64_t{0};
  while (steady_clock::now() < give_up) {
    v1::GetStatusResponse status;
    const Seen seen = look(connection, boot_id, status);
    if (seen == Seen::kGone) return true;
    if (seen == Seen::kDraining && status.has_daemon() && status.daemon().sessions() != told) {
      told = status.daemon().sessions();
      if (!arguments.json && told != 0) output.error << "waiting for " << sessions_left(told) << '\n';
    }
    std::this_thread::sleep_for(kPoll);
  }
  return false;
}

}  // namespace

Exit run_drain(const Arguments& arguments, Connection& connection, Output& output) {
  // Read before, because an idle daemon may exit before it can answer again.
  v1::GetStatusResponse before;
  if (auto failure = connection.call(v1::GetStatusRequest(), before)) {
    return report(arguments, output, *failure);
  }
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
                                          : sessions_left(daemon.sessions()) + " may finish within " +
                                                format_ms(static_cast<std::uint64_t>(time.count())))
               << std::endl;
  }
  if (!arguments.wait) {
    if (arguments.json) write_json(output, document);
    return Exit::kOk;
  }
  const auto start = steady_clock::now();
  const bool gone = wait_until_gone(arguments, connection, before.daemon().boot_id(), time, output);
  const auto waited = std::chrono::duration_cast<milliseconds>(steady_clock::now() - start).count();
  if (!gone) {
    return report(arguments, output,
                  {Exit::kRefused, "DEADLINE_EXCEEDED",
                   "the daemon (pid " + std::to_string(before.daemon().pid()) + ") still runs after " +
                       format_ms(static_cast<std::uint64_t>(waited)) + "; see its log and: epctl sessions"});
  }
  if (arguments.json) {
    document["gone"] = true;
    document["waited_ms"] = waited;
    write_json(output, document);
  } else {
    output.out << "the daemon has gone after " << format_ms(static_cast<std::uint64_t>(waited)) << '\n';
  }
  return Exit::kOk;
}

}  // namespace epd::ctl
