// One submitted dispatch or combine, or a noop in a stream, as a state machine that never waits: the engine's
// loop steps it.
//
//   planning ─► wait_ready ─► moving ─► wait_arrived ─► done
//       └──────────┴────────────┴───────────┴──► breaking (the group is asked to break)
//
// It is launched when its turn comes and its exchange block and routing record are free. From then on the
// device carries it out, and here are looks at what it says: a host device names each stage, and is stepped
// by the loop; of a GPU the stage is what ranks have signalled when it was looked at last. One that ends soon
// is planning there until it is done.
//
// A noop in a stream passes the stream's word on, in the order of the member's operations, which is that of
// its streams. It has no number, and its failure is nobody else's.
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

// Microseconds between two clock readings, of which the first may be a client's: 0 if it lies ahead.
std::uint32_t saturated_us(std::uint64_t from_ns, std::uint64_t to_ns);

class Operation final : private device::OperationPeers {
 public:
  Operation(Member& member, const abi::Submission& submission, std::uint64_t seen_ns,
            std::uint64_t deadline_ns, device::Launcher& launcher, Page& page);
  ~Operation() override;
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;

  // One short piece of work. kFailed: failure() says what the group is to be told.
  StepResult step(std::uint64_t now_ns);
  // Whether step() would get on: the same look, without the work.
  bool runnable() const;
  // Whether the loop's thread could move rows of it now.
  bool can_move() const { return in_flight_ != nullptr && in_flight_->can_move(); }
  // Whether the loop must look again soon, because nobody rings for what it waits for.
  bool needs_polling() const { return in_flight_ != nullptr && in_flight_->needs_polling(); }
  // Whether step() may find that every rank has completed it.
  bool may_be_done() const;
  // Its deadline has passed. kFailed at once, or kIdle and from step() later.
  StepResult expire(std::uint64_t now_ns);
  // Stops touching any arena: at once, or as soon as settled() says.
  void abandon();
  bool settled() const { return in_flight_ == nullptr || in_flight_->left(); }
  // Whether the device has been told of it, and it has not failed.
  bool in_flight() const { return in_flight_ != nullptr && stage_ != abi::OpStage::kBreaking; }
  // Whether the client's stream will go on without being told.
  bool releases_stream() const { return in_flight_ != nullptr; }
  // Whether it has a number in its group, and all ranks take part.
  bool is_collective() const { return !is_noop(); }
  // Of one that was abandoned and has settled: every rank has completed it all the same.
  bool completed_anyway();

  Member& member() const { return member_; }
  const abi::Submission& submission() const { return submission_; }
  std::uint64_t index() const { return index_; }
  std::uint64_t deadline_ns() const { return deadline_ns_; }
  abi::OpStage stage() const { return stage_; }
  const abi::Break& failure() const { return failure_; }
  abi::Completion completion(StatusCode status, std::int32_t failed_rank, std::uint64_t now_ns) const;

  // As what it is to end once it has settled.
  void set_verdict(const abi::Break& cause) { verdict_ = cause; }
  const std::optional<abi::Break>& verdict() const { return verdict_; }

  void show(abi::OpView* view);  // takes over the entry

 private:
  // OperationPeers
  kernels::cuda::Peer peer(std::uint32_t rank) const override;
  std::span<const std::uint8_t> masked() const override { return group_.masked; }
  RoutedRows routed_rows(std::uint32_t rank, std::uint64_t routing) const override;
  bool holds_rows(std::uint32_t rank, std::uint64_t routing) const override {
    return group_.serves(rank, abi::epoch_of_tag(routing));
  }
  void ring() const override { group_.ring_peers(); }

  bool is_noop() const { return submission_.op == abi::Op::kNoop; }
  bool is_dispatch() const { return submission_.op == abi::Op::kDispatch; }
  bool has(abi::OpFlags flag) const { return (submission_.flags & flag) != 0; }
  // A dispatch that makes a routing rather than using one.
  bool routes() const { return abi::makes_routing(submission_.op, submission_.flags); }
  Subject subject() const { return {member_, submission_, index_}; }
  std::string expired_text(std::uint64_t now_ns) const;
  StepResult fail(const Failure& failure);
  void enter(abi::OpStage stage);
  void show_awaited();
  void show_far_wait(bool waits, std::uint64_t now_ns);

  // operation_steps.cpp
  bool may_launch() const;
  bool lets_launch() const;
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
  std::uint64_t begun_ns_ = 0;  // by the device; before it says when: launched
  std::uint32_t num_recv_rows_ = 0;
  std::uint32_t num_dropped_ = 0;
  abi::OpView* view_ = nullptr;
  abi::OpStage stage_ = abi::OpStage::kPlanning;
  abi::Break failure_{};
  std::optional<abi::Break> verdict_;
  RouteHeads::Place route_;
  kernels::cuda::TakenCall call_{};  // of one in flight
  std::unique_ptr<device::OperationInFlight> in_flight_;
  std::uint64_t far_wait_ns_ = 0;  // when it was shown last; 0: it does not wait
  bool held_up_ = false;
  bool route_kept_ = false;
  bool counted_ = false;  // and told
  bool sent_ = false;
  bool expired_ = false;
  std::string waited_for_;  // of other nodes, when it expired
  bool concluded_ = false;
};

// By which the streams of client and engine wait for each other.
kernels::cuda::Signal stream_signal(const Member& member, std::uint32_t slot, std::uint64_t ticket);
// Unblocks the client's stream if it waits for an operation that nothing will run.
void unblock_stream(const Member& member, const abi::Submission& submission);

}  // namespace epd::engine
