#include "launched_operation.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

namespace epd {

using abi::OpStage;
using abi::Region;
using kernels::cuda::Kind;
using kernels::cuda::OpError;
using kernels::cuda::OpResult;

static_assert(sizeof(kernels::cuda::RouteHead) == sizeof(abi::RoutingRecord));
static_assert(sizeof(abi::OpAnnouncement) == kernels::cuda::kAnnouncementWords * sizeof(std::uint64_t));
static_assert(abi::kTagIndexBits == kernels::cuda::kRoutingIndexBits);
static_assert(sizeof(abi::SignalLine) == kernels::cuda::kSignalWords * sizeof(std::uint64_t));
static_assert(offsetof(abi::OpAnnouncement, num_tokens) == 3 * sizeof(std::uint64_t));
static_assert(abi::kLandingPieces == kernels::cuda::kLandingPieces);
static_assert(abi::kLandingTokens <= kernels::cuda::kMaxLandingTokens);

namespace {

template <typename T>
T* at(std::byte* base, std::uint64_t offset) {
  return reinterpret_cast<T*>(base + offset);
}

kernels::cuda::Shape device_shape(const abi::GroupShape& s) {
  kernels::cuda::Shape shape;
  shape.num_ranks = s.num_ranks;
  shape.num_experts = s.num_experts;
  shape.topk = s.topk;
  shape.hidden = s.hidden;
  shape.per_expert = s.per_expert();
  shape.expert_blocks = s.layout == abi::Layout::kExpert;
  shape.index64 = s.index_type == abi::IndexType::kInt64;
  shape.alignment = s.expert_alignment;
  shape.expert_capacity = s.expert_capacity();
  shape.recv_rows = s.recv_rows();
  shape.format = row_format(s);
  return shape;
}

kernels::cuda::Landing device_landing(const abi::GroupShape& s) {
  const abi::LandingLayout layout(s);
  if (layout.bytes == 0) return {};
  return {s.max_tokens,  static_cast<std::uint32_t>(layout.slot_bytes),
          layout.hello,  layout.landed,
          layout.chosen, layout.asked,
          layout.slots};
}

}  // namespace

LaneShape lane_shape(const abi::GroupShape& shape, std::int32_t priority) {
  return {device_shape(shape), shape.depth, static_cast<std::uint32_t>(abi::placement_words(shape)),
          shape.num_biases, priority};
}

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
  return member_.not_launched.front() == this && (is_noop() || block_is_free());
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
    const RouteHeads::Head head{index_ + 1, group_.epoch, submission_.num_tokens, 0, 0, 0};
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
  if (!is_noop()) describe(op);
  // The engine's own deadline comes first, unless the loop stands still.
  op.timeout_ns = deadline_ns_ - seen_ns_;
  if (has(abi::kFlagStream)) op.signal = stream_signal(member_, submission_.slot, submission_.ticket);
  LaunchRequest request;
  if (!is_noop()) request.kind = is_dispatch() ? Kind::kDispatch : Kind::kCombine;
  request.place = static_cast<std::uint32_t>(index_ % group_.shape.depth);  // as its exchange block: free
  request.op = &op;
  request.sms = share_sms();
  flight_ = member_.lane->launch(request);
  leave_queue();
  launched_ns_ = now_ns;
  enter(OpStage::kMoving);
}

void LaunchedOperation::describe(kernels::cuda::Operation& op) const {
  const abi::ExchangeArenaLayout& layout = group_.exchange_layout;
  op.shape = device_shape(group_.shape);
  op.rank = member_.rank;
  op.num_tokens = route_.head.num_tokens;
  op.tag = tag_;
  abi::OpAnnouncement own = announcement(route_.head.epoch);
  own.num_tokens = op.num_tokens;
  std::memcpy(op.announcement, &own, sizeof(own));
  op.landing = device_landing(group_.shape);
  op.routing.topk = at<std::int32_t>(route_.half, layout.topk);
  op.routing.rows = at<std::int32_t>(route_.half, layout.rows);
  op.routing.placement = at<std::int32_t>(route_.half, layout.placement);
  if (has(abi::kFlagWeights)) {
    op.topk_weights = reinterpret_cast<const float*>(member_.user(submission_.slot, Region::kTopkWeights));
  }
  describe_peers(op);
  if (is_dispatch()) {
    describe_dispatch(op);
  } else {
    describe_combine(op);
  }
}

