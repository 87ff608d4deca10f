#include "calls.h"

#include <atomic>
#include <utility>

namespace epd::client {
namespace {

template <typename T>
T load(const T& word, std::memory_order order) {
  return std::atomic_ref(const_cast<T&>(word)).load(order);  // NOLINT: it wants what it may write
}

// Tickets of different groups differ, so none is taken for another group's.
std::uint32_t next_serial() {
  static std::atomic<std::uint32_t> last{0};
  return last.fetch_add(1, std::memory_order_relaxed) + 1;
}

}  // namespace

void Calls::open(ResultsMemory results, const abi::GroupShape& shape) {
  results_ = std::move(results);
  shape_ = shape;
  known_.resize(abi::kOnceResults);
  host_tail = host_ended();
}

epd_ticket_t Calls::begin(abi::Op op, std::uint32_t slot, bool by_host, bool captured) {
  std::uint32_t& next = captured ? replayed_ : once_;
  const std::uint32_t places = captured ? abi::kReplayedResults : abi::kOnceResults;
  for (std::uint32_t tried = 0; tried < places; ++tried, ++next) {
    const std::uint32_t place = next % places + (captured ? abi::kOnceResults : 0);
    if (place >= known_.size()) known_.resize(place + 1);
    KnownCall& call = known_[place];
    if (!call.waiting_hook.empty() || call.holds_outputs || holds_route(call)) continue;
    const std::uint32_t result = abi::result_of(place, next / places);
    abi::CallEnd end;
    if (read_end(result, end)) continue;  // it was passed over in all laps since
    call = {};
    call.epoch = epoch;
    call.result = result;
    call.ticket = CallTicket{op, slot, by_host, call.result, next_serial()}.pack();
    ++next;
    return call.ticket;
  }
  return 0;
}

KnownCall* Calls::find(epd_ticket_t ticket) {
  if (!CallTicket::is(ticket)) return nullptr;  // also 0, the ticket of an empty place
  const std::uint32_t place = abi::place_of(CallTicket::unpack(ticket).result);
  return place < known_.size() && known_[place].ticket == ticket ? &known_[place] : nullptr;
}

void Calls::forget(epd_ticket_t ticket) {
  KnownCall* const call = find(ticket);
  if (call == nullptr) return;
  const KnownCall retired = std::move(*call);
  *call = {};
  call->epoch = retired.epoch;
  call->result = retired.result;
  call->kept_route = retired.kept_route;
  call->holds_outputs = retired.holds_outputs;
}

bool Calls::ended_well(epd_ticket_t ticket) const {
  abi::CallEnd end;
  return read_end(CallTicket::unpack(ticket).result, end) && end.ending == abi::CallEnding::kCarriedOut;
}

bool Calls::ended_badly(epd_ticket_t ticket) const {
  abi::CallEnd end;
  return read_end(CallTicket::unpack(ticket).result, end) && end.ending != abi::CallEnding::kCarriedOut;
}

void Calls::outputs_done(epd_ticket_t ticket) {
  known_[abi::place_of(CallTicket::unpack(ticket).result)].holds_outputs = false;
}

void Calls::cancel(epd_ticket_t ticket) {
  if (KnownCall* const call = find(ticket); call != nullptr) *call = {};
}

bool Calls::holds_route(const KnownCall& call) const {
  abi::CallEnd end;
  return call.kept_route != 0 && call.epoch == epoch && !read_end(call.result, end);
}

bool Calls::uses(std::uint32_t route) const {
  return std::any_of(known_.begin(), known_.end(),
                     [&](const KnownCall& call) { return call.kept_route == route && holds_route(call); });
}

bool Calls::ended(const KnownCall& call, abi::CallEnd& end) const {
  return read_end(call.result, end) && end.runs != call.runs_taken;
}

bool Calls::read_end(std::uint32_t result, abi::CallEnd& end) const {
  const abi::CallResult& place = results().places[abi::place_of(result)];
  std::uint64_t words[abi::CallResult::kWords];
  for (std::uint32_t i = 0; i < abi::CallResult::kWords; ++i)
    words[i] = load(place.words[i], std::memory_order_acquire);
  return abi::read_result(words, end) && end.result == result;
}

bool Calls::sent(epd_ticket_t ticket) const {
  const CallTicket about = CallTicket::unpack(ticket);
  return load(results().sent[about.slot], std::memory_order_acquire) == about.result + 1;
}

const std::uint64_t* Calls::counts_of(std::uint32_t slot) const {
  const abi::ResultsLayout layout(shape_);
  return reinterpret_cast<const std::uint64_t*>(results_.address() + layout.counts +
                                                layout.counts_stride * slot);
}

bool Calls::counted(epd_ticket_t ticket) const {
  const CallTicket about = CallTicket::unpack(ticket);
  const std::uint64_t* const words = counts_of(about.slot);
  for (std::uint64_t i = abi::placement_words(shape_); i-- > 0;) {
    if (load(words[i], std::memory_order_relaxed) >> 32 != about.result + 1) return false;
  }
  std::atomic_thread_fence(std::memory_order_acquire);  // the regions of the same counts were written before
  return true;
}

void Calls::read_counts(std::uint32_t slot, epd_counts_t& counts) {
  const abi::PlacementParts at(shape_);
  const std::uint64_t* const words = counts_of(slot);
  std::vector<std::int32_t>& own = counts_[slot];
  own.resize(at.words);
  for (std::uint64_t i = 0; i < at.words; ++i)
    own[i] = static_cast<std::int32_t>(load(words[i], std::memory_order_relaxed));
  const std::uint32_t experts = shape_.experts_per_rank();
  counts.rank_offsets = own.data() + at.rank_offsets;
  counts.expert_counts = own.data() + at.expert_counts;
  counts.expert_offsets = shape_.per_expert() ? own.data() + at.expert_offsets : nullptr;
  counts.num_recv_rows = 0;
  if (shape_.layout == abi::Layout::kExpert) {
    for (std::uint32_t e = 0; e < experts; ++e)
      counts.num_recv_rows += static_cast<std::uint32_t>(counts.expert_counts[e]);
  } else {
    counts.num_recv_rows = static_cast<std::uint32_t>(
        shape_.per_expert() ? counts.expert_offsets[experts] : counts.rank_offsets[shape_.num_ranks]);
  }
}

bool Calls::has_stream_room() {
  if (unawaited_.size() < abi::kCallSlots) return true;
  abi::CallEnd end;
  std::erase_if(unawaited_,
                [&](epd_ticket_t ticket) { return read_end(CallTicket::unpack(ticket).result, end); });
  return unawaited_.size() < abi::kCallSlots;
}

void Calls::note_stream_wait(epd_ticket_t ticket) {
  const auto found = std::find(unawaited_.begin(), unawaited_.end(), ticket);
  if (found != unawaited_.end()) unawaited_.erase(unawaited_.begin(), found + 1);
}

std::uint32_t Calls::host_ended() const {
  return load(results().host_ended, std::memory_order_acquire);
}

void Calls::drop_ended_host_calls() {
  const std::uint32_t ended = host_ended();
  std::erase_if(host_calls_, [ended](const HostCall& call) {
    return static_cast<std::int32_t>(ended - call.number) > 0;  // both numbers are cyclic
  });
}

epd_ticket_t Calls::host_call_on(std::uint32_t slot) {
  drop_ended_host_calls();
  const auto found = std::find_if(host_calls_.begin(), host_calls_.end(), [slot](const HostCall& call) {
    return CallTicket::unpack(call.ticket).slot == slot;
  });
  return found != host_calls_.end() ? found->ticket : 0;
}

bool Calls::host_calls_due(SteadyClock::time_point then) {
  drop_ended_host_calls();
  return std::any_of(host_calls_.begin(), host_calls_.end(),
                     [then](const HostCall& call) { return then > call.answer_by; });
}

std::uint64_t Calls::host_timeouts_ms() const {
  std::uint64_t all = 0;
  for (const HostCall& call : host_calls_) all += call.timeout_ms;
  return all;
}

void Calls::note_host_call(epd_ticket_t ticket, std::uint32_t timeout_ms, SteadyClock::time_point answer_by) {
  host_calls_.push_back({ticket, host_tail++, timeout_ms, answer_by});
}

// The device counts it in host_ended() a moment later.
void Calls::note_host_end(epd_ticket_t ticket) {
  std::erase_if(host_calls_, [ticket](const HostCall& call) { return call.ticket == ticket; });
}

void Calls::begin_epoch(std::uint64_t next, std::uint32_t failed_before) {
  epoch = next;
  failed = failed_before;
  host_calls_.clear();
  unawaited_.clear();
}

}  // namespace epd::client
