#include "far_page.h"

#include <algorithm>
#include <span>

namespace epd::engine {

using abi::FarRow;
using abi::FarState;

namespace {

constexpr auto kRelaxed = std::memory_order_relaxed;

void clear(abi::FarCounters& counters) {
  const auto clear_all = [](auto& each) {
    for (auto& counter : each) counter.store(0, kRelaxed);
  };
  clear_all(counters.batches_sent);
  clear_all(counters.bytes_sent);
  clear_all(counters.batches_received);
  clear_all(counters.bytes_received);
  clear_all(counters.dropped);
  for (auto* counter : {&counters.credit_stalls, &counters.credit_stall_ns, &counters.longest_stall_ns,
                        &counters.longest_stall_group})
    counter->store(0, kRelaxed);
  counters.longest_stall_rank.store(0, kRelaxed);
}

void clear(FarRow& row) {
  for (auto* field : {&row.node, &row.device_index, &row.state, &row.groups}) field->store(0, kRelaxed);
  row.window_bytes.store(0, kRelaxed);
  row.round_trip_ns.store(0, kRelaxed);
  row.answered_ns.store(0, kRelaxed);
  row.node_name.reset();
  row.reason.reset();
  row.carrier.reset();
  row.peer_carrier.reset();
  row.lanes.reset();
  clear(row.counters);
}

}  // namespace

FarPage::FarPage(abi::FarTable& table) : table_(table) {
  for (FarRow& row : table_.rows) {
    // A new key tells a reader that the row became another engine's while it read.
    next_key_ = std::max(next_key_, row.key.load(kRelaxed) + 1);
    if (row.key.load(kRelaxed) != 0) row.key.store(0, std::memory_order_release);
  }
  table_.promised_bytes.store(0, kRelaxed);
  table_.max_bytes.store(0, kRelaxed);
  table_.check.store(0, kRelaxed);
  table_.problem.reset();
  table_.carrier.reset();
  table_.library.reset();
  table_.interfaces.reset();
}

void FarPage::show_problem(const Status& why) {
  table_.problem.store(why.message());
}

void FarPage::show_network(const std::string& carrier, const transport::NetworkOptions& network) {
  table_.carrier.store(carrier);
  table_.library.store(network.library);
  table_.interfaces.store(network.devices);
  table_.max_bytes.store(network.max_bytes, kRelaxed);
  table_.check.store(static_cast<std::uint32_t>(network.check), kRelaxed);
}

FarRow* FarPage::find(far::EngineId engine) const {
  const auto found = rows_.find(engine);
  return found == rows_.end() ? nullptr : found->second;
}

FarRow* FarPage::claim(far::EngineId engine) {
  const std::span<FarRow> own(table_.rows, abi::kFarRows);
  auto row = std::find_if(own.begin(), own.end(), [](const FarRow& r) { return r.key.load(kRelaxed) == 0; });
  if (row == own.end()) {
    row = std::find_if(own.begin(), own.end(), [](const FarRow& r) {
      return r.state.load(kRelaxed) == static_cast<std::uint32_t>(FarState::kIdle);
    });
    if (row == own.end()) return nullptr;
    std::erase_if(rows_, [&](const auto& entry) { return entry.second == &*row; });
    row->key.store(0, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_release);
  }
  clear(*row);
  row->node.store(static_cast<std::uint32_t>(engine >> 32), kRelaxed);
  row->device_index.store(static_cast<std::uint32_t>(engine), kRelaxed);
  row->key.store(next_key_++, std::memory_order_release);
  rows_[engine] = &*row;
  return &*row;
}

void FarPage::show(far::EngineId engine, const State& state) {
  FarRow* row = find(engine);
  if (row == nullptr && state.state == FarState::kIdle) return;
  if (row == nullptr) row = claim(engine);
  if (row == nullptr) return;
  row->node_name.store(state.node_name);
  row->reason.store(state.reason);
  row->groups.store(state.groups, kRelaxed);
  row->window_bytes.store(state.window_bytes, kRelaxed);
  row->state.store(static_cast<std::uint32_t>(state.state), kRelaxed);
}

void FarPage::show_facts(far::EngineId engine, const transport::Facts& facts) {
  FarRow* const row = find(engine);
  if (row == nullptr) return;
  row->carrier.store(facts.carrier);
  row->peer_carrier.store(facts.peer);
  row->lanes.store(facts.lanes);
}

void FarPage::show_round_trip(far::EngineId engine, std::uint64_t ns, std::uint64_t now_ns) {
  FarRow* const row = find(engine);
  if (row == nullptr) return;
  row->answered_ns.store(now_ns, kRelaxed);
  row->round_trip_ns.store(ns, kRelaxed);
}

abi::FarCounters& FarPage::counters(far::EngineId engine) {
  if (FarRow* const row = find(engine); row != nullptr) return row->counters;
  FarRow& shared = last();
  if (shared.key.load(kRelaxed) == 0) {
    clear(shared);
    shared.key.store(next_key_++, std::memory_order_release);
  }
  return shared.counters;
}

void FarPage::dropped(far::EngineId engine, far::Drop why, std::uint64_t times) {
  Ledger::dropped(engine, why, times);
  untold_drops_[engine].count(why, times);
}

std::string FarPage::node_name(far::EngineId engine) const {
  const FarRow* const row = find(engine);
  return row == nullptr ? std::string() : row->node_name.load();
}

}  // namespace epd::engine
