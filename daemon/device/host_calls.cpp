#include "host_calls.h"

#include "base/log.h"

#include <algorithm>
#include <atomic>
#include <utility>

namespace epd::device {

using namespace kernels;  // NOLINT: calls are described there

namespace {

// A word that the client shares.
template <typename T>
std::atomic_ref<T> shared(const T& word) {
  return std::atomic_ref(const_cast<T&>(word));  // NOLINT: it wants what it may write
}

abi::CallEnding ending_of(Verdict verdict) {
  if (verdict == Verdict::kNoop) return abi::CallEnding::kCarriedOut;
  return verdict == Verdict::kDiscard ? abi::CallEnding::kDiscarded : abi::CallEnding::kFailed;
}

}  // namespace

HostCalls::HostCalls(const LaneShape& shape, const Needs& needs)
    : shape_(shape), needs_(needs), routes_(shape.limits.num_routes) {}

// The ring continues where a former engine stopped.
void HostCalls::open(const Layout& layout) {
  layout_ = layout;
  state_.sequence[kByHost] = shared(results().host_ended).load(std::memory_order_relaxed);
  for (const abi::CallResult& place : results().places)
    state_.results =
        std::max(state_.results,
                 static_cast<std::uint32_t>(shared(place.words[0]).load(std::memory_order_relaxed) >> 32));
}

void HostCalls::set_limits(const Limits& limits) {
  state_.sms = limits.sms;
  state_.timeout_ms = limits.timeout_ms;
}

// An operation that every rank has completed, so that it may have succeeded for its peers, gets a last look.
void HostCalls::halt() {
  while (running_ && running_->stage() == abi::OpStage::kWaitArrived && advance()) continue;
  if (running_) {
    running_->abort();
    conclude(running_->result());
  }
  state_.enabled_epoch_taken = 0;
}

void HostCalls::resume(const Start& start) {
  EPD_CHECK(!takes() && start.routes.size() == routes_.size());
  std::copy(start.routes.begin(), start.routes.end(), routes_.begin());
  view_ = start.view;
  peers_.assign(start.peers.begin(), start.peers.end());
  state_.epoch = start.epoch;
  state_.index = start.index;
  state_.index_base = start.index_base;
  state_.changed_epoch = start.changed_epoch;
  state_.failed = 0;
  state_.enabled_epoch_taken = 1;
}

const CallPort::Ring* HostCalls::seen() {
  if (!std::exchange(looked_, false)) return nullptr;
  for (std::uint32_t i = 0; i < abi::kCallSlots; ++i) {
    for (std::uint32_t word = 0; word < abi::PackedCall::kWords; ++word)
      ring_.host_calls[i].words[word] =
          shared(words().host_calls[i].words[word]).load(std::memory_order_relaxed);
  }
  ring_.host_ended = shared(results().host_ended).load(std::memory_order_relaxed);
  return &ring_;
}

std::uint64_t HostCalls::deadline_ns() const {
  return running_ ? deadline_ns_ : CallPort::deadline_ns();
}

// ---- the ranks of the operation

Peer HostCalls::peer(std::uint32_t rank) const {
  Peer peer;
  compose_peer(peer, view_.exchange, peers_[rank], call_);
  return peer;
}

OperationPeers::RoutedRows HostCalls::routed_rows(std::uint32_t rank, std::uint64_t routing) const {
  const PeerView& there = peers_[rank];
  const std::uint32_t route =
      peer(view_.rank).announcement[rank].route;  // each rank chooses its records itself
  if (route >= shape_.limits.num_routes) return {};
  const std::byte* const half =
      find_routing(reinterpret_cast<const std::byte*>(there.exchange), view_.exchange, route, routing);
  if (half == nullptr) return {};
  return {reinterpret_cast<const std::int32_t*>(half + view_.exchange.placement),
          there.y.at<const std::uint16_t>(call_.slot), there.y_weights.at<const float>(call_.slot)};
}

// ---- taking calls

// Each word is read once. It says by itself whether it is of that call.
abi::PackedCall HostCalls::next() const {
  abi::PackedCall packed;
  const abi::PackedCall& place = words().host_calls[state_.sequence[kByHost] % abi::kCallSlots];
  for (std::uint32_t i = 0; i < abi::PackedCall::kWords; ++i)
    packed.words[i] = shared(place.words[i]).load(std::memory_order_acquire);
  return packed;
}

bool HostCalls::can_advance() const {
  if (running_) return running_->can_advance();
  return is_there(next(), state_.sequence[kByHost]) && (!takes() || layout_.group->may_begin());
}

bool HostCalls::take() {
  const abi::PackedCall packed = next();
  Judgement judgement = judge_call(state_, shape_.limits, kByHost, packed);
  if (judgement.verdict == Verdict::kWait) return false;
  if (takes() && !layout_.group->may_begin()) return false;
  const abi::Call call = abi::unpack(packed);
  if (judgement.verdict == Verdict::kRun) judgement = judge_routing(state_, call, routes_[call.route]);
  if (judgement.verdict == Verdict::kRun) {
    begin(packed, call);
  } else {
    end_unrun(packed, call, judgement);
  }
  return true;
}

void HostCalls::begin(const abi::PackedCall& packed, const abi::Call& call) {
  packed_ = packed;
  call_ = kernels::take(state_, shape_.limits.depth, kByHost, call, routes_[call.route]);
  ++state_.index;
  ++state_.journal;
  state_.results = call_.writing;
  state_.sequence[kByHost] = call.number + 1;
  counted_ = sent_ = expired_ = false;
  begun_ns_ = needs_.clock.now_ns();
  deadline_ns_ = begun_ns_ + std::uint64_t{call_.timeout_ms} * 1'000'000;
  running_.emplace(is_dispatch(call_) ? Kind::kDispatch : Kind::kCombine, compose(view_, call_),
                   HostOperation::Needs{*this,
                                        needs_.plans,
                                        call_.route,
                                        {&needs_.sms, call_.sms, needs_.priority},
                                        shape_.sum_ranks,
                                        shape_.far,
                                        layout_.waits});
}

// Ends a call that is not to be run, noops included. If calls before it were never found, they are lost and
// end with it.
void HostCalls::end_unrun(const abi::PackedCall& packed, const abi::Call& call, const Judgement& judgement) {
  const bool well = judgement.verdict == Verdict::kNoop;
  const std::uint32_t ended = call.number + 1 - state_.sequence[kByHost];
  if (!well) shared(words().failed).fetch_add(ended, std::memory_order_relaxed);
  state_.sequence[kByHost] = call.number + 1;
  OpResult result = ending(judgement.error, judgement.failed_rank);
  result.rows = judgement.rows;
  result.room = judgement.room;
  const std::uint64_t index = state_.index + state_.index_base;
  if (abi::place_of(call.result) < abi::kResultPlaces) state_.results = next_writing(state_);
  publish_end(call, ending_of(judgement.verdict), result, state_.results, index);
  if (judgement.verdict == Verdict::kDiscard) return;
  if (!well) state_.failed = 1;
  result.tag = well ? ++state_.noops : 0;
  note(packed, result, state_.index);
}

// ---- carrying out

bool HostCalls::advance() {
  if (!running_) return take();
  bool progress = running_->advance();
  progress |= tell_news();
  if (!running_->ended() && !progress && needs_.clock.now_ns() >= deadline_ns_) expire();
  if (!running_->ended()) return progress;
  conclude(running_->result());
  return true;
}

// Tells the client what it may know before the operation has ended.
bool HostCalls::tell_news() {
  if (!is_dispatch(call_)) return false;
  const bool counts = !counted_ && running_->counted();
  const bool sent = !sent_ && has_flag(call_, abi::kFlagDefer) && running_->sent();
  if (counts) tell_counts();
  if (sent) shared(results().sent[call_.slot]).store(call_.result + 1, std::memory_order_release);
  counted_ |= counts;
  sent_ |= sent;
  if (counts || sent) layout_.group->ring_client();
  return counts || sent;
}

void HostCalls::tell_counts() {
  auto* to = reinterpret_cast<std::uint64_t*>(layout_.results->bytes() + sizeof(abi::Results) +
                                              layout_.counts_stride * call_.slot);
  const std::uint64_t upper = std::uint64_t{call_.result + 1} << 32;
  for (const std::int32_t word : running_->counts().words())
    shared(*to++).store(upper | static_cast<std::uint32_t>(word), std::memory_order_release);
}

// The result says which rank it waited for.
void HostCalls::expire() {
  expired_ = true;
  waited_for_ = running_->waits_for();
  running_->abort();
}

// Selections whose rows went to ranks that have been lost since.
std::uint32_t HostCalls::count_lost() const {
  const std::uint64_t routing = call_.routing_tag;
  if (abi::epoch_of_tag(routing) >= state_.changed_epoch) return 0;
  std::vector<std::uint8_t> lost(view_.shape.num_ranks);
  for (std::uint32_t rank = 0; rank < lost.size(); ++rank)
    lost[rank] = layout_.group->holds_rows(rank, routing) ? 0 : 1;
  return running_->count_selections(lost);
}

void HostCalls::conclude(OpResult result) {
  if (expired_) result.error = OpError::kDeadline;
  result.tag = call_.tag;
  result.ran_ns = needs_.clock.now_ns() - begun_ns_;
  const bool well = result.error == OpError::kNone;
  if (well) {
    tell_news();
    if (makes_routing(call_)) {
      routes_[call_.route] = made_route(call_);
    } else if (call_.num_tokens != 0) {
      result.num_dropped = compose(view_, call_).routing.record->num_dropped + count_lost();
    }
  } else {
    state_.failed = 1;
    shared(words().failed).fetch_add(1, std::memory_order_relaxed);
  }
  running_.reset();
  const std::uint64_t index = abi::index_of_tag(call_.tag);
  publish_end(abi::unpack(packed_), well ? abi::CallEnding::kCarriedOut : abi::CallEnding::kFailed, result,
              call_.writing, index + state_.index_base);
  note(packed_, result, index);
}

// ---- telling

void HostCalls::publish_end(const abi::Call& call, abi::CallEnding ending, const OpResult& result,
                            std::uint32_t writing, std::uint64_t index) {
  using Word = abi::CallResult::Word;
  const std::uint32_t place = abi::place_of(call.result);
  if (place < abi::kResultPlaces) {
    const auto write = [&](Word word, std::uint32_t value) {
      shared(results().places[place].words[word])
          .store(std::uint64_t{writing} << 32 | value, std::memory_order_release);
    };
    write(Word::kEnding, static_cast<std::uint32_t>(ending));
    write(Word::kRows, result.num_recv_rows);
    write(Word::kDropped, result.num_dropped);
    write(Word::kRan, static_cast<std::uint32_t>(result.ran_ns / 1000));
    write(Word::kResult, call.result);
    write(Word::kIndexLow, static_cast<std::uint32_t>(index));
    write(Word::kIndexHigh, static_cast<std::uint32_t>(index >> 32));
    write(Word::kRuns, 1);
  }
  shared(results().host_ended).store(call.number + 1, std::memory_order_release);
  layout_.group->ring_client();
}

void HostCalls::note(const abi::PackedCall& packed, const OpResult& result, std::uint64_t index) {
  Ended& ended = journal_.emplace_back();
  ended.entry.call = packed;
  ended.entry.result = result;
  ended.entry.index = index;
  ended.entry.ring = kByHost;
  ended.waited_for = std::exchange(waited_for_, {});
}

}  // namespace epd::device