void LaunchedOperation::describe_dispatch(kernels::cuda::Operation& op) const {
  const std::uint32_t slot = submission_.slot;
  const auto mine = [&]<typename T>(Region region, T*& pointer) {
    if (abi::region_bytes(group_.shape, region) != 0)
      pointer = reinterpret_cast<T*>(member_.user(slot, region));
  };
  op.cached = !routes();
  op.mark_unused = has(abi::kFlagMarkUnused);
  op.zero_padding = has(abi::kFlagZeroPadding);
  op.topk_idx = member_.user(slot, Region::kTopkIdx);
  op.x = member_.user(slot, Region::kX);
  if (group_.shape.payload == abi::Payload::kFp8) op.x_scales = member_.user(slot, Region::kXScales);
  mine(Region::kRankOffsets, op.counts.rank_offsets);
  mine(Region::kExpertCounts, op.counts.expert_counts);
  mine(Region::kExpertOffsets, op.counts.expert_offsets);
  mine(Region::kSourceRanges, op.counts.source_ranges);
  if (!routes()) return;
  op.routing.head = at<kernels::cuda::RouteHead>(route_.half, 0);
  op.routing.handle = index_ + 1;
  op.routing.epoch = group_.epoch;
}

void LaunchedOperation::describe_combine(kernels::cuda::Operation& op) const {
  const std::uint32_t slot = submission_.slot;
  const std::uint32_t biases = (submission_.flags & abi::kFlagBiases) >> abi::kBiasShift;
  constexpr Region kBiases[] = {Region::kBias0, Region::kBias1};
  for (std::uint32_t i = 0; i < std::min<std::uint32_t>(biases, 2); ++i) {
    op.bias[i] = reinterpret_cast<const std::uint16_t*>(member_.user(slot, kBiases[i]));
  }
  op.out = reinterpret_cast<std::uint16_t*>(member_.user(slot, Region::kOut));
  if (has(abi::kFlagReturnWeights)) {
    op.out_weights = reinterpret_cast<float*>(member_.user(slot, Region::kOutWeights));
  }
}

