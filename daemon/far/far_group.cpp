#include "far/far_group.h"

#include "common/status.h"
#include "far/flow.h"
#include "far/seal.h"

#include <algorithm>
#include <string>
#include <utility>

namespace epd::far {

using abi::FarHeader;
using abi::FarType;

// The traffic with one far engine.
struct FarGroup::Channel {
  std::uint64_t greetings = 0;  // the last number given to one
  std::uint64_t others = 0;
  const Pair* last = nullptr;  // of the last message, until an empty one has followed
  std::uint64_t last_ns = 0;   // of the first step since that message; 0: there was none
  Sequence came;
  std::optional<MacKey> out;
  std::optional<MacKey> in;  // of the sender's latest beginning that is known
  std::uint64_t in_began_ns = 0;
  std::string fault;          // "": none in this epoch
  std::uint64_t told_ns = 0;  // when it was told last
};

// An operation wants credits of a window that has none.
struct FarGroup::Stall {
  bool wanted = false;
  std::uint64_t since_ns = 0;    // 0: it is not counted yet
  std::uint64_t counted_ns = 0;  // up to here
};

// The windows between a rank here and a far rank.
struct FarGroup::Pair {
  Pair(std::uint32_t own, std::uint32_t other, const FarSizes& sizes)
      : rank(own),
        far_rank(other),
        rows(sizes.window),
        sums(sizes.window),
        row_debt(sizes.window),
        sum_debt(sizes.window),
        row_buffers(std::make_shared<BufferPool>(sizes.batch_bytes, sizes.window)),
        sum_buffers(std::make_shared<BufferPool>(sizes.batch_bytes, sizes.window)) {}

  std::uint32_t rank;
  std::uint32_t far_rank;
  bool to_gateway = false;    // the far rank is this one's gateway
  bool for_far_rank = false;  // this one is the far rank's gateway
  Window rows;
  Window sums;
  Stall row_stall;
  Stall sum_stall;
  Debt row_debt;
  Debt sum_debt;
  std::shared_ptr<BufferPool> row_buffers;
  std::shared_ptr<BufferPool> sum_buffers;
};

// The operations of a rank here.
struct FarGroup::Rank {
  std::uint64_t next = 0;                                 // operations below have ended
  std::set<std::uint64_t> ended;                          // later ones that have ended
  std::map<std::uint64_t, Receiver*> open;                // by tag
  std::map<std::uint64_t, std::vector<Arrival>> waiting;  // by tag: for operations that are not open yet
};

struct FarGroup::State {
  State(const Epoch& e, const abi::GroupShape& shape)
      : epoch(e.epoch),
        engines(e.engines.begin(), e.engines.end()),
        key(e.key),
        began_ns(e.now_ns),
        span({e.nodes, e.masked, e.node, shape.sum_ranks}) {}

