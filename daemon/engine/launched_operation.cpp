#include "launched_operation.h"

#include <algorithm>
#include <vector>

namespace epd {

using abi::OpStage;
using kernels::cuda::OpError;
using kernels::cuda::OpResult;

namespace {

template <typename T>
T* at(std::byte* base, std::uint64_t offset) {
  return reinterpret_cast<T*>(base + offset);
}

}  // namespace

kernels::cuda::Signal stream_signal(const Member& member, std::uint32_t slot, std::uint64_t ticket) {
  const GroupRankMemory& memory = member.group.ranks[member.rank];
  return {at<std::uint32_t>(memory.ready_word(slot), 0), at<std::uint32_t>(memory.done_word(slot), 0),
          static_cast<std::uint32_t>(ticket)};
}

LaunchedOperation::LaunchedOperation(Member& member, const abi::Submission& submission, std::uint64_t seen_ns,
                                     std::uint64_t deadline_ns, Launcher& launcher, Page& page)
    : Operation(member, submission, seen_ns, deadline_ns), launcher_(launcher), page_(page) {
  member_.not_launched.push_back(this);
}

LaunchedOperation::~LaunchedOperation() {
  leave_queue();
}

// The lane keeps the order in which it is told of operations, and that must be the streams'.
bool LaunchedOperation::may_launch() const {
  return member_.not_launched.front() == this && (is_noop() || (block_is_free() && record_is_free()));
}

bool LaunchedOperation::record_is_free() const {
  return !routes() || member_.heads->may_begin(submission_.route);
}

void LaunchedOperation::leave_queue() {
  std::erase(member_.not_launched, this);
}

StepResult LaunchedOperation::step(std::uint64_t now_ns) {
  switch (stage()) {
    case OpStage::kPlanning: return may_launch() ? plan(now_ns) : held_up();
    case OpStage::kMoving: return look(now_ns);
    case OpStage::kWaitReady:
    case OpStage::kWaitArrived:
    case OpStage::kBreaking:
    case OpStage::kNone: break;
  }
  return StepResult::kIdle;
}

bool LaunchedOperation::runnable() const {
  if (stage() == OpStage::kPlanning) return may_launch();
  if (flight_ == nullptr) return false;
  return !concluded_ && (flight_->ended() || counts_news() || sent_news());
}

StepResult LaunchedOperation::plan(std::uint64_t now_ns) {
  if (!is_noop() && !find_route()) return StepResult::kFailed;
  launch(now_ns);
  return StepResult::kProgress;
}

// False: failure() says why.
bool LaunchedOperation::find_route() {
  if (routes()) {
    // What follows in the lane may use it before this engine knows how it ends: if badly, then all fail.
    const RouteHeads::Head head{number_ + 1, group_.epoch, submission_.num_tokens, 0, 0, 0};
    route_ = member_.heads->begin(submission_.route, head, member_.exchange());
  } else if (submission_.handle >= member_.first_index) {
    route_ = member_.heads->find(submission_.route, submission_.handle, member_.exchange());
    if (route_.half == nullptr) {
      fail_stale_handle();
      return false;
    }
    if (is_dispatch() && route_.head.epoch < group_.changed_epoch) {
      fail_changed_group(route_.head.epoch);
      return false;
    }
  } else if (is_dispatch()) {
    fail_changed_group(0);
    return false;
  } else {  // of a dispatch before this rank's time it has no rows
    route_.half = member_.exchange() + group_.exchange_layout.routing_of(submission_.route);
  }
  return true;
}

void LaunchedOperation::launch(std::uint64_t now_ns) {
  kernels::cuda::Operation op;
  const std::uint64_t made_by = route_.head.handle != 0 ? route_.head.handle : submission_.handle + 1;
  if (!is_noop())
    op = describe(member_, submission_, {number_, announcement(route_.head.epoch, made_by), route_});
  // The engine's own deadline comes first, unless the loop stands still.
  op.timeout_ns = deadline_ns_ - seen_ns_;
  if (has(abi::kFlagStream)) op.signal = stream_signal(member_, submission_.slot, submission_.ticket);
  LaunchRequest request;
  request.kind = kind_of(submission_.op);
  request.place = static_cast<std::uint32_t>(number_ % group_.shape.depth);  // as its exchange block: free
  request.op = &op;
  request.sms = group_.share_sms(submission_.sms);
  flight_ = member_.lane->launch(request);
  leave_queue();
  launched_ns_ = now_ns;
  enter(OpStage::kMoving);
}

StepResult LaunchedOperation::look(std::uint64_t now_ns) {
  bool progress = false;
  if (counts_news()) {
    publish_counts();
    progress = true;
  }
  if (sent_news()) {
    publish_sent();
    progress = true;
  }
  if (flight_->ended()) return conclude(now_ns);
  return progress ? StepResult::kProgress : StepResult::kIdle;
}

bool LaunchedOperation::counts_news() const {
  return is_dispatch() && !counted_ && flight_->counted();
}

bool LaunchedOperation::sent_news() const {
  return is_dispatch() && has(abi::kFlagDefer) && !sent_ && flight_->sent();
}

void LaunchedOperation::publish_sent() {
  sent_ = true;
  member_.publish_sent(submission_.slot, submission_.ticket);
}

void LaunchedOperation::publish_counts() {
  counted_ = true;
  const abi::GroupShape& s = group_.shape;
  kernels::Placement placement;
  placement.reset(s.num_ranks, s.num_experts, s.per_expert());
  const std::span<const std::int32_t> words = flight_->counts();
  std::copy(words.begin(), words.end(), placement.words().begin());
  if (s.layout == abi::Layout::kPacked) {
    placement.num_recv_rows = static_cast<std::uint32_t>(placement.expert_offsets().back());
  } else if (s.layout == abi::Layout::kCompact) {
    placement.num_recv_rows = static_cast<std::uint32_t>(placement.rank_offsets().back());
  } else {
    for (const std::int32_t rows : placement.expert_counts())
      placement.num_recv_rows += static_cast<std::uint32_t>(rows);
  }
  num_recv_rows_ = placement.num_recv_rows;
  member_.publish_counts(submission_.slot, submission_.ticket, placement);
}

StepResult LaunchedOperation::conclude(std::uint64_t now_ns) {
  concluded_ = true;
  const OpResult& result = flight_->result();  // `left` may still come
  if (result.error != OpError::kNone) {
    forget_route();
    return fail(device_failure(subject(), launcher_, result, expired_text(now_ns), now_ns));
  }
  if (is_noop()) return StepResult::kDone;
  if (is_dispatch() && !counted_) publish_counts();  // both came between two looks
  keep_route(result);
  if (is_dispatch() && has(abi::kFlagDefer) && !sent_) publish_sent();
  // Bytes of rows delivered to this rank stand for those it sent: the device counts no others.
  const abi::GroupShape& s = group_.shape;
  const std::uint64_t row = is_dispatch() ? std::uint64_t{s.row_bytes()} + s.scale_bytes() : s.hidden * 2ull;
  const std::uint64_t rows = is_dispatch() ? result.num_recv_rows : route_.head.num_tokens;
  count_moved(page_, member_, submission_.op, rows * row);
  return StepResult::kDone;
}

void LaunchedOperation::keep_route(const OpResult& result) {
  if (routes()) {
    route_.head = {number_ + 1,          group_.epoch,       submission_.num_tokens,
                   result.num_recv_rows, result.num_dropped, 0};
    member_.heads->update(submission_.route, route_.head);
  } else if (submission_.handle >= member_.first_index) {  // its dispatch has ended meanwhile
    const RouteHeads::Place now =
        member_.heads->find(submission_.route, submission_.handle, member_.exchange());
    if (now.half == route_.half) route_.head = now.head;
  }
  if (is_dispatch()) num_recv_rows_ = route_.head.num_recv_rows;
  num_dropped_ = route_.head.num_dropped + count_lost_selections();
}

void LaunchedOperation::forget_route() {
  if (routes()) member_.heads->forget(submission_.route, number_);
}

// Selections whose rows went to ranks that were lost since.
std::uint32_t LaunchedOperation::count_lost_selections() const {
  if (route_.head.epoch >= group_.changed_epoch || route_.head.num_tokens == 0) return 0;
  std::vector<std::int32_t> topk(std::size_t{route_.head.num_tokens} * group_.shape.topk);
  launcher_.read(topk.data(), route_.half + group_.exchange_layout.topk, topk.size() * sizeof(topk[0]));
  return static_cast<std::uint32_t>(std::count_if(topk.begin(), topk.end(), [this](std::int32_t choice) {
    return choice >= 0 && !group_.serves(static_cast<std::uint32_t>(choice) / group_.shape.experts_per_rank(),
                                         route_.head.epoch);
  }));
}

StepResult LaunchedOperation::expire(std::uint64_t now_ns) {
  if (flight_ == nullptr)
    return fail(
        {StatusCode::kDeadlineExceeded, -1, expired_text(now_ns) + ": an earlier operation had not ended"});
  if (!std::exchange(expired_, true)) flight_->abort();  // its result will name who was waited for
  return StepResult::kIdle;
}

void LaunchedOperation::abandon() {
  if (flight_ != nullptr && !flight_->ended()) flight_->abort();
  leave_queue();
  enter(OpStage::kBreaking);
}

// The break and the last arrival may have crossed: what the peers saw succeed need not fail here. It does in
// a stream, which went on when the operation was aborted, perhaps without the last rows.
bool LaunchedOperation::completed_anyway() {
  if (flight_ == nullptr || concluded_) return false;
  concluded_ = true;
  OpResult result = flight_->result();
  if (is_noop()) return result.error == OpError::kNone;
  if (result.error == OpError::kAborted && !has(abi::kFlagStream) &&
      all_arrived(member_, launcher_, index_, tag_)) {
    if (is_dispatch() && !counted_) publish_counts();
    result.error = OpError::kNone;
    result.num_recv_rows = num_recv_rows_;
    if (routes()) {
      const RouteHeads::Head head{number_ + 1,    group_.epoch,       submission_.num_tokens,
                                  num_recv_rows_, result.num_dropped, 0};
      launcher_.write(route_.half, &head, sizeof(head));
    }
  }
  if (result.error != OpError::kNone) {
    forget_route();
    return false;
  }
  if (is_dispatch() && !counted_) publish_counts();
  keep_route(result);
  return true;
}

}  // namespace epd