void LaunchedOperation::describe_peers(kernels::cuda::Operation& op) const {
  const abi::ExchangeArenaLayout& layout = group_.exchange_layout;
  const std::uint32_t slot = submission_.slot;
  for (std::uint32_t d = 0; d < group_.shape.num_ranks; ++d) {
    if (!group_.active(d)) continue;
    kernels::cuda::Peer& peer = op.peers[d];
    std::byte* block = group_.ranks[d].exchange->bytes() + layout.block(index_, group_.shape.depth);
    peer.ready = at<std::uint64_t>(block, layout.ready);
    peer.arrived = at<std::uint64_t>(block, layout.arrived);
    peer.announcement = at<std::uint64_t>(block, layout.announcement);
    peer.rank_counts = at<std::uint32_t>(block, layout.rank_counts);
    peer.expert_counts = at<std::uint32_t>(block, layout.expert_counts);
    if (layout.landing_bytes != 0) {
      peer.landing =
          at<std::uint8_t>(group_.ranks[d].exchange->bytes(), layout.landing(index_, group_.shape.depth));
    }
    const auto its = [&](Region region) { return group_.ranks[d].at(slot, region); };
    if (is_dispatch()) {
      peer.target = {its(Region::kRecvX), its(Region::kRecvScales), its(Region::kRecvTopkIdx),
                     at<float>(its(Region::kRecvTopkWeights), 0), at<std::int32_t>(its(Region::kRecvSrc), 0)};
    } else if (group_.serves(d, route_.head.epoch)) {  // one that was lost since has none of its rows
      peer.source = {at<const std::uint16_t>(its(Region::kY), 0),
                     has(abi::kFlagReturnWeights) ? at<const float>(its(Region::kYWeights), 0) : nullptr};
    }
  }
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
  const OpResult result = flight_->result();
  if (result.error != OpError::kNone) {
    forget_route();
    return fail_as(result, now_ns);
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
    route_.head = {index_ + 1,           group_.epoch,       submission_.num_tokens,
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
  if (routes()) member_.heads->forget(submission_.route, index_);
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

StepResult LaunchedOperation::fail_as(const OpResult& result, std::uint64_t now_ns) {
  switch (result.error) {
    case OpError::kBadChoice: return fail_choice(result.token, result.k, refused_value(result));
    case OpError::kNoRoom:
      return fail_placement(
          {true, static_cast<std::uint32_t>(result.culprit), result.expert, result.rows, result.room});
    case OpError::kMismatch: return fail(StatusCode::kInvalidArgument, result.culprit, disagreement());
    case OpError::kAborted:
    case OpError::kDeadline:
    case OpError::kNone: break;
  }
  std::string text = expired_text(now_ns);
  text += result.culprit < 0 ? ": its inputs were not ready"
                             : ": rank " + std::to_string(result.culprit) + " has not got as far";
  return fail(StatusCode::kDeadlineExceeded, result.culprit, text);
}

// The device tells values in 32 bits; a larger one is looked up, if it still stands there.
std::int64_t LaunchedOperation::refused_value(const OpResult& result) const {
  constexpr std::int32_t kMost = std::numeric_limits<std::int32_t>::max();
  const bool saturated = result.value == kMost || result.value == -kMost - 1;
  if (!saturated || group_.shape.index_type != abi::IndexType::kInt64) return result.value;
  std::int64_t value = 0;
  const std::size_t place = std::size_t{result.token} * group_.shape.topk + result.k;
  launcher_.read(&value, member_.user(submission_.slot, Region::kTopkIdx) + place * sizeof(value),
                 sizeof(value));
  return value >= kMost || value < -kMost ? value : result.value;
}

std::byte* LaunchedOperation::own_block() const {
  return member_.exchange() + group_.exchange_layout.block(index_, group_.shape.depth);
}

// Which field of whose announcement differs, from a copy of the block.
std::string LaunchedOperation::disagreement() const {
  std::vector<std::byte> copy(group_.exchange_layout.block_bytes);
  launcher_.read(copy.data(), own_block(), copy.size());
  const ExchangeBlock block(copy.data(), group_.shape, group_.exchange_layout, group_.active_since);
  const auto found = block.disagreement(member_.rank, index_);
  return found ? found->text
               : "operation " + std::to_string(index_) +
                     ": another rank submitted something else; all ranks must "
                     "submit the same operations in the same order";
}

StepResult LaunchedOperation::expire(std::uint64_t now_ns) {
  if (flight_ == nullptr)
    return fail(StatusCode::kDeadlineExceeded, -1,
                expired_text(now_ns) + ": an earlier operation had not ended");
  if (!std::exchange(expired_, true)) flight_->abort();  // its result will name who was waited for
  return StepResult::kIdle;
}

void LaunchedOperation::abandon() {
  if (flight_ != nullptr && !flight_->ended()) flight_->abort();
  leave_queue();
  enter(OpStage::kBreaking);
}

// The break and the last arrival may have crossed: what the peers saw succeed must not fail here.
bool LaunchedOperation::completed_anyway() {
  if (flight_ == nullptr || concluded_) return false;
  concluded_ = true;
  OpResult result = flight_->result();
  if (is_noop()) return result.error == OpError::kNone;
  if (result.error == OpError::kAborted && all_arrived()) {
    if (is_dispatch() && !counted_) publish_counts();
    result.error = OpError::kNone;
    result.num_recv_rows = num_recv_rows_;
    if (routes()) {
      const RouteHeads::Head head{index_ + 1,     group_.epoch,       submission_.num_tokens,
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

bool LaunchedOperation::all_arrived() const {
  std::vector<abi::SignalLine> lines(group_.shape.num_ranks);
  launcher_.read(lines.data(), own_block() + group_.exchange_layout.arrived, lines.size() * sizeof(lines[0]));
  for (std::uint32_t rank = 0; rank < group_.shape.num_ranks; ++rank) {
    if (group_.active(rank) && lines[rank].tag.load(std::memory_order_relaxed) < tag_) return false;
  }
  return true;
}

}  // namespace epd
