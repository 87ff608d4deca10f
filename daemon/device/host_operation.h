// An operation that a host carries out, in short steps which never wait: on the loop of a host device's
// engine, and in place of a GPU's kernels under the fake driver.
//
// planning      a new routing is read once, copied and counted; the plan of an old one is found or made
// again.
//               Then the operation is announced to all ranks
// wait_ready    until every rank has announced: then counts, and so every place, are known
// moving        what stays empty of the rank's own rows is filled and rows are pushed (dispatch), or rows are
//               pulled and summed (combine)
// wait_arrived  until every rank is done with this rank's arena
//
// Work that grows with tokens, experts or ranks is done in pieces of some ten microseconds: a step does one.
//
// In a group whose ranks are on several nodes all ranks above are those of this node; HostCrossing does the
// rest, also while the operation waits: moving (combine) ends when the crossing has merged the output.
//
// A routing record is written when every rank has announced. `Operation::routing.rows` is for kernels alone:
// it follows from the plan.
#pragma once

#include "device/launcher.h"
#include "host_crossing.h"
#include "host_plans.h"
#include "host_rows.h"
#include "host_signals.h"

#include <deque>
#include <memory>
#include <optional>
#include <vector>

namespace epd::device {

// The result of an operation that has failed.
kernels::OpResult ending(kernels::OpError error, std::int32_t failed_rank);

class HostOperation final : public OperationInFlight {
 public:
  struct Needs {
    const OperationPeers& peers;
    HostPlans& plans;
    std::uint32_t record = 0;  // routing record of the plan
    Share share;
    std::uint32_t sum_ranks = 0;   // ranks of a sum domain; 0: all
    far::FarGroup* far = nullptr;  // null: all ranks are on this node
    abi::RankWaits waits{};        // where it counts what it waits for
  };
  // `kind` is a dispatch or a combine.
  HostOperation(kernels::Kind kind, const kernels::Operation& op, const Needs& needs);
  ~HostOperation() override;

  // Does one short piece of work on the calling thread. False: the operation waits, or has ended. The end of
  // the wait rings the engine's bell.
  bool advance();
  // Whether advance() would do something.
  bool can_advance() const;
  // Whether advance() would move rows. Such work goes by priority.
  bool can_move() const {
    return (part_ == Part::kMove && !works_.empty() && !works_.front()->waiting()) || can_cross();
  }
  abi::OpStage stage() const override;
  std::uint32_t awaited(std::uint32_t from) const override;
  std::string waits_for() const override {
    return crossing_ == nullptr ? std::string() : crossing_->waits_for();
  }
  // Once this is true, counts() and result() may be read.
  bool counted() { return counted_; }
  // For a dispatch: its inputs are no longer read.
  bool sent() { return sent_ && (crossing_ == nullptr || crossing_->sent()); }
  bool ended() { return ended_; }
  const kernels::Placement& counts() { return plan_->placement; }
  const kernels::OpResult& result() const { return result_; }
  // Selections, in the routing that it used, of ranks that have been lost since. `ranks`: [R] not 0 for
  // these.
  std::uint32_t count_selections(std::span<const std::uint8_t> ranks) const;
  // It has ended when this returns.
  void abort();

  // The plan is complete when stage() is no longer kPlanning. The placement is complete in kMoving.
  const HostPlan& plan() const { return *plan_; }

 private:
  using OpError = kernels::OpError;

  // The work of the next step. A stage has several parts.
  enum class Part {
    kPlan,      // planning: choices are read, and become a plan
    kList,      //   tokens of far nodes
    kAnnounce,  //   rank by rank
    kAwait,     // wait_ready
    kAgree,     //   everybody's announcements and counts are looked at, and become places
    kKeep,      //   the routing's record is written
    kStart,     //   counts are told
    kMove,      // moving
    kArrive,    //   all ranks are told, one by one
    kAwaitArrived,
  };

  bool is_dispatch() const { return kind_ == kernels::Kind::kDispatch; }
  // Whether this operation itself reaches the rank.
  bool reaches(std::uint32_t rank) const {
    return peers_.active(rank) && (crossing_ == nullptr || crossing_->near()[rank] != 0);
  }
  bool can_cross() const { return crossing_ != nullptr && crossing_->can_step(); }
  bool routes() const { return is_dispatch() && !op_.cached; }
  // A combine of no tokens, or one whose routing is from before this rank's time: there is nothing to read.
  bool uses_nothing() const { return !is_dispatch() && op_.num_tokens == 0; }
  kernels::PlacementRules rules() const;
  std::uint32_t first_behind(const abi::SignalLine* lines, std::uint32_t from) const;
  bool scan(const abi::SignalLine* lines);
  void count_waits(std::uint32_t end);
  bool next(Part part);
  void end(const kernels::OpResult& result);

  void begin_new();
  void begin_known();
  bool plan_choices();
  void plan_ended();
  void recall();
  void planned();
  bool list();
  bool announce();
  void announce_to(std::uint32_t rank, std::uint64_t now_ns) const;
  bool wait_ready();
  void begin_placing();
  bool agree();
  bool agrees(std::uint32_t rank) const;
  void begin_keep() const;
  bool keep();
  bool start();
  void deliver_counts();
  void start_fill();
  kernels::Peer placed(std::uint32_t rank) const;
  void start_dispatch();
  void start_combine();
  bool move();
  bool arrive();
  bool wait_arrived();

  const kernels::Kind kind_;
  const kernels::Operation op_;
  const OperationPeers& peers_;
  HostPlans& plans_;
  const std::uint32_t record_;
  const Share share_;
  const std::uint32_t sum_ranks_;
  const std::uint32_t ranks_;
  const std::uint32_t experts_;  // of one rank
  const kernels::Peer own_;
  HostWaits waits_;
  Part part_ = Part::kPlan;
  std::uint32_t scanned_ = 0;  // ranks below this one were seen ready (or arrived)
  std::uint32_t done_ = 0;     // within the part: ranks below this one
  std::size_t kept_ = 0;       // choices that are in the record
  bool counted_ = false;
  bool sent_ = false;
  bool ended_ = false;
  std::uint32_t num_dropped_ = 0;  // of a new routing
  std::shared_ptr<HostPlan> plan_;
  std::optional<kernels::RoutingPlanner> planner_;  // in the parts that need it
  std::optional<kernels::RowPlacer> placer_;
  std::vector<const std::uint32_t*> rank_counts_;
  std::vector<const std::uint32_t*> expert_counts_;
  std::vector<kernels::DispatchTarget> targets_;
  std::vector<kernels::CombineSource> sources_;
  std::vector<kernels::RowRange> unfilled_;
  std::deque<std::unique_ptr<RowWork>> works_;  // of the stage moving: work that has not ended
  std::unique_ptr<HostCrossing> crossing_;      // until it has ended; null if all ranks are on this node
  kernels::OpResult result_{};
};

}  // namespace epd::device
