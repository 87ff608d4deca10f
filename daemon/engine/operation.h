// One submitted dispatch or combine, as a state machine that never waits: the engine's loop steps it.
//
//   planning ─► wait_ready ─► moving ─► wait_arrived ─► done
//       └──────────┴────────────┴───────────┴──► breaking (the group is asked to break)
//
// planning      a new routing is read once, copied and counted; an old one is found. Announced to all ranks
// wait_ready    until every rank has announced: then counts, and so every place, are known
// moving        the device fills what stays empty of its own rows and pushes rows (dispatch), or it pulls and
//               sums rows (combine)
// wait_arrived  until every rank is done with this rank's arena
#pragma once

#include "announcement.h"
#include "device/device.h"
#include "group.h"
#include "page.h"

#include <deque>
#include <memory>
#include <string>
#include <vector>

namespace epd {

enum class StepResult { kIdle, kProgress, kDone, kFailed };

// Microseconds between two clock readings, of which the first may be a client's: 0 if it lies ahead.
std::uint32_t saturated_us(std::uint64_t from_ns, std::uint64_t to_ns);

class Operation {
 public:
  Operation(Member& member, const abi::Submission& submission, std::uint64_t seen_ns,
            std::uint64_t deadline_ns);
  ~Operation();
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;

  // One short piece of work. kFailed: failure() says what the group is to be told.
  StepResult step(Device& device, Page& page, std::uint64_t now_ns);
  // Whether step() would get on: the same look, without the work.
  bool runnable() const;
  // Whether the loop's thread could move rows of it now.
  bool can_move() const { return stage_ == abi::OpStage::kMoving && !works_.front()->waiting(); }
  // Stops touching any arena, at once.
  void abandon();
  // A deadline's text and culprit; for an operation that still waits.
  abi::Break deadline_failure(std::uint64_t now_ns) const;

  Member& member() const { return member_; }
  const abi::Submission& submission() const { return submission_; }
  std::uint64_t index() const { return index_; }
  std::uint64_t deadline_ns() const { return deadline_ns_; }
  abi::OpStage stage() const { return stage_; }
  const abi::Break& failure() const { return failure_; }
  abi::Completion completion(StatusCode status, std::int32_t culprit, std::uint64_t now_ns) const;

  void show(abi::OpView* view);  // takes over the entry

 private:
  bool is_dispatch() const { return submission_.op == abi::Op::kDispatch; }
  bool has(abi::OpFlags flag) const { return (submission_.flags & flag) != 0; }
  // A dispatch that makes a routing rather than using one.
  bool routes() const { return is_dispatch() && !has(abi::kFlagCached); }
  void enter(abi::OpStage stage);
  ExchangeBlock block_of(std::uint32_t rank) const;
  StepResult plan_new();
  StepResult plan_known();
  void announce();
  StepResult wait_ready(Device& device, std::uint64_t now_ns);
  StepResult move(Page& page);
  StepResult wait_arrived();
  StepResult fail(StatusCode cause, std::int32_t culprit, const std::string& text);
  void wait_for(std::uint32_t rank);
  StepResult held_up();  // an earlier operation must end first

  // movement.cpp: what the device is given
  kernels::PlacementError place();
  StepResult fail_placement(const kernels::PlacementError& error);
  void deliver_counts();
  Share share() const;
  kernels::DispatchTarget target_at(std::uint32_t rank) const;
  void start_dispatch(Device& device);
  void start_fill(Device& device);
  void start_combine(Device& device);
  void count_bytes(Page& page) const;
  std::uint32_t count_lost_selections() const;

  Member& member_;
  Group& group_;
  const abi::Submission submission_;
  const std::uint64_t index_;
  const std::uint64_t tag_;
  const std::uint64_t seen_ns_;
  const std::uint64_t deadline_ns_;
  abi::OpStage stage_ = abi::OpStage::kPlanning;
  std::uint32_t scanned_ = 0;  // ranks below have been seen ready (or arrived)
  std::uint64_t launched_ns_ = 0;
  std::uint32_t num_recv_rows_ = 0;
  std::uint32_t num_dropped_ = 0;
  std::shared_ptr<Route> route_;
  std::vector<kernels::DispatchTarget> targets_;
  std::vector<kernels::CombineSource> sources_;
  std::vector<kernels::RowRange> unfilled_;
  std::deque<std::unique_ptr<Work>> works_;  // of the stage moving: what is not done yet
  bool held_up_ = false;
  abi::Break failure_{};
  abi::OpView* view_ = nullptr;
};

}  // namespace epd
