// epctl events.
#include "commands.h"
#include "render.h"
#include "text.h"

#include <deque>
#include <optional>
#include <ostream>

namespace epd::ctl {
namespace {

int importance(const std::string& level) {
  return level == "error" ? 2 : level == "warning" ? 1 : 0;
}

bool is_of(const v1::Event& event, const char* key, const std::string& value) {
  const auto field = event.fields().find(key);
  return field != event.fields().end() && field->second == value;
}

// Says which events are printed, and in what order.
class Selection {
 public:
  Selection(const Arguments& arguments, Output& output)
      : arguments_(arguments), output_(output), max_age_ms_(parse_duration(arguments.since)) {
    if (!max_age_ms_) seen_ = parse_whole(arguments.since).value_or(0);
  }

  std::uint64_t seen() const { return seen_; }
  // From now on events are printed as they come. Before, the last ones are kept.
  void print_kept() {
    for (const v1::Event& event : kept_) print(event);
    kept_.clear();
    keeps_ = false;
    output_.out.flush();
  }
  bool take(const v1::WatchEventsResponse& response) {
    for (const v1::Event& event : response.events()) take(event);
    output_.out.flush();
    return output_.out.good();
  }

 private:
  void take(const v1::Event& event) {
    // Where they would stand.
    if (event.sequence() > seen_ + 1 && !keeps_) tell_lost(event.sequence() - seen_ - 1);
    seen_ = event.sequence();
    if (!is_wanted(event)) return;
    if (!keeps_) return print(event);
    kept_.push_back(event);
    if (kept_.size() > arguments_.last) kept_.pop_front();
  }
  bool is_wanted(const v1::Event& event) const {
    return importance(event.level()) >= importance(arguments_.level) &&
           (!max_age_ms_ || event.age_ms() <= *max_age_ms_) &&
           (arguments_.group.empty() || is_of_group(event)) &&
           (arguments_.node.empty() || is_of(event, "node", arguments_.node));
  }
  bool is_of_group(const v1::Event& event) const {
    constexpr std::string_view kById = "id:";
    const std::string& group = arguments_.group;
    if (!event.fields().contains("group")) return false;
    if (group.starts_with(kById)) return is_of(event, "group", group.substr(kById.size()));
    return is_of(event, "group", group) || is_of(event, "name", group);
  }
  void print(const v1::Event& event) {
    if (arguments_.json) {
      write_json_line(output_, to_json(event));
    } else {
      output_.out << render(event);
    }
  }
  void tell_lost(std::uint64_t lost) {
    if (arguments_.json) {
      write_json_line(output_, Json{{"lost", lost}});
    } else {
      output_.out << "... " << lost << (lost == 1 ? " event" : " events") << " here no longer remembered\n";
    }
  }

  const Arguments& arguments_;
  Output& output_;
  const std::optional<std::uint64_t> max_age_ms_;
  std::uint64_t seen_ = 0;
  bool keeps_ = arguments_.last != 0;
  std::deque<v1::Event> kept_;
};

}  // namespace

Exit run_events(const Context& context) {
  const Arguments& arguments = context.arguments;
  Selection selection(arguments, context.output);
  const auto watch = [&](bool follow) {
    v1::WatchEventsRequest request;
    request.set_since(selection.seen());
    request.set_follow(follow);
    context.connection.watch(request, [&](const auto& response) { return selection.take(response); });
  };
  if (arguments.last != 0) {
    watch(false);
    selection.print_kept();
  }
  if (arguments.last == 0 || arguments.follow) watch(arguments.follow);
  return Exit::kOk;
}

}  // namespace epd::ctl
