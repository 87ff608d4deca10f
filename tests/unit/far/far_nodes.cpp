#include "far_nodes.h"

#include "device_operation.h"
#include "host_operation.h"
#include "kernels/group_view.h"
#include "support/region_buffers.h"

#include <sched.h>
#include <unistd.h>
#include <algorithm>
#include <cstring>

namespace epd::test {

using abi::Region;
using engine::FarProxy;

namespace {

bool is_greeting(const transport::Header& bytes) {
  abi::FarHeader header;
  if (bytes.bytes().size() != sizeof(header)) return false;
  std::memcpy(&header, bytes.bytes().data(), sizeof(header));
  return header.type == abi::FarType::kPing;
}

}  // namespace

struct FarNodes::Engine {
  std::uint32_t number = 0;
  std::uint32_t node = 0;
  std::unique_ptr<FarProxy> proxy;  // or
  std::unique_ptr<TransportPort> port;
  transport::FaultyTransport* faulty = nullptr;  // the port's
  std::unique_ptr<device::HostSms> sms;
  std::unique_ptr<far::FarGroup> far;
  std::vector<Rank*> ranks;
};

struct FarNodes::Rank {
  // What a record holds: the last dispatches that made it.
  struct Made {
    std::size_t index;  // of the step
    std::uint64_t tag;
    std::uint32_t half;
    std::uint32_t num_tokens;
  };
  std::uint32_t number = 0;
  Engine* engine = nullptr;
  std::unique_ptr<std::byte[]> user;
  std::unique_ptr<std::byte[]> exchange;
  kernels::cuda::GroupView view;
  kernels::cuda::PeerView peer_view;
  std::unique_ptr<device::HostPlans> plans;
  std::unique_ptr<Peers> peers;                    // of
  std::optional<device::HostOperation> operation;  // the one that runs: of step next - 1
  std::size_t next = 0;                            // step
  std::size_t first = 0;                           // step: it has no rows of dispatches before
  std::vector<std::vector<Made>> made;             // by record
  std::vector<std::uint32_t> num_recv_rows;        // by slot

  void serve(std::uint64_t since);
  void abort() {
    if (operation && !operation->ended()) operation->abort();
    operation.reset();
  }
};

void FarNodes::Rank::serve(std::uint64_t since) {
  peer_view.exchange = view.exchange_arena;
  peer_view.since = since;
  peer_view.recv_x = view.region(Region::kRecvX);
  peer_view.recv_scales = view.region(Region::kRecvScales);
  peer_view.recv_topk_idx = view.region(Region::kRecvTopkIdx);
  peer_view.recv_topk_weights = view.region(Region::kRecvTopkWeights);
  peer_view.recv_src = view.region(Region::kRecvSrc);
  peer_view.y = view.region(Region::kY);
  peer_view.y_weights = view.region(Region::kYWeights);
}

// The ranks of this node, as one operation of one rank reaches them.
class FarNodes::Peers final : public device::OperationPeers {
 public:
  Peers(const FarNodes& nodes, const Rank& own, const kernels::cuda::TakenCall& call)
      : nodes_(nodes), own_(own), call_(call) {}

  kernels::cuda::Peer peer(std::uint32_t rank) const override {
    const Rank& other = *nodes_.ranks_[rank];
    if (other.engine->node != own_.engine->node) throw std::logic_error("a far rank's memory");
    kernels::cuda::Peer peer;
    kernels::cuda::compose_peer(peer, nodes_.exchange_, other.peer_view, call_);
    return peer;
  }
  std::span<const std::uint8_t> masked() const override { return nodes_.masked_; }
  bool holds_rows(std::uint32_t rank, std::uint64_t routing) const override {
    return active(rank) && nodes_.ranks_[rank]->peer_view.since <= abi::epoch_of_tag(routing);
  }
  void ring() const override {}
  RoutedRows routed_rows(std::uint32_t rank, std::uint64_t routing) const override {
    const Rank& other = *nodes_.ranks_[rank];
    const std::uint32_t route = peer(own_.number).announcement[rank].route;
    const std::byte* half = device::find_routing(other.exchange.get(), nodes_.exchange_, route, routing);
    if (half == nullptr) return {};
    return {reinterpret_cast<const std::int32_t*>(half + nodes_.exchange_.placement),
            other.peer_view.y.at<const std::uint16_t>(call_.slot),
            other.peer_view.y_weights.at<const float>(call_.slot)};
  }

