// Engines of several nodes in one process, each on a thread, and a group that spans them. The test is the
// supervisor of all nodes, and the clients.
#pragma once

#include "cases.h"
#include "engine/engine_main.h"
#include "engine_harness.h"
#include "far_steps.h"
#include "faulty_transport.h"
#include "in_process_transport.h"

#include <atomic>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace epd::test {

struct EngineNodesOptions {
  // For each rank: its node, from 1, and its device there.
  std::vector<std::uint32_t> nodes;
  std::vector<std::uint32_t> devices;
  std::set<std::uint32_t> masked;
  std::uint64_t batch_bytes = 4096;
  std::uint64_t window_bytes = 16384;
  std::uint64_t max_bytes = 1 << 30;
  std::uint32_t peer_timeout_ms = 5000;
  std::uint64_t first_op = 0;                   // of the group
  engine::OpenTransport open;                   // null: in-process
  std::optional<transport::FaultRates> faults;  // of in-process transports
};

class EngineNodes {
 public:
  static constexpr std::uint64_t kGroup = std::uint64_t{1} << 63 | 7;

  EngineNodes(const Case& c, const EngineNodesOptions& options);
  ~EngineNodes();

  // ---- the supervisors

  // Tells all engines of the group, or all but `left_out`.
  void begin(std::optional<std::size_t> left_out = {}) const;
  void begin_engine(std::size_t engine, bool broken) const;
  // "" or what engines say of it that is wrong.
  std::string expect_ready() const;
  std::string expect_ready(std::size_t engine) const;
  // A break, in which each engine but those says how far it has come.
  std::string break_all(const std::set<std::size_t>& without = {});
  // The next epoch, with another key.
  void resume(const std::set<std::size_t>& without = {});
  void resume_engine(std::size_t engine) const;
  std::string expect_resumed(const std::set<std::size_t>& without = {}) const;
  std::string break_and_resume();
  // Between a break and the resume: the rank goes, or comes with memory that is new.
  void mask(std::uint32_t rank);
  void admit(std::uint32_t rank);
  // Before it comes: it does so from another engine, in another session.
  void move(std::uint32_t rank, std::size_t engine);
  // The engine ends. Its successor has another address, which the others are told.
  void stop(std::size_t engine);
  void restart(std::size_t engine);
  // A resume index below which a restarted engine begins is not known by the others.
  void take_next_index(std::uint64_t index);
  void tell_address(std::size_t to, std::size_t of, bool down = false) const;
  std::string remove();
  // Sets, on one node only, the view's number, by which the epoch's messages are judged.
  void set_view(std::size_t engine, std::uint64_t view) { views_[engine] = view; }

  std::size_t num_engines() const { return engines_.size(); }
  std::size_t engine_of(std::uint32_t rank) const;
  EngineThread& engine(std::size_t which);
  static std::string name(std::uint32_t node) { return "node-" + std::to_string(node); }

  // ---- the clients

  // Carries out the steps that are not done yet; "" or what went wrong first. `until`: so many of them.
  std::string run(const std::vector<FarStep>& steps, std::size_t until = ~std::size_t{0});
  // Calls a step on this rank.
  void call(std::uint32_t rank, const FarStep& step, std::uint32_t timeout_ms = 10'000);
  // The end of the rank's first call that has not ended yet.
  std::optional<abi::CallEnd> wait(std::uint32_t rank, int timeout_ms = 10'000);
  std::string describe() const;

 private:
  struct Engine;
  struct Rank;

  Result<std::unique_ptr<transport::Transport>> open(const transport::Limits& limits);
  void make(Rank& rank) const;
  void attach(Rank& rank);
  std::set<std::uint32_t> lost() const;
  void tell_rank(const Engine& engine, std::uint32_t rank) const;
  bool active(const Rank& rank) const;
  epd_buffers_t buffers(const Rank& rank, std::uint32_t slot) const;
  const std::vector<Input>& inputs(Round round);
  std::string conclude(Rank& rank, const std::vector<FarStep>& steps);
  std::string check_combined(const Rank& rank, const abi::CallEnd& end, const FarStep& step) const;
  void go_back_to(std::uint64_t index);
  std::string stuck() const;

  const Case case_;
  const abi::GroupShape shape_;
  EngineNodesOptions options_;
  transport::Network network_;
  std::atomic<std::uint64_t> opened_{0};  // transports
  std::vector<std::unique_ptr<Engine>> engines_;
  std::vector<std::unique_ptr<Rank>> ranks_;
  std::map<std::size_t, std::uint64_t> views_;
  std::vector<std::unique_ptr<RawSession>> sessions_;
  std::map<Round, std::vector<Input>> inputs_;
  std::map<std::size_t, std::set<std::uint32_t>> lost_at_;  // by step, of dispatches
  std::uint64_t epoch_ = 1;
  std::uint64_t resume_index_ = 0;
};

}  // namespace epd::test
