// The network between nodes as the engines see it, read from their pages without asking them.
#include "far_statistics.h"
#include "messages.h"

#include <atomic>
#include <tuple>

namespace epd::supervisor {
namespace {

template <typename T>
T value(const std::atomic<T>& field) {
  return field.load(std::memory_order_relaxed);
}

std::string device_of(const abi::FarRow& row) {
  return "host:" + std::to_string(value(row.device_index));
}

v1::FarEngineState message_of(abi::FarState state) {
  switch (state) {
    case abi::FarState::kIdle: return v1::FAR_ENGINE_STATE_IDLE;
    case abi::FarState::kConnecting: return v1::FAR_ENGINE_STATE_CONNECTING;
    case abi::FarState::kConnected: return v1::FAR_ENGINE_STATE_CONNECTED;
    case abi::FarState::kDown: return v1::FAR_ENGINE_STATE_DOWN;
  }
  return v1::FAR_ENGINE_STATE_UNSPECIFIED;
}

void fill(v1::FarTraffic& message, const abi::FarCounters& counters, abi::FarBatch kind) {
  const auto i = static_cast<std::size_t>(kind);
  message.set_batches_sent(value(counters.batches_sent[i]));
  message.set_bytes_sent(value(counters.bytes_sent[i]));
  message.set_batches_received(value(counters.batches_received[i]));
  message.set_bytes_received(value(counters.bytes_received[i]));
}

using DropCounts = google::protobuf::RepeatedPtrField<v1::DropCount>;

void fill(DropCounts& messages, const abi::FarCounters& counters) {
  for (std::size_t i = 0; i < abi::kNumFarDrops; ++i) {
    const std::uint64_t count = value(counters.dropped[i]);
    if (count == 0) continue;
    v1::DropCount& out = *messages.Add();
    out.set_reason(abi::kFarDropNames[i]);
    out.set_count(count);
  }
}

void fill(v1::FarEngine& message, const abi::FarRow& row, std::uint64_t now_ns) {
  message.set_node(row.node_name.load());
  message.set_far_device(device_of(row));
  message.set_state(message_of(static_cast<abi::FarState>(value(row.state))));
  message.set_reason(row.reason.load());
  message.set_carrier(row.carrier.load());
  message.set_far_carrier(row.peer_carrier.load());
  message.set_lanes(row.lanes.load());
  if (const std::uint64_t ns = value(row.round_trip_ns); ns != 0) {
    message.set_round_trip_us((ns + 999) / 1000);
    const std::uint64_t answered_ns = value(row.answered_ns);
    message.set_heard_age_ms(now_ns > answered_ns ? (now_ns - answered_ns) / 1'000'000 : 0);
  }
  message.set_groups(value(row.groups));
  message.set_window_bytes(value(row.window_bytes));
  const abi::FarCounters& counters = row.counters;
  fill(*message.mutable_rows(), counters, abi::FarBatch::kRows);
  fill(*message.mutable_asks(), counters, abi::FarBatch::kAsks);
  fill(*message.mutable_sums(), counters, abi::FarBatch::kSums);
  message.set_credit_stalls(value(counters.credit_stalls));
  message.set_credit_stall_us(value(counters.credit_stall_ns) / 1000);
  if (const std::uint64_t longest_ns = value(counters.longest_stall_ns); longest_ns != 0) {
    v1::CreditStall& stall = *message.mutable_longest_stall();
    stall.set_us(longest_ns / 1000);
    stall.set_group_id(value(counters.longest_stall_group));
    stall.set_rank(value(counters.longest_stall_rank));
  }
  fill(*message.mutable_dropped(), counters);
}

void fill_unlisted(v1::NetworkEngine& engine, const abi::FarCounters& counters) {
  fill(*engine.mutable_unlisted_dropped(), counters);
  std::uint64_t sent = 0;
  std::uint64_t received = 0;
  for (std::size_t i = 0; i < abi::kNumFarBatches; ++i) {
    sent += value(counters.bytes_sent[i]);
    received += value(counters.bytes_received[i]);
  }
  engine.set_unlisted_bytes_sent(sent);
  engine.set_unlisted_bytes_received(received);
}

}  // namespace

void add_far_engines(v1::ListFarEnginesResponse& list, v1::NetworkEngine& engine, const abi::FarTable& table,
                     std::uint64_t now_ns) {
  engine.set_problem(table.problem.load());
  engine.set_carrier(table.carrier.load());
  engine.set_library(table.library.load());
  engine.set_interfaces(table.interfaces.load());
  engine.set_promised_bytes(value(table.promised_bytes));
  engine.set_max_bytes(value(table.max_bytes));
  if (const std::uint32_t check = value(table.check); check != 0)
    engine.set_check(abi::far_check_name(static_cast<abi::FarCheck>(check)));
  for (const abi::FarRow& row : table.rows) {
    const std::uint64_t key = row.key.load(std::memory_order_acquire);
    if (key == 0) continue;
    if (value(row.node) == 0) {
      fill_unlisted(engine, row.counters);
      continue;
    }
    v1::FarEngine& far = *list.add_far_engines();
    far.set_device(engine.device());
    fill(far, row, now_ns);
    std::atomic_thread_fence(std::memory_order_acquire);
    if (value(row.key) != key)
      list.mutable_far_engines()->RemoveLast();  // the row was given to another engine
  }
}

std::string connecting_to(const abi::FarTable& table) {
  constexpr std::size_t kMostNamed = 3;
  std::string text;
  std::size_t count = 0;
  for (const abi::FarRow& row : table.rows) {
    const bool connects = value(row.key) != 0 && value(row.node) != 0 &&
                          static_cast<abi::FarState>(value(row.state)) == abi::FarState::kConnecting;
    if (!connects || ++count > kMostNamed) continue;
    text += (count == 1 ? "" : ", ") + device_of(row) + " of " + row.node_name.load();
  }
  return count > kMostNamed ? text + " and " + std::to_string(count - kMostNamed) + " more" : text;
}

void sort(v1::ListFarEnginesResponse& list) {
  sort_by(*list.mutable_far_engines(),
          [](const v1::FarEngine& far) { return std::tuple(far.device(), far.node(), far.far_device()); });
}

}  // namespace epd::supervisor