 private:
  const FarNodes& nodes_;
  const Rank& own_;
  const kernels::cuda::TakenCall call_;
};

FarNodes::FarNodes(const Case& c, const FarOptions& options)
    : case_(c),
      shape_(c.shape()),
      exchange_(shape_),
      user_(shape_),
      options_(options),
      lost_(options.masked.begin(), options.masked.end()),
      random_(static_cast<std::uint32_t>(options.seed)) {
  if (!lost_.empty()) masked_.assign(c.num_ranks, 0);
  for (const std::uint32_t rank : lost_) masked_[rank] = 1;
  std::map<std::uint32_t, Engine*> by_number;
  for (std::uint32_t number = 0; number < c.num_ranks; ++number) {
    Engine*& engine = by_number[options_.engines[number]];
    if (engine == nullptr) {
      engines_.push_back(std::make_unique<Engine>());
      engine = engines_.back().get();
      engine->number = options_.engines[number];
      engine->node = options_.nodes[number];
      open_transport(*engine);
      engine->sms = std::make_unique<device::HostSms>([] {});
      engine->sms->set_num(options_.sms);
      engine->far = std::make_unique<far::FarGroup>(
          far::FarGroup::Facts{7, shape_, engine->number, options_.batch_bytes, options_.window_bytes},
          engine->proxy != nullptr ? static_cast<far::Port&>(*engine->proxy) : *engine->port);
    }
    ranks_.push_back(std::make_unique<Rank>());
    Rank& rank = *ranks_.back();
    rank.number = number;
    rank.made.resize(shape_.num_routes());
    rank.num_recv_rows.resize(shape_.depth);
    place(rank, *engine);
    if (!lost_.contains(number)) rank.serve(1);
  }
  connect_engines();
  begin_epoch();
}

// Its memory is new, and what it puts there itself is not zeros before.
void FarNodes::place(Rank& rank, Engine& engine) {
  rank.engine = &engine;
  engine.ranks.push_back(&rank);
  rank.user = std::make_unique<std::byte[]>(user_.total_bytes);
  std::memset(rank.user.get(), 0x3c, user_.total_bytes);
  rank.exchange = std::make_unique<std::byte[]>(exchange_.total_bytes);
  const device::LaneShape lane = engine::lane_shape(shape_, 0);
  rank.plans = std::make_unique<device::HostPlans>(lane.kept_plans);
  rank.view.shape = lane.shape;
  std::copy(std::begin(lane.more_formats), std::end(lane.more_formats), rank.view.more_formats);
  rank.view.rank = rank.number;
  rank.view.exchange_arena = reinterpret_cast<std::uint8_t*>(rank.exchange.get());
  rank.view.exchange = exchange_;
  for (std::uint32_t region = 0; region < abi::kNumRegions; ++region) {
    if (abi::region_bytes(shape_, static_cast<Region>(region)) == 0) continue;
    rank.view.regions[region] = {
        reinterpret_cast<std::uint8_t*>(rank.user.get()) + user_.at(0, static_cast<Region>(region)),
        user_.slot_bytes};
  }
}

void FarNodes::open_transport(Engine& engine) {
  if (options_.open) {
    engine.proxy = FarProxy::start(options_.open, 20'000, [] {}).value();
    return;
  }
  transport::Limits limits;
  limits.max_body_bytes = 4 << 20;
  limits.max_sends = 4 + random_() % 16;
  std::unique_ptr<transport::Transport> carrier = network_.open(limits).value();
  if (options_.faults) {
    auto faulty = transport::make_faulty(std::move(carrier), options_.seed + engine.number, *options_.faults);
    engine.faulty = faulty.get();
    carrier = std::move(faulty);
  }
  engine.port = std::make_unique<TransportPort>(std::move(carrier));
}

void FarNodes::connect_engines() {
  for (const auto& a : engines_) {
    for (const auto& b : engines_) {
      if (a == b) continue;
      if (a->proxy != nullptr) {
        a->proxy->connect(b->number, b->proxy->address());
      } else {
        a->port->connect(b->number, b->port->transport().address());
      }
    }
  }
  if (options_.open) greet_engines();
}

// A transport drops what comes from engines that it is not connected to yet. Whoever has heard of another
// knows that the other has connected.
void FarNodes::greet_engines() {
  std::set<std::pair<std::uint32_t, far::EngineId>> heard;
  while (heard.size() < engines_.size() * (engines_.size() - 1)) {
    for (const auto& a : engines_) {
      for (const auto& b : engines_) {
        if (a == b) continue;
        auto greeting = std::make_unique<far::Message>();
        greeting->header.type = abi::FarType::kPing;
        greeting->engine = b->number;
        a->proxy->send(greeting);
      }
      FarProxy::Event event;
      while (a->proxy->next(event)) heard.insert({a->number, event.engine});
    }
    ::usleep(1000);
  }
}

FarNodes::~FarNodes() {
  for (const auto& rank : ranks_) rank->abort();
}

void FarNodes::begin_epoch() {
  ++epoch_;
  std::vector<far::EngineId> engines(options_.engines.begin(), options_.engines.end());
  for (const auto& engine : engines_)
    engine->far->begin({epoch_,
                        resume_,
                        options_.nodes,
                        engines,
                        masked_,
                        engine->node,
                        {options_.seed * 31 + epoch_, epoch_}});
}

far::FarGroup& FarNodes::far_of(std::uint32_t rank) {
  return *ranks_[rank]->engine->far;
}

std::uint64_t FarNodes::dropped() const {
  std::uint64_t total = 0;
  for (const auto& engine : engines_) total += engine->far->drops().total();
  return total;
}

std::string FarNodes::describe() const {
  std::string text = case_.describe() + "; nodes";
  for (const std::uint32_t node : options_.nodes) text += ' ' + std::to_string(node);
  text += "; engines";
  for (const std::uint32_t engine : options_.engines) text += ' ' + std::to_string(engine);
  text += "; batches of " + std::to_string(options_.batch_bytes) + ", windows of " +
          std::to_string(options_.window_bytes) + ", sms " + std::to_string(options_.sms) +
          ", order of seed " + std::to_string(options_.seed);
  for (const auto& engine : engines_) {
    if (engine->faulty != nullptr) text += "; " + engine->faulty->describe();
  }
  return text;
}

const std::vector<Input>& FarNodes::inputs(Round round) {
  auto found = inputs_.find(round);
  if (found == inputs_.end())
    found = inputs_.emplace(round, without_ranks(case_, make_inputs(case_, round), lost_)).first;
  return found->second;
}

epd_buffers_t FarNodes::buffers(const Rank& rank, std::uint32_t slot) const {
  return region_buffers([&](Region region) { return rank.view.region(region).at<std::byte>(slot); });
}

// ---- the clients and the engines' loops

std::size_t FarNodes::last_made(std::uint32_t record) const {
  std::size_t last = 0;
  for (const auto& rank : ranks_) {
    if (!rank->made[record].empty()) last = std::max(last, rank->made[record].back().index);
  }
  return last;
}

// A row, and an ask, for each (token, far node) with rows there. A sum for each whole domain of that node
// with rows of the token; of another domain a row for each rank.
void FarNodes::count_needed(const FarStep& step) {
  const std::vector<Input>& all = inputs(step.round);
  const std::uint32_t per_rank = shape_.experts_per_rank();
  for (std::uint32_t rank = 0; rank < case_.num_ranks; ++rank) {
    const std::vector<std::int64_t>& chosen = all[rank].topk_idx;
    for (std::size_t token = 0; token < all[rank].num_tokens; ++token) {
      std::set<std::uint32_t> nodes;
      std::set<std::pair<std::uint32_t, std::uint32_t>> sums;
      for (std::size_t k = token * shape_.topk; k < (token + 1) * shape_.topk; ++k) {
        if (chosen[k] < 0) continue;
        const auto to = static_cast<std::uint32_t>(chosen[k]) / per_rank;
        const std::uint32_t node = options_.nodes[to];
        if (node == options_.nodes[rank]) continue;
        nodes.insert(node);
        const far::Span& span = ranks_[rank]->engine->far->span();
        const std::uint32_t domain = span.domain_of(to);
        sums.insert(span.is_whole(domain) ? std::pair(0u, domain) : std::pair(1u, to));
      }
      (step.dispatch ? rows_needed_ : asks_needed_) += nodes.size();
      if (!step.dispatch) sums_needed_ += sums.size();
    }
  }
}

std::string FarNodes::check_records() const {
  std::uint64_t rows = 0;
  std::uint64_t asks = 0;
  std::uint64_t sums = 0;
  for (const auto& engine : engines_) {
    if (engine->port == nullptr) return "";
    rows += engine->port->records(abi::FarType::kRows);
    asks += engine->port->records(abi::FarType::kAsk);
    sums += engine->port->records(abi::FarType::kSums);
  }
  if (rows == rows_needed_ && asks == asks_needed_ && sums == sums_needed_) return "";
  return "sent " + std::to_string(rows) + " rows, " + std::to_string(asks) + " asks, " +
         std::to_string(sums) + " sums; needed " + std::to_string(rows_needed_) + ", " +
         std::to_string(asks_needed_) + ", " + std::to_string(sums_needed_);
}

void FarNodes::begin(Rank& rank, const FarStep& step) {
  const std::size_t index = rank.next++;
  const Input& input = inputs(step.round)[rank.number];
  if (index == counted_) {
    count_needed(step);
    ++counted_;
  }
  std::vector<Rank::Made>& made = rank.made[step.record];
  kernels::cuda::TakenCall call{};
  call.tag = abi::op_tag(epoch_, index);
  call.op_code = static_cast<std::uint8_t>(step.dispatch ? abi::Op::kDispatch : abi::Op::kCombine);
  call.slot = static_cast<std::uint8_t>(step.slot);
  call.block = static_cast<std::uint8_t>(index % shape_.depth);
  // Each rank has its own order of records.
  const std::uint32_t record = (step.record + rank.number) % shape_.num_routes();
  call.route = static_cast<std::uint16_t>(record);
  std::uint32_t flags = 0;
  if (step.dispatch && !step.cached) {
    call.num_tokens = input.num_tokens;
    call.half = made.empty() ? 0 : 1 - static_cast<std::uint8_t>(made.back().half);
    made.push_back({index, call.tag, call.half, input.num_tokens});
  } else if (made.empty()) {  // the rank came after the dispatch, of which it knows the number
    call.routing_tag = abi::op_tag(0, last_made(step.record));
  } else {
    call.num_tokens = made.back().num_tokens;
    call.half = static_cast<std::uint8_t>(made.back().half);
    call.routing_tag = made.back().tag;
  }
  const epd_buffers_t b = buffers(rank, step.slot);
  if (step.dispatch) {
    if (case_.send_weights) flags |= abi::kFlagWeights;
    if (step.cached) flags |= abi::kFlagCached;
    if (case_.zero_padding) flags |= abi::kFlagZeroPadding;
    if (case_.mark_unused) flags |= abi::kFlagMarkUnused;
    flags |= case_.at(step.round).row_format << abi::kFormatShift;
    fill_dispatch(case_, b, input, step.cached);
  } else {
    if (case_.weighted) flags |= abi::kFlagWeights;
    flags |= abi::return_flags(case_.return_weights);
    flags |= biases_of(case_, step.round) << abi::kBiasShift;
    fill_combine(case_, b, rank.number, step.round, rank.num_recv_rows[step.slot]);
  }
  call.flags = static_cast<std::uint16_t>(flags);
  rank.peers = std::make_unique<Peers>(*this, rank, call);
  rank.operation.emplace(step.dispatch ? kernels::cuda::Kind::kDispatch : kernels::cuda::Kind::kCombine,
                         kernels::cuda::compose(rank.view, call),
                         device::HostOperation::Needs{*rank.peers,
                                                      *rank.plans,
                                                      record,
                                                      {rank.engine->sms.get(), case_.sms, 0},
                                                      shape_.sum_ranks,
                                                      rank.engine->far.get()});
}

void FarNodes::conclude(Rank& rank, const std::vector<FarStep>& steps) {
  const std::size_t index = rank.next - 1;
  const FarStep& step = steps[index];
  const kernels::cuda::OpResult result = rank.operation->result();
  const std::string name =
      "operation " + std::to_string(index) + " of rank " + std::to_string(rank.number) +
      (step.dispatch ? step.cached ? ", a cached dispatch: " : ", a dispatch: " : ", a combine: ");
  std::string difference;
  if (result.error != kernels::cuda::OpError::kNone) {
    difference = "error " + std::to_string(static_cast<int>(result.error)) + " of rank " +
                 std::to_string(result.failed_rank);
  } else if (step.dispatch) {
    rank.num_recv_rows[step.slot] = result.num_recv_rows;
    epd_result_t told{};
    told.num_recv_rows = result.num_recv_rows;
    difference = check_dispatch(case_.at(step.round), buffers(rank, step.slot), inputs(step.round),
                                rank.number, told, nullptr);
  } else {
    difference = check_combined(rank, step);
  }
  if (wrong_.empty() && !difference.empty()) wrong_ = name + difference;
  rank.operation.reset();
}

// Ranks that have gone since the dispatch add nothing, back or not. Who has come since has no tokens.
std::string FarNodes::check_combined(const Rank& rank, const FarStep& step) {
  const epd_buffers_t b = buffers(rank, step.slot);
  const std::vector<Rank::Made>& made = rank.made[step.record];
  if (made.empty()) {
    const auto* const out = static_cast<const std::uint8_t*>(b.out);
    const bool untouched = std::all_of(out, out + abi::region_bytes(shape_, Region::kOut),
                                       [](std::uint8_t byte) { return byte == kPoison; });
    return untouched ? "" : "wrote to the output of a rank that came after the dispatch";
  }
  std::set<std::uint32_t> silent = lost_;
  for (const auto& other : ranks_) {
    if (other->first > made.back().index) silent.insert(other->number);
  }
  return check_combine(case_, b, inputs(step.round), rank.number, step.round, silent);
}

bool FarNodes::step_rank(Rank& rank, const std::vector<FarStep>& steps) {
  if (!rank.operation) {
    if (rank.next == steps.size() || random_() % 4 == 0) return false;
    begin(rank, steps[rank.next]);
    return true;
  }
  device::HostOperation& operation = *rank.operation;
  const bool can = operation.can_advance();
  const bool did = !operation.ended() && operation.advance();
  if (options_.sms == 1 && did != can && !operation.ended() && wrong_.empty())  // helpers change it meanwhile
    wrong_ = std::string("an operation ") + (did ? "got on" : "did not get on") + " other than it had said";
  if (!operation.ended()) return did;
  conclude(rank, steps);
  return true;
}

bool FarNodes::step_engine(Engine& engine) {
  bool moved = false;
  if (engine.proxy != nullptr) {
    FarProxy::Event event;
    while (engine.proxy->next(event)) {
      moved = true;
      if (event.kind == FarProxy::Event::Kind::kReceived) {
        if (is_greeting(event.header)) continue;
        engine.far->received(event.engine, event.header.bytes(), event.body);
      } else if (event.kind == FarProxy::Event::Kind::kDown && wrong_.empty()) {
        wrong_ = "engine " + std::to_string(event.engine) + " is down: " + event.status.message();
      }
    }
  } else {
    moved = engine.port->step(*engine.far);
  }
  moved |= engine.far->step(now_ns_);
  return moved;
}

bool FarNodes::turn(const std::vector<FarStep>& steps) {
  now_ns_ = options_.open ? MonotonicClock().now_ns() : now_ns_ + 5'000;
  Engine& engine = *engines_[random_() % engines_.size()];
  bool moved = step_engine(engine);
  for (Rank* rank : engine.ranks) {
    if (lost_.contains(rank->number)) continue;
    for (std::uint32_t pieces = random_() % 4; pieces > 0; --pieces) moved |= step_rank(*rank, steps);
  }
  return moved;
}

bool FarNodes::done(const std::vector<FarStep>& steps) const {
  return std::all_of(ranks_.begin(), ranks_.end(), [&](const auto& rank) {
    return lost_.contains(rank->number) || (rank->next == steps.size() && !rank->operation);
  });
}

std::string FarNodes::stuck() const {
  std::string text = "nothing moves any more";
  for (const auto& rank : ranks_) {
    text += "; rank " + std::to_string(rank->number) + " before operation " + std::to_string(rank->next);
    if (rank->operation)
      text += ", the one before in stage " + std::to_string(static_cast<int>(rank->operation->stage())) +
              " awaits " + std::to_string(static_cast<int>(rank->operation->awaited(0))) + " (" +
              rank->operation->waits_for() + ')';
  }
  for (const auto& engine : engines_)
    text += "; drops of engine " + std::to_string(engine->number) + ": " + engine->far->drops().text();
  return text;
}

std::string FarNodes::run(const std::vector<FarStep>& steps) {
  return run_with_breaks(steps, 0);
}

std::string FarNodes::run_with_breaks(const std::vector<FarStep>& steps, std::uint32_t breaks) {
  const MonotonicClock clock;
  std::uint32_t idle = 0;
  std::uint64_t moved_ns = clock.now_ns();
  std::uint64_t until_break = breaks == 0 ? ~std::uint64_t{0} : 1 + random_() % 3000;
  while (!done(steps) && wrong_.empty()) {
    if (turn(steps)) {
      idle = 0;
      moved_ns = clock.now_ns();
    } else if (++idle > 200'000 && (!options_.open || clock.now_ns() - moved_ns > 20'000'000'000)) {
      return stuck();
    } else if (options_.open) {
      ::sched_yield();
    }
    if (--until_break != 0) continue;
    break_all(false);
    until_break = --breaks == 0 ? ~std::uint64_t{0} : 1 + random_() % 3000;
  }
  return wrong_;
}

// As engines do at a break: nothing is touched any more, and what any rank has not completed is done again.
void FarNodes::break_all(bool from_the_beginning) {
  std::size_t resume = from_the_beginning ? 0 : ~std::size_t{0};
  for (const auto& rank : ranks_) {
    if (lost_.contains(rank->number)) continue;
    resume = std::min(resume, rank->next - (rank->operation ? 1 : 0));
    rank->abort();
  }
  for (const auto& rank : ranks_) {
    rank->next = resume;
    for (auto& made : rank->made) {
      while (!made.empty() && made.back().index >= resume) made.pop_back();
    }
  }
  for (const auto& engine : engines_) engine->far->end();
  resume_ = resume;
  begin_epoch();
}

void FarNodes::admit(std::uint32_t number) {
  Rank& rank = *ranks_[number];
  rank.serve(epoch_ + 1);
  masked_[number] = 0;
  break_all(false);
  rank.first = rank.next;
  lost_.erase(number);
}

void FarNodes::mask(std::uint32_t number) {
  Rank& rank = *ranks_[number];
  masked_.resize(case_.num_ranks);
  masked_[number] = 1;
  break_all(false);
  rank.peer_view = {};
  for (auto& made : rank.made) made.clear();
  std::fill(rank.num_recv_rows.begin(), rank.num_recv_rows.end(), 0);
  lost_.insert(number);
}

void FarNodes::move(std::uint32_t number, std::uint32_t engine) {
  Rank& rank = *ranks_[number];
  std::erase(rank.engine->ranks, &rank);
  const auto to = std::find_if(engines_.begin(), engines_.end(),
                               [engine](const auto& other) { return other->number == engine; });
  place(rank, **to);
  options_.engines[number] = engine;
  options_.nodes[number] = rank.engine->node;
}

void FarNodes::run_turns(const std::vector<FarStep>& steps, std::uint32_t turns) {
  for (; turns > 0 && !done(steps) && wrong_.empty(); --turns) turn(steps);
}

std::string FarNodes::run_spoiled(const std::vector<FarStep>& steps, std::uint32_t turns, abi::FarType type,
                                  std::string& faults) {
  for (const auto& engine : engines_) engine->port->spoil(&random_, type);
  for (; turns > 0 && !done(steps) && wrong_.empty(); --turns) turn(steps);
  for (const auto& engine : engines_) {
    engine->port->spoil(nullptr, type);
    for (const far::FarGroup::Fault& fault : engine->far->take_faults()) faults += fault.what + '\n';
  }
  break_all(true);
  return std::exchange(wrong_, "");
}

std::string FarNodes::settle() {
  for (int i = 0; i < 20'000; ++i) {
    now_ns_ += 100'000;
    for (const auto& engine : engines_) step_engine(*engine);
    const bool settled = std::all_of(engines_.begin(), engines_.end(),
                                     [](const auto& engine) { return engine->far->unsettled().empty(); });
    if (options_.open && settled) return "";
    if (options_.open) ::usleep(1000);
  }
  for (const auto& engine : engines_) {
    const std::string of = " of engine " + std::to_string(engine->number);
    if (const std::string text = engine->far->unsettled(); !text.empty()) return text + of;
    if (engine->port == nullptr) continue;
    if (engine->port->under_way() != 0) return "messages are not away" + of;
    if (engine->port->held() != 0) return "bodies were not released" + of;
  }
  return "";
}

}  // namespace epd::test
