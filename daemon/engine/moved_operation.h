// An operation on a host device: the engine counts and exchanges, and the device moves rows in short pieces.
//
// planning      a new routing is read once, copied and counted; an old one is found. Announced to all ranks
// wait_ready    until every rank has announced: then counts, and so every place, are known
// moving        the device fills what stays empty of its own rows and pushes rows (dispatch), or it pulls and
//               sums rows (combine)
// wait_arrived  until every rank is done with this rank's arena
//
// What grows with tokens, experts or ranks is done in pieces of some ten microseconds: a step does one.
#pragma once

#include "operation.h"

#include <deque>
#include <memory>
#include <optional>
#include <vector>

namespace epd {

class MovedOperation final : public Operation {
 public:
  MovedOperation(Member& member, const abi::Submission& submission, std::uint64_t seen_ns,
                 std::uint64_t deadline_ns, RowMover& mover, Page& page);
  ~MovedOperation() override;

  StepResult step(std::uint64_t now_ns) override;
  bool runnable() const override;
  bool can_move() const override {
    return stage() == abi::OpStage::kMoving && !works_.empty() && !works_.front()->waiting();
  }
  StepResult expire(std::uint64_t now_ns) override;
  void abandon() override;

 private:
  // What the next step does; a stage has several.
  enum class Part {
    kBegin,     // planning
    kPlan,      //   choices are read, and become a plan
    kAnnounce,  //   rank by rank
    kAwait,     // wait_ready
    kAgree,     //   everybody's counts are looked at, and become places
    kKeep,      //   the routing's record is written
    kStart,
    kMove,    // moving
    kArrive,  //   all ranks are told, one by one
    kAwaitArrived,
  };

  void enter(abi::OpStage stage);
  void begin(Part part);
  StepResult next(Part part);
  ExchangeBlock block_of(std::uint32_t rank) const;
  bool may_plan() const;
  StepResult begin_plan();
  void plan_new();
  StepResult find_known();
  StepResult plan();
  StepResult announce();
  void announce_to(std::uint32_t rank, const abi::OpAnnouncement& own);
  StepResult wait_ready();
  StepResult agree();
  StepResult keep();
  StepResult start(std::uint64_t now_ns);
  StepResult move();
  StepResult arrive();
  StepResult wait_arrived();
  void wait_for(std::uint32_t rank);
  std::uint32_t whom_to_blame(std::uint64_t now_ns) const;

  // row_movement.cpp: what the device is given
  void begin_placing();
  void deliver_counts();
  Share share() const { return {group_.share_sms(submission_.sms), group_.priority}; }
  kernels::DispatchTarget target_at(std::uint32_t rank) const;
  void start_dispatch();
  void start_fill();
  void start_combine();
  void count_bytes() const;
  std::uint32_t count_lost_selections() const;

  RowMover& mover_;
  Page& page_;
  Part part_ = Part::kBegin;
  std::uint32_t scanned_ = 0;  // ranks below have been seen ready (or arrived)
  std::uint32_t done_ = 0;     // of the part: ranks below
  std::size_t kept_ = 0;       // choices in the record
  bool restores_ = false;      // the plan is made of a record
  std::shared_ptr<Route> route_;
  std::optional<kernels::RoutingPlanner> planner_;  // in the parts that need them
  std::optional<kernels::RowPlacer> placer_;
  std::vector<const std::uint32_t*> rank_counts_;
  std::vector<const std::uint32_t*> expert_counts_;
  std::vector<kernels::DispatchTarget> targets_;
  std::vector<kernels::CombineSource> sources_;
  std::vector<kernels::RowRange> unfilled_;
  std::deque<std::unique_ptr<Work>> works_;  // of the stage moving: what is not done yet
};

}  // namespace epd
