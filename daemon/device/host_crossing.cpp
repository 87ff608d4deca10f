#include "host_crossing.h"

#include "host_signals.h"

#include <algorithm>
#include <cstring>

namespace epd::device {

using abi::FarHeader;
using abi::FarType;
using far::Arrival;
using far::Drop;

namespace {

kernels::FarShape far_shape(const kernels::Shape& s, bool crc) {
  kernels::FarShape shape;
  shape.format = s.format;
  shape.num_ranks = s.num_ranks;
  shape.experts_per_rank = s.num_experts / s.num_ranks;
  shape.topk = s.topk;
  shape.hidden = s.hidden;
  shape.per_expert = s.per_expert;
  shape.index64 = s.index64;
  shape.crc = crc;
  return shape;
}

}  // namespace

HostCrossing::HostCrossing(const Needs& needs)
    : needs_(needs),
      group_(needs.group),
      span_(needs.group.span()),
      shape_(far_shape(needs.op.shape, needs.group.has_record_crcs())) {
  const std::uint32_t ranks = span_.num_ranks();
  near_.assign(ranks, 0);
  nodes_.assign(ranks, kernels::kNotFar);
  for (const std::uint32_t rank : span_.near_ranks()) near_[rank] = 1;
  for (const std::uint32_t node : span_.far_nodes()) {
    for (const std::uint32_t rank : span_.ranks_of(node)) {
      if (is_dispatch() || needs.peers.holds_rows(rank, needs.op.announcement.routing))
        nodes_[rank] = static_cast<std::uint32_t>(targets_.size());
    }
    targets_.push_back({node, span_.gateway(needs.op.rank, node), {}, 0, 0, false, {}, {}, 0, 0});
    group_.rows_window(needs.op.rank, targets_.back().gateway).enter(tag());
  }
  for (const std::uint32_t rank : span_.served_by(needs.op.rank)) {
    sources_.emplace_back().rank = rank;
    places_.emplace_back().source = rank;
    if (!is_dispatch()) group_.sums_window(needs.op.rank, rank).enter(tag());
  }
  for (std::uint32_t domain = 0; domain < span_.num_domains(); ++domain)
    whole_domains_.push_back(span_.is_whole(domain) ? 1 : 0);
  group_.open(needs.op.rank, tag(), *this);
}

HostCrossing::~HostCrossing() {
  jobs_.clear();  // waits for the chunks that run
  group_.close(needs_.op.rank, tag());
  for (Target& target : targets_) {
    group_.rows_window(needs_.op.rank, target.gateway).leave(tag());
    for (const auto& [batch, arrival] : target.early) group_.settle(arrival);
    for (const Arrival& arrival : target.sums) group_.settle(arrival);
  }
  for (Source& source : sources_) {
    if (!is_dispatch()) group_.sums_window(needs_.op.rank, source.rank).leave(tag());
    for (const auto& [batch, arrival] : source.held) group_.settle(arrival);
    for (const Arrival& arrival : source.forwarding) group_.settle(arrival);
  }
}

FarHeader HostCrossing::header(FarType type, std::uint32_t to) const {
  FarHeader header{};
  header.type = type;
  header.tag = tag();
  header.from_rank = static_cast<std::uint16_t>(needs_.op.rank);
  header.to_rank = static_cast<std::uint16_t>(to);
  return header;
}

bool HostCrossing::returns_weights(std::uint32_t flags) const {
  return (flags & abi::kFlagReturnWeights) != 0;
}

std::size_t HostCrossing::source_of(std::uint32_t rank) const {
  const auto found = std::find_if(sources_.begin(), sources_.end(),
                                  [rank](const Source& source) { return source.rank == rank; });
  return static_cast<std::size_t>(found - sources_.begin());
}

// ---- what comes

Drop HostCrossing::receive(const Arrival& arrival) {
  const std::size_t source = source_of(arrival.header.from_rank);
  switch (arrival.header.type) {
    case FarType::kAnnounce: return receive_announcement(arrival, source);
    case FarType::kRows: return is_dispatch() ? receive_batch(arrival, sources_[source]) : Drop::kType;
    case FarType::kAsk: return is_dispatch() ? Drop::kType : receive_batch(arrival, sources_[source]);
    case FarType::kSums: return is_dispatch() ? Drop::kType : receive_sums(arrival);
    default: return Drop::kType;
  }
}

// Stores the announcement as the far rank would. The blocks are free: this rank's operation `depth` earlier
// has ended, so every rank of this node has read them.
Drop HostCrossing::receive_announcement(const Arrival& arrival, std::size_t index) {
  Source& source = sources_[index];
  if (source.announced) return Drop::kTwice;
  abi::FarAnnouncement said{};
  if (abi::read_far_announcement({arrival.body.data, arrival.body.bytes}, said) != abi::FarReason::kNone)
    return Drop::kContent;
  const abi::OpAnnouncement& op = said.operation;
  const std::span<const std::uint32_t> ranks = span_.near_ranks();
  const bool makes_routing =
      op.op == static_cast<std::uint32_t>(abi::Op::kDispatch) && (op.flags & abi::kFlagCached) == 0;
  const std::size_t counts = makes_routing ? kernels::num_far_counts(shape_, ranks.size()) : 0;
  if (arrival.header.records != counts) return Drop::kRecords;
  if (op.tag != tag() || op.num_tokens > group_.shape().max_tokens || said.num_tokens > op.num_tokens)
    return Drop::kContent;
  const std::size_t row = source.rank;
  for (const std::uint32_t rank : ranks) {
    const kernels::Peer peer = needs_.peers.peer(rank);
    if (makes_routing && kernels::scatter_far_counts(shape_, arrival.body.data + sizeof(said), op.num_tokens,
                                                     ranks, peer.rank_counts + row * shape_.num_ranks,
                                                     peer.expert_counts + row * shape_.num_experts()))
      return Drop::kContent;  // found at the first rank
    peer.announcement[row] = op;
  }
  source.announced = true;
  source.announcement = said;
  if (is_dispatch()) source.seen.assign(said.num_tokens, false);
  const std::uint64_t now_ns = MonotonicClock().now_ns();
  for (const std::uint32_t rank : ranks) give_signal(needs_.peers.peer(rank).ready[row], tag(), now_ns);
  needs_.peers.ring();
  group_.settle(arrival);
  return Drop::kNone;
}

// Before the announcement has come the number of batches is not known. It is at most that of a window.
Drop HostCrossing::receive_batch(const Arrival& arrival, Source& source) const {
  const std::uint32_t batch = arrival.header.batch;
  if (batch >= group_.shape().max_tokens) return Drop::kBatch;
  if (is_dispatch() && abi::check_far_records(arrival.header, shape_.row_stride()) != abi::FarReason::kNone)
    return Drop::kRecords;
  const bool seen =
      is_dispatch() ? batch < source.seen.size() && source.seen[batch] : batch < source.next_asks;
  if (seen || source.held.contains(batch)) return Drop::kTwice;
  source.held.emplace(batch, arrival);
  return Drop::kNone;
}

Drop HostCrossing::receive_sums(const Arrival& arrival) {
  const auto target = std::find_if(targets_.begin(), targets_.end(), [&arrival](const Target& t) {
    return t.gateway == arrival.header.from_rank;
  });
  const std::uint32_t stride = group_.sizes().sum_stride[needs_.op.out_weights != nullptr ? 1 : 0];
  if (abi::check_far_records(arrival.header, stride) != abi::FarReason::kNone) return Drop::kRecords;
  const std::uint32_t batch = arrival.header.batch;
  if (batch < target->next_sums || target->early.contains(batch)) return Drop::kTwice;
  target->early.emplace(batch, arrival);
  auto next = target->early.find(target->next_sums);
  while (next != target->early.end()) {
    target->sums.push_back(next->second);
    target->early.erase(next);
    next = target->early.find(++target->next_sums);
    more_sums_ = true;
  }
  return Drop::kNone;
}

// ---- the own part, in the order of calls

bool HostCrossing::list(const kernels::RoutingPlan& plan, std::uint32_t tokens) {
  if (!lister_) {
    plan_ = &plan;
    lists_.resize(targets_.size());
    lister_.emplace(shape_, plan, nodes_, lists_);
  }
  if (!lister_->advance(tokens)) return false;
  lister_.reset();
  for (std::size_t i = 0; i < targets_.size(); ++i) targets_[i].tokens = std::move(lists_[i]);
  return true;
}

void HostCrossing::announce() {
  for (Target& target : targets_) {
    const std::span<const std::uint32_t> ranks = span_.ranks_of(target.node);
    const std::size_t counts = routes() ? kernels::num_far_counts(shape_, ranks.size()) : 0;
    abi::FarAnnouncement said{};
    said.operation = needs_.op.announcement;
    said.num_tokens = static_cast<std::uint32_t>(target.tokens.size());
    far::Buffer body(sizeof(said) + counts * sizeof(std::uint32_t));
    std::memcpy(body.data(), &said, sizeof(said));
    if (counts != 0) kernels::gather_far_counts(shape_, *plan_, ranks, body.data() + sizeof(said));
    FarHeader h = header(FarType::kAnnounce, target.gateway);
    h.records = static_cast<std::uint32_t>(counts);
    h.body_bytes = static_cast<std::uint32_t>(body.bytes());
    group_.post(h, std::move(body));
    if (target.tokens.empty()) group_.rows_window(needs_.op.rank, target.gateway).leave(tag());
  }
  announced_ = true;
}

bool HostCrossing::start() {
  for (std::size_t i = 0; i < sources_.size(); ++i) {
    Source& source = sources_[i];
    if (!routes() && source.announcement.num_tokens != 0 && !recall_places(i)) return false;
    if (source.announcement.num_tokens == 0) pass_arrival(source);
  }
  started_ = true;
  return true;
}

// Finds where the source's rows lie, as each rank of this node has kept it from the dispatch.
bool HostCrossing::recall_places(std::size_t index) {
  Source& source = sources_[index];
  kernels::SourcePlaces& places = places_[index];
  places.reset(shape_.num_ranks, shape_.num_experts(), shape_.per_expert);
  source.sources.assign(shape_.num_ranks, {});
  kernels::Placement placement;
  for (const std::uint32_t rank : span_.near_ranks()) {
    if (!needs_.peers.holds_rows(rank, source.announcement.operation.routing)) continue;
    const OperationPeers::RoutedRows rows =
        needs_.peers.routed_rows(rank, source.announcement.operation.routing);
    if (rows.placement == nullptr) return false;
    placement.reset(shape_.num_ranks, shape_.num_experts(), shape_.per_expert);
    std::copy_n(rows.placement, placement.words().size(), placement.words().begin());
    places.take(rank, placement);
    source.sources[rank] = {rows.y, rows.y_weights};
  }
  return true;
}

// The far rank's operation is no longer under way on this node.
void HostCrossing::pass_arrival(Source& source) {
  source.arrived = true;
  if (!is_dispatch()) group_.sums_window(needs_.op.rank, source.rank).leave(tag());
  const std::uint64_t now_ns = MonotonicClock().now_ns();
  for (const std::uint32_t rank : span_.near_ranks())
    give_signal(needs_.peers.peer(rank).arrived[source.rank], tag(), now_ns);
  needs_.peers.ring();
}

void HostCrossing::merge(const kernels::CombineArgs& args) {
  merge_.emplace(kernels::FarMergeArgs{args, nodes_, whole_domains_, shape_.crc});
  more_sums_ = true;
}

// ---- steps

bool HostCrossing::sent() const {
  if (!is_dispatch()) return merge_ && merged_ == needs_.op.num_tokens;
  return std::all_of(targets_.begin(), targets_.end(), [](const Target& target) {
    return !target.packing && target.packed == target.tokens.size();
  });
}

bool HostCrossing::wants_to_pack(const Target& target) const {
  return (is_dispatch() ? started_ : announced_) && !target.packing && target.packed < target.tokens.size();
}
bool HostCrossing::may_pack(const Target& target) const {
  return wants_to_pack(target) && group_.room_for_rows(needs_.op.rank, target.gateway, tag()) != 0;
}
bool HostCrossing::may_forward(const Source& source) const {
  return is_dispatch() && started_ && !source.busy && !source.arrived && !source.held.empty();
}
bool HostCrossing::wants_to_serve(const Source& source) const {
  return !is_dispatch() && started_ && !source.busy && !source.arrived && !source.held.empty() &&
         source.held.begin()->first == source.next_asks;
}
bool HostCrossing::may_serve(const Source& source) const {
  return wants_to_serve(source) && group_.room_for_sums(needs_.op.rank, source.rank, tag()) != 0;
}

bool HostCrossing::can_step() const {
  if (std::any_of(jobs_.begin(), jobs_.end(), [](const Job& job) { return !job.work->waiting(); }))
    return true;
  if (more_sums_ && merge_ && !merging_) return true;
  return std::any_of(targets_.begin(), targets_.end(), [this](const Target& t) { return may_pack(t); }) ||
         std::any_of(sources_.begin(), sources_.end(),
                     [this](const Source& s) { return may_forward(s) || may_serve(s); });
}

bool HostCrossing::step() {
  if (begin_job()) return true;
  for (auto job = jobs_.begin(); job != jobs_.end(); ++job) {
    const bool ran = job->work->run_chunk();
    if (job->work->done()) {
      const Job ended = std::move(*job);
      jobs_.erase(job);
      ended.done();
      return true;
    }
    if (ran) return true;  // else its rest runs on helpers
  }
  return false;
}

// At most one job of each kind for each far node and each far rank.
bool HostCrossing::begin_job() {
  for (Target& target : targets_) {
    if (may_pack(target)) return begin_pack(target), true;
    if (wants_to_pack(target)) group_.wants_rows(needs_.op.rank, target.gateway);
  }
  for (std::size_t i = 0; i < sources_.size(); ++i) {
    if (may_forward(sources_[i])) return begin_forward(i), true;
    if (may_serve(sources_[i])) return begin_serve(i), true;
    if (wants_to_serve(sources_[i])) group_.wants_sums(needs_.op.rank, sources_[i].rank);
  }
  if (!more_sums_ || !merge_ || merging_) return false;
  begin_merge();
  return true;
}

void HostCrossing::run(RowWork::Body body, std::uint32_t items, std::uint64_t bytes,
                       std::function<void()> done) {
  jobs_.push_back({std::make_unique<RowWork>(std::move(body), items, bytes, needs_.share), std::move(done)});
}

// ---- what it waits for

std::uint32_t HostCrossing::awaited() const {
  if (started_ && !is_dispatch() && !sent()) {
    for (const Target& target : targets_) {
      if (target.sums.empty() && !target.tokens.empty()) return target.gateway;
    }
  }
  return OperationInFlight::kNobody;
}

std::string HostCrossing::waits_for() const {
  const auto of = [this](std::uint32_t rank) { return " of " + group_.name_of_rank(rank); };
  for (const Target& target : targets_) {
    if (wants_to_pack(target) && !may_pack(target))
      return std::string("a credit for ") + (is_dispatch() ? "rows" : "asks") + of(target.gateway) + ", " +
             std::to_string(target.packed) + " of " + std::to_string(target.tokens.size()) + " packed";
  }
  for (const Source& source : sources_) {
    if (!source.announced) return "the announcement" + of(source.rank);
    if (!started_ || source.arrived || may_forward(source) || may_serve(source)) continue;
    return (source.held.empty() ? "records " : "a credit for sums, records ") + std::to_string(source.done) +
           " of " + std::to_string(source.announcement.num_tokens) + of(source.rank);
  }
  if (const std::uint32_t rank = awaited(); rank != OperationInFlight::kNobody) return "sums" + of(rank);
  return "";
}

}  // namespace epd::device
