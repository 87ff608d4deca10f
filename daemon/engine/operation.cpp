#include "operation.h"

#include "base/clock.h"

#include <algorithm>
#include <limits>
#include <utility>

namespace epd::engine {

using abi::OpStage;

namespace {
constexpr std::uint64_t kFarWaitPauseNs = 1'000'000;
}  // namespace

std::uint32_t saturated_us(std::uint64_t from_ns, std::uint64_t to_ns) {
  if (to_ns <= from_ns) return 0;
  return static_cast<std::uint32_t>(
      std::min<std::uint64_t>((to_ns - from_ns) / 1000, std::numeric_limits<std::uint32_t>::max()));
}

Operation::Operation(Member& member, const abi::Submission& submission, std::uint64_t seen_ns,
                     std::uint64_t deadline_ns, device::Launcher& launcher, Page& page)
    : member_(member),
      group_(member.group),
      launcher_(launcher),
      page_(page),
      submission_(submission),
      index_(member.next_number),
      number_(member.group.in_tags(index_)),
      tag_(abi::op_tag(member.group.epoch, number_)),
      seen_ns_(seen_ns),
      deadline_ns_(deadline_ns) {
  member_.operations.push_back(this);
}

// A routing that was begun and is not complete must not be found.
Operation::~Operation() {
  in_flight_.reset();
  if (route_.making != nullptr && !route_kept_) member_.heads->forget(submission_.route, number_);
  std::erase(member_.operations, this);
  Page::release(view_);
}

void Operation::show(abi::OpView* view) {
  view_ = view;
  view_->epoch = group_.epoch;
  view_->seen_ns = seen_ns_;
  view_->deadline_ns = deadline_ns_;
  enter(stage_);
}

void Operation::enter(OpStage stage) {
  stage_ = stage;
  if (view_ == nullptr) return;
  Page::enter(view_, stage, MonotonicClock().now_ns());  // the round of the loop may have begun long ago
}

void Operation::show_awaited() {
  const std::uint32_t rank = in_flight_->awaited(0);
  if (view_ != nullptr && rank != device::OperationInFlight::kNobody)
    Page::wait_for(view_, rank, MonotonicClock().now_ns());
}

// At the first look that finds it waiting, and now and then while it waits.
void Operation::show_far_wait(bool waits, std::uint64_t now_ns) {
  if (view_ == nullptr || group_.far == nullptr) return;
  if (!waits) {
    view_->far_wait.clear();
    far_wait_ns_ = 0;
  } else if (far_wait_ns_ == 0 || now_ns >= far_wait_ns_ + kFarWaitPauseNs) {
    view_->far_wait.store(in_flight_->waits_for());
    far_wait_ns_ = now_ns;
  }
}

StepResult Operation::fail(const Failure& failure) {
  failure_ = as_break(group_, failure);
  enter(OpStage::kBreaking);
  return StepResult::kFailed;
}

std::string Operation::expired_text(std::uint64_t now_ns) const {
  return ended_after(subject(), (now_ns - seen_ns_) / 1'000'000);
}

abi::Completion Operation::completion(StatusCode status, std::int32_t failed_rank,
                                      std::uint64_t now_ns) const {
  abi::Completion c{};
  c.ticket = submission_.ticket;
  c.op_index = index_;
  c.status = status;
  c.failed_rank = failed_rank;
  c.member = submission_.member;
  c.slot = submission_.slot;
  c.num_recv_rows = num_recv_rows_;
  if (status == StatusCode::kOk) c.num_dropped_selections = num_dropped_;
  c.seen_us = saturated_us(submission_.submit_ns, seen_ns_);
  c.launched_us = begun_ns_ == 0 ? 0 : saturated_us(submission_.submit_ns, begun_ns_);
  c.done_us = saturated_us(submission_.submit_ns, now_ns);
  return c;
}

}  // namespace epd::engine