  std::uint64_t epoch;
  std::vector<EngineId> engines;  // [R]
  EpochKey key;
  std::uint64_t began_ns;
  Span span;
  FarSizes sizes;
  std::map<std::uint32_t, Rank> ranks;  // here
  std::map<std::pair<std::uint32_t, std::uint32_t>, Pair> pairs;
  std::map<EngineId, Channel> channels;
  std::deque<std::unique_ptr<Message>> outgoing;
};

FarGroup::FarGroup(const Facts& facts, Port& port) : facts_(facts), port_(port) {}
FarGroup::~FarGroup() {
  end();
}

void FarGroup::begin(const Epoch& epoch) {
  EPD_CHECK(state_ == nullptr);
  state_ = std::make_unique<State>(epoch, facts_.shape);
  State& s = *state_;
  std::size_t most_ranks = s.span.near_ranks().size();
  for (const std::uint32_t node : s.span.far_nodes())
    most_ranks = std::max(most_ranks, s.span.ranks_of(node).size());
  s.sizes =
      FarSizes(facts_.shape, static_cast<std::uint32_t>(most_ranks), facts_.batch_bytes, facts_.window_bytes);
  const auto pair_of = [&s](std::uint32_t rank, std::uint32_t far_rank) -> Pair& {
    return s.pairs.try_emplace({rank, far_rank}, rank, far_rank, s.sizes).first->second;
  };
  for (const std::uint32_t rank : s.span.near_ranks()) {
    if (s.engines[rank] != facts_.engine) continue;
    s.ranks[rank].next = epoch.first_index;
    for (const std::uint32_t node : s.span.far_nodes())
      pair_of(rank, s.span.gateway(rank, node)).to_gateway = true;
    for (const std::uint32_t far_rank : s.span.served_by(rank)) pair_of(rank, far_rank).for_far_rank = true;
  }
}

void FarGroup::end() {
  if (state_ == nullptr) return;
  for (auto& [number, rank] : state_->ranks) {
    EPD_CHECK(rank.open.empty());
    for (auto& [tag, arrivals] : rank.waiting) {
      for (const Arrival& arrival : arrivals) port_.release(arrival.body);
    }
  }
  state_.reset();
  faults_.clear();
}

// A rank sends rows to its gateways and gets sums from them. As a gateway it does the reverse.
std::uint64_t FarGroup::memory_bytes() const {
  std::uint64_t windows = 0;
  for (const auto& [ranks, with] : state_->pairs)
    windows += (with.to_gateway ? 2u : 0u) + (with.for_far_rank ? 2u : 0u);
  return windows * state_->sizes.window * state_->sizes.batch_bytes;
}

std::uint64_t FarGroup::memory_bytes(EngineId engine) const {
  std::uint64_t windows = 0;
  for (const auto& [ranks, with] : state_->pairs) {
    if (engine_of(with.far_rank) != engine) continue;
    windows += (with.to_gateway ? 2u : 0u) + (with.for_far_rank ? 2u : 0u);
  }
  return windows * state_->sizes.window * state_->sizes.batch_bytes;
}

EngineId FarGroup::engine_of(std::uint32_t rank) const {
  return state_->engines.at(rank);
}

std::string FarGroup::name_of_rank(std::uint32_t rank) const {
  const std::string node = facts_.ledger == nullptr ? "" : facts_.ledger->node_name(engine_of(rank));
  return "rank " + std::to_string(rank) + " on " +
         (node.empty() ? "node " + std::to_string(span().node_of(rank)) : node);
}

const Span& FarGroup::span() const {
  return state_->span;
}
const FarSizes& FarGroup::sizes() const {
  return state_->sizes;
}

FarGroup::Pair& FarGroup::pair(std::uint32_t rank, std::uint32_t far_rank) {
  const auto found = state_->pairs.find({rank, far_rank});
  EPD_CHECK(found != state_->pairs.end());
  return found->second;
}

// ---- judging

void FarGroup::received(EngineId from, std::span<const std::byte> header, const Body& body) {
  Arrival arrival{{}, body};
  Drop drop = judge(from, header, body, arrival.header);
  if (drop == Drop::kNone) drop = check(from, arrival);
  if (drop == Drop::kNone) drop = take_in(arrival);
  if (drop == Drop::kNone) return count_batch(arrival.header, from, false);
  this->drop(from, drop);
  port_.release(body);
}

void FarGroup::drop(EngineId from, Drop why) {
  drops_.count(why);
  if (facts_.ledger != nullptr) facts_.ledger->dropped(from, why);
}

void FarGroup::drop_content(const FarHeader& header, Drop why) {
  const EngineId from = engine_of(header.from_rank);
  if (why == Drop::kChecksum) add_corrupt(from, header, "checksum");
  drop(from, why);
}

Drop FarGroup::judge(EngineId from, std::span<const std::byte> bytes, const Body& body,
                     FarHeader& header) const {
  if (abi::read_far_header(bytes, body.bytes, header) != abi::FarReason::kNone) return Drop::kHeader;
  switch (header.type) {
    case FarType::kAnnounce:
    case FarType::kRows:
    case FarType::kAsk:
    case FarType::kSums:
    case FarType::kDone:
    case FarType::kCredit: break;
    default: return Drop::kType;
  }
  if (header.group != facts_.id) return Drop::kGroup;
  if (state_ == nullptr) return Drop::kBroken;
  if (abi::epoch_of_tag(header.tag) != state_->epoch) return Drop::kEpoch;
  const std::vector<EngineId>& engines = state_->engines;
  if (header.from_rank >= engines.size() || engines[header.from_rank] != from) {
    const bool known = std::find(engines.begin(), engines.end(), from) != engines.end();
    return known ? Drop::kRanks : Drop::kEngine;
  }
  if (header.token != message_token(state_->key, from, facts_.engine)) return Drop::kToken;
  if (Drop drop = judge_ranks(header); drop != Drop::kNone) return drop;
  return judge_sizes(header);
}

// Rows and asks go to a gateway, sums come from one. A kDone ends either.
Drop FarGroup::judge_ranks(const FarHeader& header) const {
  const auto found = state_->pairs.find({header.to_rank, header.from_rank});
  if (found == state_->pairs.end()) return Drop::kRanks;
  const Pair& pair = found->second;
  switch (header.type) {
    case FarType::kAnnounce:
    case FarType::kRows:
    case FarType::kAsk: return pair.for_far_rank ? Drop::kNone : Drop::kRanks;
    case FarType::kSums: return pair.to_gateway ? Drop::kNone : Drop::kRanks;
    default: return Drop::kNone;
  }
}

Drop FarGroup::judge_sizes(const FarHeader& header) const {
  const FarSizes& sizes = state_->sizes;
  const auto fits = [&](std::uint64_t stride) {
    return header.body_bytes <= sizes.batch_bytes &&
           abi::check_far_records(header, stride) == abi::FarReason::kNone;
  };
  bool good = true;
  switch (header.type) {
    case FarType::kRows:  // the operation tells which format: HostCrossing::receive_batch
      good = std::any_of(sizes.row_stride.begin(), sizes.row_stride.end(),
                         [&](std::uint32_t stride) { return stride != 0 && fits(stride); });
      break;
    case FarType::kAsk: good = fits(sizes.ask_stride); break;
    case FarType::kSums: good = fits(sizes.sum_stride[0]) || fits(sizes.sum_stride[1]); break;
    case FarType::kAnnounce: {
      const std::uint64_t near = state_->span.near_ranks().size();
      good = header.records == 0 || header.records == near * (1 + facts_.shape.experts_per_rank());
      break;
    }
    default: break;
  }
  return good ? Drop::kNone : Drop::kRecords;
}

// Whether the message has come as it was sent, and once. Its number counts in any case, so a dropped message
// is no gap.
Drop FarGroup::check(EngineId from, const Arrival& arrival) {
  const FarHeader& header = arrival.header;
  const std::span<const std::byte> body(arrival.body.data, arrival.body.bytes);
  const bool whole = body_is_whole(header, body, facts_.check);
  if (!whole || !is_authentic(from, header, body)) {
    add_corrupt(from, header, whole ? "MAC" : "checksum");
    return Drop::kChecksum;
  }
  return state_->channels[from].came.take(header.time_ns, header.number, now_ns_) ? Drop::kNone
                                                                                  : Drop::kNumber;
}

bool FarGroup::is_authentic(EngineId from, const FarHeader& header, std::span<const std::byte> body) {
  if (facts_.check != abi::FarCheck::kMac) return true;
  Channel& channel = state_->channels[from];
  if (channel.in && channel.in_began_ns == header.time_ns) return channel.in->verify(header, body);
  MacKey key(state_->key, from, facts_.engine, header.time_ns);
  if (!key.verify(header, body)) return false;
  if (header.time_ns > channel.in_began_ns) {
    channel.in = std::move(key);
    channel.in_began_ns = header.time_ns;
  }
  return true;
}

void FarGroup::add_fault(EngineId engine, const std::string& what) {
  Channel& channel = state_->channels[engine];
  if (!channel.fault.empty()) return;
  channel.fault = what;
  channel.told_ns = now_ns_;
  faults_.push_back({engine, what});
}

void FarGroup::add_corrupt(EngineId from, const FarHeader& header, const char* wrong) {
  add_fault(from, "sent " + std::string(abi::far_type_name(header.type)) + " of rank " +
                      std::to_string(header.from_rank) + " to rank " + std::to_string(header.to_rank) +
                      " with a wrong " + wrong);
}

// A network drops messages whose outer headers it has corrupted.
void FarGroup::find_gaps() {
  if (facts_.gap_ns == 0) return;
  for (auto& [engine, channel] : state_->channels) {
    if (!channel.fault.empty()) {  // told again: there may have been no coordinator
      if (now_ns_ < channel.told_ns + facts_.gap_ns) continue;
      channel.told_ns = now_ns_;
      faults_.push_back({engine, channel.fault});
      continue;
    }
    const std::uint64_t since_ns = channel.came.gap_since_ns();
    if (since_ns == 0 || now_ns_ < since_ns + facts_.gap_ns) continue;
    add_fault(engine, "sent message " + std::to_string(channel.came.next()) + ", which has not come for " +
                          std::to_string(facts_.gap_ns / 1'000'000) + " ms though later ones have");
  }
}

// A lost message shows when a later one has come. So in a pause an empty credit follows the last one.
void FarGroup::follow_last() {
  if (facts_.gap_ns == 0) return;
  for (auto& [engine, channel] : state_->channels) {
    if (channel.last == nullptr) continue;
    if (channel.last_ns == 0) channel.last_ns = now_ns_;
    if (now_ns_ < channel.last_ns + facts_.gap_ns / 3) continue;
    post_credit(*channel.last);
    channel.last = nullptr;
  }
}

// A batch that waits here for its operation has a credit. Announcements are limited by the operations that
// may have begun. A far rank begins operation i when its operation i - depth has ended: by then this rank has
// begun that one, and so ended its own i - 2 * depth.
Drop FarGroup::take_in(const Arrival& arrival) {
  const FarHeader& header = arrival.header;
  Pair& with = pair(header.to_rank, header.from_rank);
  if (with.rows.credits() + header.row_credits > with.rows.batches() ||
      with.sums.credits() + header.sum_credits > with.sums.batches())
    return Drop::kCredit;
  with.rows.give_back(header.row_credits);
  with.sums.give_back(header.sum_credits);
  if (header.type == FarType::kCredit) {
    port_.release(arrival.body);
    return Drop::kNone;
  }
  Rank& rank = state_->ranks.at(header.to_rank);
  const std::uint64_t index = abi::index_of_tag(header.tag);
  const auto open = rank.open.find(header.tag);
  if (open == rank.open.end() && (index < rank.next || rank.ended.contains(index) ||
                                  index >= rank.next + 2 * std::uint64_t{facts_.shape.depth}))
    return Drop::kOperation;
  Debt* const debt = debt_of(header);
  if (debt != nullptr && !debt->receive()) return Drop::kCredit;
  if (open == rank.open.end()) {
    std::vector<Arrival>& waiting = rank.waiting[header.tag];
    const bool again = debt == nullptr && std::any_of(waiting.begin(), waiting.end(), [&](const Arrival& a) {
                         return a.header.type == header.type && a.header.from_rank == header.from_rank;
                       });
    if (again) return Drop::kTwice;
    waiting.push_back(arrival);
    return Drop::kNone;
  }
  const Drop drop = open->second->receive(arrival);
  if (drop != Drop::kNone && debt != nullptr) debt->settle(now_ns_);
  return drop;
}

Debt* FarGroup::debt_of(const FarHeader& header) {
  Pair& with = pair(header.to_rank, header.from_rank);
  if (header.type == FarType::kRows || header.type == FarType::kAsk) return &with.row_debt;
  return header.type == FarType::kSums ? &with.sum_debt : nullptr;
}

// ---- operations

void FarGroup::open(std::uint32_t number, std::uint64_t tag, Receiver& receiver) {
  Rank& rank = state_->ranks.at(number);
  rank.open[tag] = &receiver;
  const auto found = rank.waiting.find(tag);
  if (found == rank.waiting.end()) return;
  const std::vector<Arrival> arrivals = std::move(found->second);
  rank.waiting.erase(found);
  for (const Arrival& arrival : arrivals) {
    const Drop drop = receiver.receive(arrival);
    if (drop == Drop::kNone) continue;
    this->drop(engine_of(arrival.header.from_rank), drop);
    settle(arrival);
  }
}

void FarGroup::close(std::uint32_t number, std::uint64_t tag) {
  Rank& rank = state_->ranks.at(number);
  if (rank.open.erase(tag) == 0) return;
  rank.ended.insert(abi::index_of_tag(tag));
  while (!rank.ended.empty() && *rank.ended.begin() <= rank.next) {
    rank.next = std::max(rank.next, *rank.ended.begin() + 1);
    rank.ended.erase(rank.ended.begin());
  }
}

Window& FarGroup::rows_window(std::uint32_t rank, std::uint32_t far_rank) {
  return pair(rank, far_rank).rows;
}
Window& FarGroup::sums_window(std::uint32_t rank, std::uint32_t far_rank) {
  return pair(rank, far_rank).sums;
}

std::uint32_t FarGroup::room_for_rows(std::uint32_t rank, std::uint32_t far_rank, std::uint64_t tag) {
  const Pair& with = pair(rank, far_rank);
  return std::min(with.rows.available(tag), with.row_buffers->available());
}
std::uint32_t FarGroup::room_for_sums(std::uint32_t rank, std::uint32_t far_rank, std::uint64_t tag) {
  const Pair& with = pair(rank, far_rank);
  return std::min(with.sums.available(tag), with.sum_buffers->available());
}

Buffer FarGroup::take_rows(std::uint32_t rank, std::uint32_t far_rank, std::uint64_t tag) {
  Pair& with = pair(rank, far_rank);
  with.rows.take(tag);
  return with.row_buffers->take();
}
Buffer FarGroup::take_sums(std::uint32_t rank, std::uint32_t far_rank, std::uint64_t tag) {
  Pair& with = pair(rank, far_rank);
  with.sums.take(tag);
  return with.sum_buffers->take();
}

// row_credits are for rows that came, sum_credits for sums.
void FarGroup::add_credits(FarHeader& header, Pair& with) const {
  header.row_credits = with.row_debt.take();
  header.sum_credits = with.sum_debt.take();
}

void FarGroup::post(const FarHeader& header, Buffer body) {
  State& s = *state_;
  auto message = std::make_unique<Message>();
  message->header = header;
  message->engine = s.engines[header.to_rank];
  message->body = std::move(body);
  count_batch(header, message->engine, true);
  Pair& with = pair(header.from_rank, header.to_rank);
  add_credits(message->header, with);
  s.channels[message->engine].last = &with;
  s.channels[message->engine].last_ns = 0;
  seal(*message);
  s.outgoing.push_back(std::move(message));
}

void FarGroup::seal(Message& message) {
  State& s = *state_;
  FarHeader& h = message.header;
  Channel& channel = s.channels[message.engine];
  h.magic = abi::kFarMagic;
  h.version = abi::kFarVersion;
  h.group = facts_.id;
  h.token = message_token(s.key, facts_.engine, message.engine);
  h.time_ns = s.began_ns;
  h.number = ++(h.type == FarType::kGreeting ? channel.greetings : channel.others);
  if (facts_.check == abi::FarCheck::kMac) {
    if (!channel.out) channel.out.emplace(s.key, facts_.engine, message.engine, s.began_ns);
    channel.out->sign(h, message.bytes());
  }
  far::seal(h, message.bytes(), facts_.check);
}

void FarGroup::count_batch(const FarHeader& header, EngineId engine, bool sent) {
  const bool asks = header.type == FarType::kAsk;
  const bool sums = header.type == FarType::kSums;
  if (facts_.ledger == nullptr || (!asks && !sums && header.type != FarType::kRows)) return;
  const auto kind = static_cast<std::size_t>(asks   ? abi::FarBatch::kAsks
                                             : sums ? abi::FarBatch::kSums
                                                    : abi::FarBatch::kRows);
  abi::FarCounters& counters = facts_.ledger->counters(engine);
  abi::count((sent ? counters.batches_sent : counters.batches_received)[kind]);
  abi::count((sent ? counters.bytes_sent : counters.bytes_received)[kind], header.body_bytes);
}

void FarGroup::settle(const Arrival& arrival) {
  port_.release(arrival.body);
  if (state_ == nullptr) return;
  if (Debt* const debt = debt_of(arrival.header); debt != nullptr) debt->settle(now_ns_);
}

// ---- on its way

bool FarGroup::step(std::uint64_t now_ns) {
  now_ns_ = now_ns;
  if (state_ == nullptr) return false;
  find_gaps();
  give_back_credits();
  follow_last();
  for (auto& [ranks, with] : state_->pairs) {
    count_stall(with, with.rows, with.row_stall);
    count_stall(with, with.sums, with.sum_stall);
  }
  bool sent = false;
  // A full engine does not hold up messages to other engines.
  std::set<EngineId> full;
  for (std::unique_ptr<Message>& message : state_->outgoing) {
    if (full.contains(message->engine)) continue;
    const EngineId engine = message->engine;
    if (port_.send(message)) {
      sent = true;
    } else {
      full.insert(engine);
    }
  }
  std::erase(state_->outgoing, nullptr);
  return sent;
}

void FarGroup::wants_rows(std::uint32_t rank, std::uint32_t far_rank) {
  Pair& with = pair(rank, far_rank);
  with.row_stall.wanted |= with.rows.credits() == 0;
}
void FarGroup::wants_sums(std::uint32_t rank, std::uint32_t far_rank) {
  Pair& with = pair(rank, far_rank);
  with.sum_stall.wanted |= with.sums.credits() == 0;
}

void FarGroup::count_stall(Pair& with, Window& window, Stall& stall) {
  if (!stall.wanted) return;
  if (facts_.ledger != nullptr) {
    abi::FarCounters& counters = facts_.ledger->counters(engine_of(with.far_rank));
    if (stall.since_ns == 0) {
      stall.since_ns = stall.counted_ns = now_ns_;
      abi::count(counters.credit_stalls);
    }
    abi::count(counters.credit_stall_ns, now_ns_ - std::exchange(stall.counted_ns, now_ns_));
    const std::uint64_t lasted_ns = now_ns_ - stall.since_ns;
    if (lasted_ns > counters.longest_stall_ns.load(std::memory_order_relaxed)) {
      counters.longest_stall_ns.store(lasted_ns, std::memory_order_relaxed);
      counters.longest_stall_group.store(facts_.id, std::memory_order_relaxed);
      counters.longest_stall_rank.store(with.far_rank, std::memory_order_relaxed);
    }
  }
  if (window.credits() != 0) stall = {};
}

void FarGroup::give_back_credits() {
  for (auto& [ranks, with] : state_->pairs) {
    if (with.row_debt.is_due(now_ns_) || with.sum_debt.is_due(now_ns_)) post_credit(with);
  }
}

void FarGroup::post_credit(const Pair& with) {
  FarHeader header{};
  header.type = FarType::kCredit;
  header.tag = abi::far_epoch_tag(state_->epoch);
  header.from_rank = static_cast<std::uint16_t>(with.rank);
  header.to_rank = static_cast<std::uint16_t>(with.far_rank);
  post(header, {});
}

std::uint64_t FarGroup::due_ns() const {
  if (state_ == nullptr) return 0;
  std::uint64_t due = 0;
  const auto add = [&due](std::uint64_t one) {
    if (due == 0 || one < due) due = one;
  };
  for (const auto& [ranks, with] : state_->pairs) {
    for (const Debt* debt : {&with.row_debt, &with.sum_debt}) {
      if (const std::uint64_t one = debt->due_ns(); one != 0) add(one);
    }
  }
  if (facts_.gap_ns != 0) {
    for (const auto& [engine, channel] : state_->channels) {
      const std::uint64_t since_ns = channel.fault.empty() ? channel.came.gap_since_ns() : channel.told_ns;
      if (since_ns != 0) add(since_ns + facts_.gap_ns);
      if (channel.last != nullptr) add(channel.last_ns + facts_.gap_ns / 3);
    }
  }
  return state_->outgoing.empty() ? due : std::max<std::uint64_t>(1, now_ns_);
}

std::string FarGroup::unsettled() const {
  if (state_ == nullptr) return "";
  if (!state_->outgoing.empty()) return std::to_string(state_->outgoing.size()) + " messages were not sent";
  for (const auto& [ranks, with] : state_->pairs) {
    const std::string between =
        " of rank " + std::to_string(ranks.first) + " and far rank " + std::to_string(ranks.second);
    for (const Window* window : {&with.rows, &with.sums}) {
      if (window->credits() != window->batches())
        return std::to_string(window->batches() - window->credits()) + " credits are out" + between;
    }
    for (const Debt* debt : {&with.row_debt, &with.sum_debt}) {
      if (debt->held() != 0 || debt->owed() != 0) return "batches are held or owed" + between;
    }
    if (with.row_buffers->available() != state_->sizes.window ||
        with.sum_buffers->available() != state_->sizes.window)
      return "buffers are out" + between;
  }
  for (const auto& [number, rank] : state_->ranks) {
    if (!rank.open.empty() || !rank.waiting.empty())
      return "operations or messages wait of rank " + std::to_string(number);
  }
  return "";
}

}  // namespace epd::far
