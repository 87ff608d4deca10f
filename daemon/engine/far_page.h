// Shows engines of other nodes in this engine's page. Belongs to the loop.
#pragma once

#include "far/seal.h"
#include "transport/network.h"
#include "transport/transport.h"

#include "common/status.h"

#include <cstdint>
#include <map>
#include <string>

namespace epd::engine {

class FarPage final : public far::Ledger {
 public:
  // Clears the table, which may show engines of a former engine's.
  explicit FarPage(abi::FarTable& table);

  // Shows why no engine of other nodes can be reached, or through which network they are.
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
  // An engine that is shown for the first time gets a row: a free one, or that of an idle engine.
  void show(far::EngineId engine, const State& state);
  void show_facts(far::EngineId engine, const transport::Facts& facts);
  void show_round_trip(far::EngineId engine, std::uint64_t ns, std::uint64_t now_ns);

  // The counters of far::Ledger. Engines without a row share one set.
  abi::FarCounters& counters(far::EngineId engine) override;
  std::string node_name(far::EngineId engine) const override;
  void dropped(far::EngineId engine, far::Drop why, std::uint64_t times = 1) override;

  // The messages dropped since the map was last emptied, by engine.
  std::map<far::EngineId, far::DropCounts>& untold_drops() { return untold_drops_; }
  const std::map<far::EngineId, far::DropCounts>& untold_drops() const { return untold_drops_; }

 private:
  abi::FarRow* find(far::EngineId engine) const;
  abi::FarRow* claim(far::EngineId engine);
  abi::FarRow& last() { return table_.rows[abi::kFarRows]; }

  abi::FarTable& table_;
  std::map<far::EngineId, abi::FarRow*> rows_;
  std::map<far::EngineId, far::DropCounts> untold_drops_;
  std::uint64_t next_key_ = 1;
};

}  // namespace epd::engine
