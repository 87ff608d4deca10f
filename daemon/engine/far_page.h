// What this engine's page shows of engines of other nodes. The loop's.
#pragma once

#include "far/ledger.h"
#include "transport/network.h"
#include "transport/transport.h"

#include "common/status.h"

#include <cstdint>
#include <map>
#include <string>

namespace epd::engine {

class FarPage final : public far::Ledger {
 public:
  // Begins the table anew: that of an engine before this one is forgotten.
  explicit FarPage(abi::FarTable& table);

  // Why no engine of other nodes can be reached; or by what they are.
  void show_problem(const Status& why);
  void show_network(const std::string& carrier, const transport::NetworkOptions& network);
  void show_promised(std::uint64_t bytes) { table_.promised_bytes.store(bytes, std::memory_order_relaxed); }

  struct State {
    abi::FarState state = abi::FarState::kIdle;
    std::string reason;
    std::string node_name;
    std::uint32_t groups = 0;
    std::uint64_t window_bytes = 0;
  };
  // An engine that is shown for the first time gets a row: a free one, or that of an idle one.
  void show(far::EngineId engine, const State& state);
  void show_facts(far::EngineId engine, const transport::Facts& facts);
  void show_round_trip(far::EngineId engine, std::uint64_t ns);

  // far::Ledger. Of an engine without a row: those that all such share.
  abi::FarCounters& counters(far::EngineId engine) override;
  std::string node_name(far::EngineId engine) const override;

 private:
  abi::FarRow* find(far::EngineId engine) const;
  abi::FarRow* claim(far::EngineId engine);
  abi::FarRow& last() { return table_.rows[abi::kFarRows]; }

  abi::FarTable& table_;
  std::map<far::EngineId, abi::FarRow*> rows_;
  std::uint64_t next_key_ = 1;
};

}  // namespace epd::engine
