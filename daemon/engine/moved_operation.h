// An operation on a host device: the engine counts and exchanges, and the device moves rows in short pieces.
//
// planning      a new routing is read once, copied and counted; an old one is found. Announced to all ranks
// wait_ready    until every rank has announced: then counts, and so every place, are known
// moving        the device fills what stays empty of its own rows and pushes rows (dispatch), or it pulls and
//               sums rows (combine)
// wait_arrived  until every rank is done with this rank's arena
#pragma once

#include "operation.h"

#include <deque>
#include <vector>

namespace epd {

class MovedOperation final : public Operation {
 public:
  MovedOperation(Member& member, const abi::Submission& submission, std::uint64_t seen_ns,
                 std::uint64_t deadline_ns, RowMover& mover, Page& page);
  ~MovedOperation() override;

  StepResult step(std::uint64_t now_ns) override;
  bool runnable() const override;
  bool can_move() const override { return stage() == abi::OpStage::kMoving && !works_.front()->waiting(); }
  StepResult expire(std::uint64_t now_ns) override;
  void abandon() override;

 private:
  void enter(abi::OpStage stage);
  ExchangeBlock block_of(std::uint32_t rank) const;
  StepResult plan_new();
  StepResult plan_known();
  void announce();
  StepResult wait_ready(std::uint64_t now_ns);
  StepResult move();
  StepResult wait_arrived();
  void wait_for(std::uint32_t rank);
  std::uint32_t whom_to_blame(std::uint64_t now_ns) const;

  // row_movement.cpp: what the device is given
  kernels::PlacementError place();
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
  std::uint32_t scanned_ = 0;  // ranks below have been seen ready (or arrived)
  std::shared_ptr<Route> route_;
  std::vector<kernels::DispatchTarget> targets_;
  std::vector<kernels::CombineSource> sources_;
  std::vector<kernels::RowRange> unfilled_;
  std::deque<std::unique_ptr<Work>> works_;  // of the stage moving: what is not done yet
};

}  // namespace epd
