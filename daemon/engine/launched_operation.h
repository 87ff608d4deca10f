// An operation that a device runs by itself, exchange included: one launch, then looks at what it says.
//
// planning  the routing of an old dispatch is found; the member's operations before it have been launched
// moving    the device counts, exchanges, moves rows; it tells counts, then its result
//
// A noop in a stream is one too: it passes the stream's word on, in the order of the member's operations,
// which is that of its streams. It has no number, and its failure is nobody else's.
//
// An operation that is abandoned goes on until the device has left it. Then it may turn out that every rank
// had completed it: completed_anyway().
#pragma once

#include "device/launcher.h"
#include "device_operation.h"
#include "operation.h"

namespace epd {

class LaunchedOperation final : public Operation {
 public:
  LaunchedOperation(Member& member, const abi::Submission& submission, std::uint64_t seen_ns,
                    std::uint64_t deadline_ns, Launcher& launcher, Page& page);
  ~LaunchedOperation() override;

  StepResult step(std::uint64_t now_ns) override;
  bool runnable() const override;
  bool needs_polling() const override { return flight_ != nullptr; }
  StepResult expire(std::uint64_t now_ns) override;
  void abandon() override;
  bool settled() const override { return flight_ == nullptr || flight_->left(); }
  bool completed_anyway() override;
  bool releases_stream() const override { return flight_ != nullptr; }
  bool is_collective() const override { return !is_noop(); }

 private:
  bool is_noop() const { return submission_.op == abi::Op::kNoop; }
  bool may_launch() const;
  bool record_is_free() const;
  StepResult plan(std::uint64_t now_ns);
  bool find_route();
  void launch(std::uint64_t now_ns);
  void leave_queue();
  StepResult look(std::uint64_t now_ns);
  bool counts_news() const;
  bool sent_news() const;
  void publish_counts();
  void publish_sent();
  StepResult conclude(std::uint64_t now_ns);
  void forget_route();
  void keep_route(const kernels::cuda::OpResult& result);
  std::uint32_t count_lost_selections() const;

  Launcher& launcher_;
  Page& page_;
  RouteHeads::Place route_;
  std::unique_ptr<Flight> flight_;
  bool counted_ = false;  // and told
  bool sent_ = false;
  bool expired_ = false;
  bool concluded_ = false;
};

// By which the streams of client and engine wait for each other.
kernels::cuda::Signal stream_signal(const Member& member, std::uint32_t slot, std::uint64_t ticket);

}  // namespace epd
