// epctl events.
#include "commands.h"
#include "render.h"

#include <ostream>

namespace epd::ctl {

Exit run_events(const Arguments& arguments, Connection& connection, Output& output) {
  v1::WatchEventsRequest request;
  request.set_since(arguments.since);
  request.set_follow(arguments.follow);
  const auto failure = connection.watch(request, [&](const v1::WatchEventsResponse& response) {
    if (response.lost() != 0) {
      if (arguments.json) {
        write_json_line(output, Json{{"lost", response.lost()}});
      } else {
        output.out << "... " << response.lost() << " earlier events are no longer remembered\n";
      }
    }
    for (const v1::Event& event : response.events()) {
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
