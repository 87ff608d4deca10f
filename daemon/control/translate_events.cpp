#include "base/clock.h"
#include "translate.h"

namespace epd {
namespace {

const char* level_name(LogLevel level) {
  switch (level) {
    case LogLevel::kError: return "error";
    case LogLevel::kWarning: return "warning";
    default: return "info";
  }
}

}  // namespace

void translate(const EventBatch& batch, v1::WatchEventsResponse& message) {
  const std::uint64_t now = MonotonicClock().now_ns();
  message.set_lost(batch.lost);
  for (const Event& event : batch.events) {
    v1::Event& out = *message.add_events();
    out.set_sequence(event.sequence);
    out.set_kind(static_cast<v1::EventKind>(event.kind));
    out.set_level(level_name(event.level));
    out.set_text(clean_text(event.text));
    out.set_unix_ms(event.unix_ms);
    out.set_age_ms(now > event.monotonic_ns ? (now - event.monotonic_ns) / 1'000'000 : 0);
    for (const auto& [key, value] : event.fields) (*out.mutable_fields())[key] = clean_text(value);
  }
}

}  // namespace epd
