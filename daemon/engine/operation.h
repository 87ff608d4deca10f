// One submitted dispatch or combine as a state machine that never waits: the engine's
// loop steps it.
//
//   planning ─► wait_ready ─► moving ─► wait_arrived ─► done
//       └──────────┴────────────┴───────────┴──► breaking (the group is asked to break)
//
// It is launched when its turn comes and its exchange block and routing record are free. From then on the
// device carries it out, stepped by the loop, and here are looks at what it says. Operations of GPUs are
// calls (calls.h).
//
// An operation that is abandoned goes on until the device has left it. Then it may turn out that every rank
// had completed it: completed_anyway().
#pragma once

#include "device/launcher.h"
#include "failures.h"
#include "group.h"
#include "page.h"

#include <memory>
#include <optional>
#include <string>

namespace epd::engine {

enum class StepResult { kIdle, kProgress, kDone, kFailed };

// Microseconds between two clock readings. The first may be a client's: the result is 0 if it is the later
// one.
std::uint32_t saturated_us(std::uint64_t from_ns, std::uint64_t to_ns);

class Operation final : private device::OperationPeers {
 public:
  Operation(Member& member, const abi::Submission& submission, std::uint64_t seen_ns,
            std::uint64_t deadline_ns, device::Launcher& launcher, Page& page);
  ~Operation() override;
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;

  // Does one short piece of work. kFailed: failure() has what the group is told.
  StepResult step(std::uint64_t now_ns);
  // Whether step() would make progress. The same look, without the work.
  bool runnable() const;
  // Whether the loop's thread could move rows of it now.
  bool can_move() const { return in_flight_ != nullptr && in_flight_->can_move(); }
  // Whether step() may find that every rank has completed it.
  bool may_be_done() const;
  // Its deadline has passed. Returns kFailed, or kIdle: then step() returns kFailed later.
  StepResult expire(std::uint64_t now_ns);
  // Stops touching any arena: at once, or as soon as settled() is true.
  void abandon();
  bool settled() const { return in_flight_ == nullptr || in_flight_->ended(); }
  // Whether the device has been told of it and it has not failed.
  bool in_flight() const { return in_flight_ != nullptr && stage_ != abi::OpStage::kBreaking; }
  // For an operation that was abandoned and has settled: whether every rank has completed it nevertheless.
  bool completed_anyway();

  Member& member() const { return member_; }
  const abi::Submission& submission() const { return submission_; }
  std::uint64_t index() const { return index_; }
  std::uint64_t deadline_ns() const { return deadline_ns_; }
  abi::OpStage stage() const { return stage_; }
  const abi::Break& failure() const { return failure_; }
  abi::Completion completion(StatusCode status, std::int32_t failed_rank, std::uint64_t now_ns) const;

  // What it ends with once it has settled.
  void set_verdict(const abi::Break& cause) { verdict_ = cause; }
  const std::optional<abi::Break>& verdict() const { return verdict_; }

  void show(abi::OpView* view);  // owns the entry from now on

 private:
  // OperationPeers
  kernels::cuda::Peer peer(std::uint32_t rank) const override;
  std::span<const std::uint8_t> masked() const override { return group_.masked; }
  RoutedRows routed_rows(std::uint32_t rank, std::uint64_t routing) const override;
  bool holds_rows(std::uint32_t rank, std::uint64_t routing) const override {
    return group_.serves(rank, abi::epoch_of_tag(routing));
  }
  void ring() const override { group_.ring_peers(); }

  bool is_dispatch() const { return submission_.op == abi::Op::kDispatch; }
  bool has(abi::OpFlags flag) const { return (submission_.flags & flag) != 0; }
  // Whether it is a dispatch that makes a routing.
  bool routes() const { return abi::makes_routing(submission_.op, submission_.flags); }
  // Whether it uses the routing of a dispatch from before the rank joined.
  bool is_earlier() const {
    const std::uint64_t first = member_.first_index;
    return submission_.handle < first || (submission_.handle == abi::kEarlierDispatch && first != 0);
  }
  Subject subject() const { return {member_, submission_, index_}; }
  std::string expired_text(std::uint64_t now_ns) const;
  StepResult fail(const Failure& failure);
  void enter(abi::OpStage stage);
  void show_awaited();
  void show_far_wait(bool waits, std::uint64_t now_ns);

  // In operation_steps.cpp.
  bool may_launch() const;
  StepResult plan(std::uint64_t now_ns);
  bool find_route();
  void launch(std::uint64_t now_ns);
  std::uint64_t routing_tag() const;
  StepResult look(std::uint64_t now_ns);
  bool counts_news() const;
  bool sent_news() const;
  void publish_counts();
  void publish_sent();
  StepResult conclude(std::uint64_t now_ns);
  Failure device_failed(std::uint64_t now_ns) const;
  Failure stale_handle() const;
  std::uint32_t whom_to_blame(std::uint64_t now_ns) const;
  void keep_route(const kernels::cuda::OpResult& result);
  std::uint32_t count_lost_selections() const;

  Member& member_;
  Group& group_;
  device::Launcher& launcher_;
  Page& page_;
  const abi::Submission submission_;
  const std::uint64_t index_;
  const std::uint64_t number_;  // Group::in_tags
  const std::uint64_t tag_;
  const std::uint64_t seen_ns_;
  const std::uint64_t deadline_ns_;
  std::uint64_t begun_ns_ = 0;  // when the device began it; until that is known: when it was launched
  std::uint32_t num_recv_rows_ = 0;
  std::uint32_t num_dropped_ = 0;
  abi::OpView* view_ = nullptr;
  abi::OpStage stage_ = abi::OpStage::kPlanning;
  abi::Break failure_{};
  std::optional<abi::Break> verdict_;
  RouteHeads::Place route_;
  kernels::cuda::TakenCall call_{};  // while it is in flight
  std::unique_ptr<device::OperationInFlight> in_flight_;
  std::uint64_t far_wait_ns_ = 0;  // when the wait was shown last; 0: it does not wait
  bool held_up_ = false;
  bool route_kept_ = false;
  bool counted_ = false;  // and published
  bool sent_ = false;
  bool expired_ = false;
  std::string waited_for_;  // what it waited for of other nodes, when it expired
  bool concluded_ = false;
};

}  // namespace epd::engine
