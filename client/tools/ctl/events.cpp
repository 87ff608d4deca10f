// epctl events.
#include "commands.h"
#include "render.h"

#include <ostream>

namespace epd::ctl {
namespace {

int importance(const std::string& level) {
  return level == "error" ? 2 : level == "warning" ? 1 : 0;
}

// Where they would stand.
void tell_lost(const Arguments& arguments, Output& output, std::uint64_t lost) {
  if (arguments.json) {
    write_json_line(output, Json{{"lost", lost}});
  } else {
    output.out << "... " << lost << (lost == 1 ? " event" : " events") << " here no longer remembered\n";
  }
}

}  // namespace

Exit run_events(const Arguments& arguments, Connection& connection, Output& output) {
  v1::WatchEventsRequest request;
  request.set_since(arguments.since);
  request.set_follow(arguments.follow);
  std::uint64_t seen = arguments.since;
  const auto failure = connection.watch(request, [&](const v1::WatchEventsResponse& response) {
    for (const v1::Event& event : response.events()) {
      if (event.sequence() > seen + 1) tell_lost(arguments, output, event.sequence() - seen - 1);
      seen = event.sequence();
      if (importance(event.level()) < importance(arguments.level)) continue;
      if (arguments.json) {
        write_json_line(output, to_json(event));
      } else {
        output.out << render(event);
      }
    }
    output.out.flush();
    return output.out.good();
  });
  return failure ? report(arguments, output, *failure) : Exit::kOk;
}

}  // namespace epd::ctl
