// Several nodes in one process: each has an engine's worth of host device, far side and transport, and the
// memory of its ranks. The test is the clients, and the loops of all engines in an order from a seed.
#pragma once

#include "support/cases.h"
#include "support/far_steps.h"
#include "transport_port.h"

#include "far_proxy.h"
#include "transport/faulty.h"
#include "transport/in_process.h"

#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

namespace epd::test {

struct FarOptions {
  std::vector<std::uint32_t> nodes;    // [R]
  std::vector<std::uint32_t> engines;  // [R] numbers; ranks of one engine are on one node
  std::vector<std::uint32_t> masked;   // ranks
  std::uint32_t batch_bytes = 4096;
  std::uint32_t window_bytes = 8192;
  std::uint32_t sms = 1;
  std::optional<transport::FaultRates> faults;
  // Threads own the transports, which this opens; else the test steps in-process ones.
  engine::FarProxy::Open open;
  std::uint64_t seed = 1;
};

class FarNodes {
 public:
  FarNodes(const Case& c, const FarOptions& options);
  ~FarNodes();

  // Carries out all steps; "" or what went wrong first.
  std::string run(const std::vector<FarStep>& steps);
  // The same, but everything is aborted after so many turns, and goes on in the next epoch from the first
  // operation that a rank has not completed.
  std::string run_with_breaks(const std::vector<FarStep>& steps, std::uint32_t breaks);
  // Everything is aborted, and goes on from the first operation that a rank has not completed. A masked rank
  // comes in.
  void admit(std::uint32_t rank);
  // The same, but the rank goes: it is masked.
  void mask(std::uint32_t rank);
  // A masked rank moves to another engine, with memory that is new.
  void move(std::uint32_t rank, std::uint32_t engine);
  // Runs for so many turns.
  void run_turns(const std::vector<FarStep>& steps, std::uint32_t turns);
  // Runs for so many turns with messages of that type that are spoiled. Then everything is aborted, and
  // begins anew. "" or what result was wrong; `faults` gets what was told of engines.
  std::string run_spoiled(const std::vector<FarStep>& steps, std::uint32_t turns, abi::FarType type,
                          std::string& faults);
  // "" or how the records that were sent differ from those that are needed. Without breaks.
  std::string check_records() const;
  // "" or what is left when all operations have ended and everything has arrived.
  std::string settle();

  far::FarGroup& far_of(std::uint32_t rank);
  std::uint64_t dropped() const;
  std::string describe() const;

 private:
  struct Engine;
  struct Rank;
  class Peers;

  void open_transport(Engine& engine);
  void place(Rank& rank, Engine& engine);
  void connect_engines();
  void greet_engines();
  bool step_engine(Engine& engine);
  bool step_rank(Rank& rank, const std::vector<FarStep>& steps);
  std::size_t last_made(std::uint32_t record) const;
  void begin(Rank& rank, const FarStep& step);
  void conclude(Rank& rank, const std::vector<FarStep>& steps);
  std::string check_combined(const Rank& rank, const FarStep& step);
  void begin_epoch();
  void break_all(bool from_the_beginning);
  void count_needed(const FarStep& step);
  bool turn(const std::vector<FarStep>& steps);
  bool done(const std::vector<FarStep>& steps) const;
  const std::vector<Input>& inputs(Round round);
  epd_buffers_t buffers(const Rank& rank, std::uint32_t slot) const;
  std::string stuck() const;

  const Case case_;
  const abi::GroupShape shape_;
  const abi::ExchangeArenaLayout exchange_;
  const abi::UserArenaLayout user_;
  FarOptions options_;
  std::vector<std::uint8_t> masked_;
  std::set<std::uint32_t> lost_;
  std::mt19937 random_;
  transport::Network network_;
  std::vector<std::unique_ptr<Engine>> engines_;
  std::vector<std::unique_ptr<Rank>> ranks_;
  std::map<Round, std::vector<Input>> inputs_;
  std::uint64_t epoch_ = 0;
  std::uint64_t resume_ = 0;
  std::uint64_t now_ns_ = 1;
  std::string wrong_;
  std::size_t counted_ = 0;  // steps of which it is known what they need
  std::uint64_t rows_needed_ = 0;
  std::uint64_t asks_needed_ = 0;
  std::uint64_t sums_needed_ = 0;
};

}  // namespace epd::test
