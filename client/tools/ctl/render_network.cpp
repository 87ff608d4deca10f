// Text of what engines see of the network between nodes.
#include "json.h"
#include "render.h"
#include "table.h"
#include "units.h"

namespace epd::ctl {
namespace {

constexpr Align kRight = Align::kRight;

std::string name_of(const v1::FarEngine& far) {
  return printable(far.device() + " and " + far.far_device() + " on " + far.node()) + ": ";
}

std::string carrier(const v1::FarEngine& far) {
  if (far.carrier() == far.far_carrier()) return far.carrier();
  return far.carrier() + " / " + far.far_carrier();
}

std::string traffic(std::uint64_t batches, std::uint64_t bytes) {
  return batches == 0 ? "" : std::to_string(batches) + ", " + format_bytes(bytes);
}

std::string sent(const v1::FarEngine& far) {
  return traffic(far.rows().batches_sent() + far.asks().batches_sent() + far.sums().batches_sent(),
                 far.rows().bytes_sent() + far.asks().bytes_sent() + far.sums().bytes_sent());
}

std::string received(const v1::FarEngine& far) {
  return traffic(
      far.rows().batches_received() + far.asks().batches_received() + far.sums().batches_received(),
      far.rows().bytes_received() + far.asks().bytes_received() + far.sums().bytes_received());
}

std::string stalls(const v1::FarEngine& far) {
  if (far.credit_stalls() == 0) return "";
  return std::to_string(far.credit_stalls()) + ", " + format_us(far.credit_stall_us());
}

using DropCounts = google::protobuf::RepeatedPtrField<v1::DropCount>;

std::uint64_t total(const DropCounts& drops) {
  std::uint64_t sum = 0;
  for (const v1::DropCount& drop : drops) sum += drop.count();
  return sum;
}

std::string reasons(const DropCounts& drops) {
  std::string text;
  for (const v1::DropCount& drop : drops)
    text += (text.empty() ? "" : ", ") + printable(drop.reason()) + " " + std::to_string(drop.count());
  return text;
}

std::string notes_of(const v1::FarEngine& far) {
  std::string notes;
  if (!far.reason().empty()) notes += name_of(far) + printable(far.reason()) + "\n";
  if (far.dropped_size() != 0) notes += name_of(far) + "dropped: " + reasons(far.dropped()) + "\n";
  if (far.has_longest_stall()) {
    const v1::CreditStall& stall = far.longest_stall();
    notes += name_of(far) + "the longest stall was " + format_us(stall.us()) + ", for rank " +
             std::to_string(stall.rank()) + " of group " + std::to_string(stall.group_id()) + "\n";
  }
  return notes;
}

std::string engine_table(const google::protobuf::RepeatedPtrField<v1::NetworkEngine>& engines) {
  Table table(
      {{"DEVICE"}, {"STATE"}, {"CARRIER"}, {"CHECK"}, {"INTERFACES"}, {"PROMISED", kRight}, {"OF", kRight}});
  std::string notes;
  for (const v1::NetworkEngine& engine : engines) {
    const bool promises = engine.max_bytes() != 0;
    table.add({engine.device(), word(engine.state()), engine.carrier(), engine.check(), engine.interfaces(),
               promises ? format_bytes(engine.promised_bytes()) : "",
               promises ? format_bytes(engine.max_bytes()) : ""});
    if (!engine.problem().empty())
      notes += printable(engine.device()) + ": " + printable(engine.problem()) + "\n";
    if (engine.unlisted_dropped_size() != 0) {
      notes += printable(engine.device()) +
               ": dropped of engines that are not listed: " + reasons(engine.unlisted_dropped()) + "\n";
    }
  }
  return table.text() + (notes.empty() ? "" : "\n" + notes);
}

}  // namespace

std::string render(const v1::ListFarEnginesResponse& network) {
  Table table({{"DEVICE"},
               {"NODE"},
               {"FAR"},
               {"STATE"},
               {"CARRIER"},
               {"ROUND TRIP", kRight},
               {"HEARD", kRight},
               {"GROUPS", kRight},
               {"WINDOWS", kRight},
               {"SENT", kRight},
               {"RECEIVED", kRight},
               {"STALLS", kRight},
               {"DROPPED", kRight}});
  std::string notes;
  for (const v1::FarEngine& far : network.far_engines()) {
    table.add({far.device(), far.node(), far.far_device(), word(far.state()), carrier(far),
               far.has_round_trip_us() ? format_us(far.round_trip_us()) : "",
               far.has_heard_age_ms() ? format_ms(far.heard_age_ms()) + " ago" : "",
               std::to_string(far.groups()), format_bytes(far.window_bytes()), sent(far), received(far),
               stalls(far), std::to_string(total(far.dropped()))});
    notes += notes_of(far);
  }
  const std::string far_engines = table.empty() ? "no engine of another node is needed\n" : table.text();
  return far_engines + (notes.empty() ? "" : "\n" + notes) + "\n" + engine_table(network.engines());
}

}  // namespace epd::ctl
