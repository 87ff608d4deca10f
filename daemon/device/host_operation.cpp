#include "host_operation.h"

#include "kernels/row_places.h"

#include <algorithm>
#include <atomic>
#include <limits>
#include <utility>

namespace epd::device {

using abi::OpStage;
using kernels::Kind;
using kernels::Operation;
using kernels::OpResult;
using kernels::Peer;

namespace {

// The choices in one piece of work. A choice takes some nanoseconds, and ten times as long if its pages are
// new. The counts of a rank for each expert take as long.
constexpr std::uint32_t kChoices = 2048;
constexpr std::size_t kCopied = 8192;  // choices
constexpr std::uint32_t kCounts = 8192;
constexpr std::uint32_t kRanks = 64;

}  // namespace

OpResult ending(kernels::OpError error, std::int32_t failed_rank) {
  OpResult result{};
  result.error = error;
  result.failed_rank = failed_rank;
  result.expert = -1;
  return result;
}

HostOperation::HostOperation(Kind kind, const Operation& op, const Needs& needs)
    : kind_(kind),
      op_(op),
      peers_(needs.peers),
      plans_(needs.plans),
      record_(needs.record),
      share_(needs.share),
      sum_ranks_(needs.sum_ranks),
      ranks_(op.shape.num_ranks),
      experts_(op.shape.num_experts / op.shape.num_ranks),
      own_(needs.peers.peer(op.rank)),
      waits_(needs.waits) {
  if (needs.far != nullptr && !needs.far->span().far_nodes().empty())
    crossing_ = std::make_unique<HostCrossing>(HostCrossing::Needs{*needs.far, op_, kind_, peers_, share_});
  if (routes()) {
    begin_new();
  } else {
    begin_known();
  }
}

HostOperation::~HostOperation() {
  works_.clear();
  crossing_.reset();
  planner_.reset();
  placer_.reset();
  plans_.give_back(std::move(plan_));
}

kernels::PlacementRules HostOperation::rules() const {
  const kernels::Shape& s = op_.shape;
  return {s.num_ranks,       s.num_experts,
          s.per_expert,      s.expert_blocks,
          s.expert_capacity, s.alignment,
          s.recv_rows,       crossing_ == nullptr ? std::span<const std::uint8_t>() : crossing_->near()};
}

// ---- steps

bool HostOperation::advance() {
  if (ended_) return false;
  if (crossing_ != nullptr && crossing_->step()) return true;
  switch (part_) {
    case Part::kPlan: return plan_choices();
    case Part::kList: return list();
    case Part::kAnnounce: return announce();
    case Part::kAwait: return wait_ready();
    case Part::kAgree: return agree();
    case Part::kKeep: return keep();
    case Part::kStart: return start();
    case Part::kMove: return move();
    case Part::kArrive: return arrive();
    case Part::kAwaitArrived: return wait_arrived();
  }
  return false;
}

bool HostOperation::can_advance() const {
  if (ended_) return false;
  if (can_cross()) return true;
  switch (part_) {
    case Part::kAwait: return first_behind(own_.ready, scanned_) != scanned_;
    case Part::kMove: return works_.empty() ? is_dispatch() || crossing_->sent() : can_move();
    case Part::kAwaitArrived:
      return scanned_ < ranks_ ? first_behind(own_.arrived, scanned_) != scanned_ : crossing_->sent();
    default: return true;
  }
}

OpStage HostOperation::stage() const {
  switch (part_) {
    case Part::kPlan:
    case Part::kList:
    case Part::kAnnounce: return OpStage::kPlanning;
    case Part::kAwait:
    case Part::kAgree:
    case Part::kKeep:
    case Part::kStart: return OpStage::kWaitReady;
    case Part::kMove:
    case Part::kArrive: return OpStage::kMoving;
    case Part::kAwaitArrived: break;
  }
  return crossing_ == nullptr || crossing_->sent() ? OpStage::kWaitArrived : OpStage::kMoving;
}

std::uint32_t HostOperation::awaited(std::uint32_t from) const {
  if (part_ == Part::kMove && crossing_ != nullptr) {
    const std::uint32_t gateway = crossing_->awaited();
    return gateway != kNobody && gateway >= from ? gateway : kNobody;
  }
  if (part_ != Part::kAwait && part_ != Part::kAwaitArrived) return kNobody;
  const std::uint32_t rank =
      first_behind(part_ == Part::kAwait ? own_.ready : own_.arrived, std::max(from, scanned_));
  return rank < ranks_ ? rank : kNobody;
}

// For the ranks from scanned_ on, below `end`: until their signals came, or until now.
void HostOperation::count_waits(std::uint32_t end) {
  if (part_ != Part::kAwait && part_ != Part::kAwaitArrived) return;
  const abi::SignalLine* const lines = part_ == Part::kAwait ? own_.ready : own_.arrived;
  for (std::uint32_t rank = scanned_; rank < end; ++rank) {
    if (rank == op_.rank || !peers_.active(rank)) continue;
    const bool came = load_acquire(lines[rank].tag) >= op_.tag;
    const std::uint64_t until_ns = came ? given_at(lines[rank]) : MonotonicClock().now_ns();
    if (part_ == Part::kAwait) {
      waits_.ready(rank, until_ns);
    } else {
      waits_.arrived(rank, until_ns);
    }
  }
}

// Returns whether the scan has advanced.
bool HostOperation::scan(const abi::SignalLine* lines) {
  const std::uint32_t end = first_behind(lines, scanned_);
  count_waits(end);
  return std::exchange(scanned_, end) != end;
}

// The first rank, from `from` on, that has not reached this operation.
std::uint32_t HostOperation::first_behind(const abi::SignalLine* lines, std::uint32_t from) const {
  while (from < ranks_ && (!peers_.active(from) || load_acquire(lines[from].tag) >= op_.tag)) ++from;
  return from;
}

bool HostOperation::next(Part part) {
  part_ = part;
  done_ = 0;
  return true;
}

void HostOperation::end(const OpResult& result) {
  crossing_.reset();
  result_ = result;
  ended_ = true;
}

void HostOperation::abort() {
  if (ended_) return;
  works_.clear();  // waits for the chunks that run
  count_waits(ranks_);
  const std::uint32_t rank = awaited(0);
  OpResult result = ending(OpError::kAborted, rank == kNobody ? -1 : static_cast<std::int32_t>(rank));
  result.num_dropped = num_dropped_;
  end(result);
}

// ---- planning

void HostOperation::begin_new() {
  const kernels::Shape& s = op_.shape;
  plan_ = plans_.renew(record_);
  planner_.emplace(kernels::RoutingInput{op_.topk_idx, s.index64, s.per_expert, op_.num_tokens, s.topk,
                                         s.num_ranks, s.num_experts, peers_.masked()},
                   plan_->plan);
}

// Finds the plan in memory, or makes it from the routing's record.
void HostOperation::begin_known() {
  const kernels::Shape& s = op_.shape;
  const std::uint64_t tag = op_.announcement.routing;
  if (!uses_nothing() && (plan_ = plans_.find(record_, tag)) != nullptr) {
    planned();
    return;
  }
  plan_ = plans_.renew(record_);
  planner_.emplace(
      kernels::RoutingInput{
          op_.routing.topk, false, s.per_expert, op_.num_tokens, s.topk, s.num_ranks, s.num_experts, {}},
      plan_->plan);
}

bool HostOperation::plan_choices() {
  if (planner_->advance(std::max(1u, kChoices / op_.shape.topk))) plan_ended();
  return true;
}

void HostOperation::plan_ended() {
  const kernels::RoutingError error = planner_->error();
  planner_.reset();
  if (!routes()) {
    if (error.bad) {
      end(ending(OpError::kNoRouting, -1));
    } else {
      recall();
      planned();
    }
    return;
  }
  if (!error.bad) {
    num_dropped_ = plan_->plan.num_dropped;
    planned();
    return;
  }
  OpResult result = ending(OpError::kBadChoice, static_cast<std::int32_t>(op_.rank));
  result.token = error.token;
  result.k = error.k;
  result.value = static_cast<std::int32_t>(
      std::min<std::int64_t>(error.value, std::numeric_limits<std::int32_t>::max()));
  end(result);
}

// Fills in what the plan of an earlier dispatch lacks.
void HostOperation::recall() {
  kernels::Placement& placement = plan_->placement;
  placement.reset(ranks_, op_.shape.num_experts, op_.shape.per_expert);
  if (uses_nothing()) return;
  const std::span<std::int32_t> words = placement.words();
  std::copy_n(op_.routing.placement, words.size(), words.begin());
  placement.count_rows(op_.shape.expert_blocks);
  plan_->tag = op_.announcement.routing;
  plans_.keep(record_, plan_);
}

void HostOperation::planned() {
  next(crossing_ == nullptr ? Part::kAnnounce : Part::kList);
}

bool HostOperation::list() {
  const std::uint32_t tokens = std::max(1u, kChoices / op_.shape.topk);
  return crossing_->list(plan_->plan, tokens) ? next(Part::kAnnounce) : true;
}

bool HostOperation::announce() {
  const std::uint32_t words = routes() ? ranks_ + op_.shape.num_experts : kCounts / kRanks;
  const std::uint32_t end = std::min(ranks_, done_ + std::max(1u, kCounts / words));
  const std::uint64_t now_ns = MonotonicClock().now_ns();
  for (; done_ < end; ++done_) {
    if (reaches(done_)) announce_to(done_, now_ns);
  }
  if (done_ < ranks_) return true;
  waits_.begin(now_ns);
  if (crossing_ != nullptr) crossing_->announce();
  peers_.ring();
  return next(Part::kAwait);
}

void HostOperation::announce_to(std::uint32_t rank, std::uint64_t now_ns) const {
  const Peer peer = peers_.peer(rank);
  peer.announcement[op_.rank] = op_.announcement;
  if (routes()) {
    const kernels::RoutingPlan& plan = plan_->plan;
    const std::size_t row = op_.rank;
    std::copy(plan.rank_counts.begin(), plan.rank_counts.end(), peer.rank_counts + row * ranks_);
    // Layout compact: only the rank itself needs the counts of its experts.
    const bool all = op_.shape.per_expert;
    const std::uint32_t first = all ? 0 : rank * experts_;
    const std::uint32_t count = all ? op_.shape.num_experts : experts_;
    std::copy_n(plan.expert_counts.begin() + first, count,
                peer.expert_counts + row * op_.shape.num_experts + first);
  }
  give_signal(peer.ready[op_.rank], op_.tag, now_ns);
}

// ---- wait_ready

bool HostOperation::wait_ready() {
  const bool progress = scan(own_.ready);
  if (scanned_ < ranks_) return progress;
  waits_.all_ready();
  if (routes()) begin_placing();
  return next(Part::kAgree);
}

void HostOperation::begin_placing() {
  rank_counts_.assign(ranks_, nullptr);
  expert_counts_.assign(ranks_, nullptr);
  for (std::size_t source = 0; source < ranks_; ++source) {
    if (!peers_.active(static_cast<std::uint32_t>(source))) continue;
    rank_counts_[source] = own_.rank_counts + source * ranks_;
    expert_counts_[source] = own_.expert_counts + source * op_.shape.num_experts;
  }
  placer_.emplace(rules(), kernels::PlacementCounts{rank_counts_, expert_counts_}, op_.rank, plan_->placement,
                  crossing_ == nullptr ? std::span<kernels::SourcePlaces>() : crossing_->places());
}

bool HostOperation::agrees(std::uint32_t rank) const {
  const abi::OpAnnouncement& theirs = own_.announcement[rank];
  const abi::OpAnnouncement& mine = op_.announcement;
  return theirs.op == mine.op && theirs.slot == mine.slot && theirs.format == mine.format &&
         abi::same_routing(theirs.routing, mine.routing);
}

bool HostOperation::agree() {
  const std::uint32_t piece = std::clamp(kCounts / op_.shape.num_experts, 1u, kRanks);
  const std::uint32_t last = std::min(ranks_, done_ + piece);
  for (; done_ < last; ++done_) {
    if (!peers_.active(done_) || agrees(done_)) continue;
    end(ending(OpError::kMismatch, static_cast<std::int32_t>(done_)));
    return true;
  }
  if (routes()) placer_->advance(piece);
  if (done_ < ranks_) return true;
  if (!routes()) return next(Part::kStart);
  const kernels::PlacementError error = placer_->error();
  placer_.reset();
  if (error.bad) {
    OpResult result = ending(OpError::kNoRoom, static_cast<std::int32_t>(error.rank));
    result.expert = error.expert;
    result.rows = error.rows;
    result.room = error.room;
    end(result);
    return true;
  }
  begin_keep();
  return next(Part::kKeep);
}

void HostOperation::begin_keep() const {
  if (op_.routing.head != nullptr) {
    std::atomic_ref(op_.routing.head->handle).store(0, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_release);
  }
  const std::span<const std::int32_t> words = plan_->placement.words();
  std::copy(words.begin(), words.end(), op_.routing.placement);
}

bool HostOperation::keep() {
  const auto& topk = plan_->plan.topk;
  const std::size_t count = std::min(kCopied, topk.size() - kept_);
  std::copy_n(topk.data() + kept_, count, op_.routing.topk + kept_);
  kept_ += count;
  if (kept_ < topk.size()) return true;
  if (abi::RoutingRecord* head = op_.routing.head; head != nullptr) {
    head->epoch = op_.routing.epoch;
    head->num_tokens = op_.num_tokens;
    head->num_recv_rows = plan_->placement.num_recv_rows;
    head->num_dropped = num_dropped_;
    store_release(head->handle, op_.routing.handle);
  }
  plan_->tag = op_.tag;
  plans_.keep(record_, plan_);
  return next(Part::kStart);
}

bool HostOperation::start() {
  if (crossing_ != nullptr && !crossing_->start()) {
    end(ending(OpError::kNoRouting, -1));
    return true;
  }
  if (is_dispatch()) {
    deliver_counts();
    start_fill();
    start_dispatch();
  } else {
    start_combine();
  }
  scanned_ = 0;
  return next(Part::kMove);
}

void HostOperation::deliver_counts() {
  const kernels::Placement& placement = plan_->placement;
  const auto put = [](std::span<const std::int32_t> words, std::int32_t* to) {
    if (to != nullptr) std::copy(words.begin(), words.end(), to);
  };
  put(placement.rank_offsets(), op_.counts.rank_offsets);
  put(placement.expert_counts(), op_.counts.expert_counts);
  put(placement.expert_offsets(), op_.counts.expert_offsets);
  if (op_.counts.source_ranges != nullptr)
    placement.write_source_ranges(op_.shape.packed_ranges, op_.counts.source_ranges);
  counted_ = true;
}

// ---- moving

void HostOperation::start_fill() {
  unfilled_ = kernels::unfilled_rows(rules(), plan_->placement, op_.mark_unused);
  if (unfilled_.empty()) return;
  kernels::FillArgs args;
  args.target = own_.target;
  args.ranges = unfilled_;
  args.format = op_.shape.format;
  args.choices_per_row = op_.shape.per_expert ? 1 : op_.shape.topk;
  args.index64 = op_.shape.index64;
  args.zero = op_.zero_padding;
  works_.push_back(RowWork::fill(args, share_));
}

// The rank, with its rows where it has announced them.
Peer HostOperation::placed(std::uint32_t rank) const {
  Peer peer = peers_.peer(rank);
  if (op_.memories != nullptr && rank != op_.rank)
    kernels::take_place(op_, rank, own_.announcement[rank].place, peer);
  return peer;
}

void HostOperation::start_dispatch() {
  targets_.resize(ranks_);
  for (std::uint32_t rank = 0; rank < ranks_; ++rank) {
    if (reaches(rank)) targets_[rank] = placed(rank).target;
  }
  kernels::DispatchArgs args;
  args.plan = &plan_->plan;
  args.base = plan_->placement.base();
  args.x = op_.x;
  args.x_scales = op_.x_scales;
  args.topk_weights = op_.topk_weights;
  args.targets = targets_;
  args.format = op_.shape.format;
  args.source_rank = op_.rank;
  args.topk = op_.shape.topk;
  args.experts_per_rank = experts_;
  args.index64 = op_.shape.index64;
  works_.push_back(RowWork::dispatch(args, share_));
}

void HostOperation::start_combine() {
  sources_.resize(ranks_);
  for (std::uint32_t rank = 0; rank < ranks_; ++rank) {
    if (reaches(rank)) sources_[rank] = placed(rank).source;
  }
  kernels::CombineArgs args;
  args.plan = &plan_->plan;
  args.base = plan_->placement.base();
  args.sources = sources_;
  args.topk_weights = op_.topk_weights;
  std::copy_n(op_.bias, 2, args.bias);
  args.out = op_.out;
  args.out_weights = op_.out_weights;
  args.sum_weights = op_.sum_weights;
  args.hidden = op_.shape.hidden;
  args.topk = op_.shape.topk;
  args.experts_per_rank = experts_;
  args.rank = op_.rank;
  args.sum_ranks = sum_ranks_;
  if (crossing_ != nullptr) {
    crossing_->merge(args);
  } else {
    works_.push_back(RowWork::combine(args, share_));
  }
}

bool HostOperation::move() {
  if (!works_.empty()) {
    RowWork& work = *works_.front();
    const bool ran = work.run_chunk();
    if (!work.done()) return ran;  // or helpers run the rest; the last one rings
    works_.pop_front();
    if (!works_.empty()) return true;
  }
  if (!is_dispatch() && crossing_ != nullptr && !crossing_->sent()) return false;
  sent_ = true;
  return next(Part::kArrive);
}

bool HostOperation::arrive() {
  const std::uint32_t end = std::min(ranks_, done_ + kRanks);
  const std::uint64_t now_ns = MonotonicClock().now_ns();
  for (; done_ < end; ++done_) {
    if (reaches(done_)) give_signal(peers_.peer(done_).arrived[op_.rank], op_.tag, now_ns);
  }
  if (done_ < ranks_) return true;
  waits_.begin(now_ns);
  peers_.ring();
  return next(Part::kAwaitArrived);
}

// ---- wait_arrived

bool HostOperation::wait_arrived() {
  const bool progress = scan(own_.arrived);
  if (scanned_ < ranks_ || (crossing_ != nullptr && !crossing_->sent())) return progress;
  OpResult result = ending(OpError::kNone, -1);
  if (is_dispatch()) result.num_recv_rows = plan_->placement.num_recv_rows;
  result.num_dropped = num_dropped_;
  end(result);
  return true;
}

std::uint32_t HostOperation::count_selections(std::span<const std::uint8_t> ranks) const {
  std::uint32_t count = 0;
  for (std::uint32_t rank = 0; rank < ranks.size(); ++rank) {
    if (ranks[rank] != 0) count += plan_->plan.selections_of(rank);
  }
  return count;
}

}  // namespace epd::device
