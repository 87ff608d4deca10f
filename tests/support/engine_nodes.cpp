#include "engine_nodes.h"

#include "device/memory.h"
#include "device/name.h"
#include "region_buffers.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <stdexcept>

namespace epd::test {

using abi::LinkType;
using abi::Region;

namespace {

template <typename T>
T value_of(Result<T> result) {
  if (!result.ok()) throw std::runtime_error(result.status().to_string());
  return std::move(result).value();
}

}  // namespace

struct EngineNodes::Engine {
  std::uint32_t node = 0;
  std::uint32_t device = 0;
  std::unique_ptr<EngineThread> thread;
  bool stopped = false;
};

struct EngineNodes::Rank {
  std::uint32_t number = 0;
  Engine* engine = nullptr;
  RawSession* session = nullptr;
  UniqueFd user_fd, exchange_fd, board_fd, results_fd;
  Mapping user, board, results;
  std::optional<Ringer> ringer;
  std::uint64_t since = 1;  // 0: masked
  std::size_t first = 0;    // step: it has no rows of dispatches before
  std::uint64_t first_index = 0;
  std::uint32_t member = 0;
  std::size_t next = 0;  // step
  struct InFlight {
    std::uint32_t number;  // of the call
    std::size_t step;
  };
  std::deque<InFlight> in_flight;
  std::vector<std::vector<std::size_t>> made;  // dispatches by record
  std::vector<std::uint32_t> num_recv_rows;    // by slot
};

EngineNodes::EngineNodes(const Case& c, const EngineNodesOptions& options)
    : case_(c), shape_(c.shape()), options_(options), resume_index_(options.first_op) {
  if (options_.open == nullptr)
    options_.open = [this](const transport::Limits& limits) { return open(limits); };
  for (std::uint32_t number = 0; number < c.num_ranks; ++number) {
    const std::uint32_t node = options_.nodes[number];
    const std::uint32_t device = options_.devices[number];
    auto found = std::find_if(engines_.begin(), engines_.end(), [&](const auto& engine) {
      return engine->node == node && engine->device == device;
    });
    if (found == engines_.end()) {
      engines_.push_back(std::make_unique<Engine>());
      found = engines_.end() - 1;
      Engine& engine = **found;
      engine.node = node;
      engine.device = device;
      engine.thread = std::make_unique<EngineThread>(device);
      transport::NetworkOptions network;
      network.library = "the test's";
      network.batch_bytes = options_.batch_bytes;
      network.window_bytes = options_.window_bytes;
      network.max_bytes = options_.max_bytes;
      network.peer_timeout_ms = options_.peer_timeout_ms;
      engine.thread->set_network(network, options_.open);
      engine.thread->start();
    }
    ranks_.push_back(std::make_unique<Rank>());
    Rank& rank = *ranks_.back();
    rank.number = number;
    rank.engine = found->get();
    rank.member = RawGroup::member(number);
    attach(rank);
    rank.made.resize(shape_.num_routes());
    rank.num_recv_rows.resize(shape_.depth);
    if (options_.masked.contains(number)) rank.since = 0;
    make(rank);
  }
}

EngineNodes::~EngineNodes() = default;

Result<std::unique_ptr<transport::Transport>> EngineNodes::open(const transport::Limits& limits) {
  auto transport = network_.open(limits);
  if (!transport.ok() || !options_.faults) return transport;
  return transport::make_faulty(std::move(transport).value(), ++opened_, *options_.faults);
}

void EngineNodes::attach(Rank& rank) {
  sessions_.push_back(std::make_unique<RawSession>(50 + sessions_.size()));
  rank.session = sessions_.back().get();
  rank.session->add_to(*rank.engine->thread);
}

void EngineNodes::make(Rank& rank) const {
  const device::DeviceName device =
      value_of(device::parse_device_name("host:" + std::to_string(rank.engine->device)));
  const std::uint64_t user = abi::UserArenaLayout(shape_).total_bytes;
  const std::uint64_t board = abi::WaitsLayout(shape_).total_bytes;
  rank.user_fd = value_of(device::make_arena_memory(device, "test-user", user));
  rank.exchange_fd = value_of(
      device::make_arena_memory(device, "test-exchange", abi::ExchangeArenaLayout(shape_).total_bytes));
  rank.board_fd = value_of(make_sealed_memfd("test-board", board));
  const std::uint64_t results = abi::ResultsLayout(shape_).total_bytes;
  rank.results_fd = value_of(device::make_results_memory(device, results));
  rank.user = value_of(Mapping::map(rank.user_fd.get(), user, Access::kReadWrite));
  rank.board = value_of(Mapping::map(rank.board_fd.get(), board, Access::kReadWrite));
  rank.results = value_of(Mapping::map(rank.results_fd.get(), results, Access::kReadWrite));
  rank.ringer.emplace(*rank.user.as<abi::CallWords>(abi::UserArenaLayout(shape_).calls),
                      *rank.results.as<abi::Results>(), true, rank.session);
}

EngineThread& EngineNodes::engine(std::size_t which) {
  return *engines_[which]->thread;
}

std::size_t EngineNodes::engine_of(std::uint32_t rank) const {
  for (std::size_t i = 0; i < engines_.size(); ++i) {
    if (engines_[i].get() == ranks_[rank]->engine) return i;
  }
  return 0;
}

bool EngineNodes::active(const Rank& rank) const {
  return rank.since != 0;
}

std::string EngineNodes::describe() const {
  std::string text = case_.describe() + "; engines";
  for (const auto& rank : ranks_)
    text += " " + std::to_string(rank->engine->node) + "/" + std::to_string(rank->engine->device) +
            (active(*rank) ? "" : " (masked)");
  if (options_.faults) text += "; a bad transport";
  return text + "; batches of " + std::to_string(options_.batch_bytes) + ", windows of " +
         std::to_string(options_.window_bytes);
}

// ---- the supervisors

void EngineNodes::tell_address(std::size_t to, std::size_t of, bool down) const {
  const Engine& engine = *engines_[of];
  const std::vector<std::byte>& address = engine.thread->address();
  abi::FarEngine message{};
  message.node = engine.node;
  message.device_index = engine.device;
  std::strcpy(message.node_name, name(engine.node).c_str());
  if (!down) {
    message.address_bytes = static_cast<std::uint32_t>(address.size());
    std::memcpy(message.address, address.data(), address.size());
  }
  engines_[to]->thread->send(LinkType::kFarEngine, message);
}

void EngineNodes::tell_rank(const Engine& engine, std::uint32_t number) const {
  const Rank& rank = *ranks_[number];
  abi::GroupRank message{kGroup, number, 0, 0};
  if (!active(rank)) {
    engine.thread->send(LinkType::kGroupRank, message);
    return;
  }
  message.device_index = rank.engine->device;
  message.active_since = rank.since;
  message.node = rank.engine->node;
  if (rank.engine->node != engine.node) {
    engine.thread->send(LinkType::kGroupRank, message);
    return;
  }
  engine.thread->send(LinkType::kGroupRank, message,
                      {rank.user_fd.get(), rank.exchange_fd.get(), rank.engine->thread->bell().get(),
                       rank.engine->thread->page().get()});
  if (rank.engine != &engine) return;
  engine.thread->send(LinkType::kGroupMember,
                      abi::GroupMember{kGroup, rank.session->id(), number, rank.member, rank.first_index},
                      {rank.board_fd.get(), rank.results_fd.get()});
}

void EngineNodes::begin_engine(std::size_t which, bool broken) const {
  const Engine& engine = *engines_[which];
  for (std::size_t other = 0; other < engines_.size(); ++other) {
    const bool serves = std::any_of(ranks_.begin(), ranks_.end(), [&](const auto& rank) {
      return rank->engine == engines_[other].get() && active(*rank);
    });
    if (serves && engines_[other]->node != engine.node) tell_address(which, other);
  }
  abi::GroupBegin message{};
  message.group_id = kGroup;
  message.epoch = epoch_;
  message.resume_index = resume_index_;
  message.broken = broken ? 1 : 0;
  message.node = engine.node;
  message.view = views_.contains(which) ? views_.at(which) : epoch_;
  message.epoch_key[0] = epoch_ * 31;
  message.epoch_key[1] = epoch_ * 37;
  message.shape = shape_;
  engine.thread->send(LinkType::kGroupBegin, message);
  for (std::uint32_t rank = 0; rank < shape_.num_ranks; ++rank) tell_rank(engine, rank);
  engine.thread->send(LinkType::kGroupCommit, abi::GroupRef{kGroup});
}

void EngineNodes::begin(std::optional<std::size_t> left_out) const {
  for (std::size_t i = 0; i < engines_.size(); ++i) {
    if (left_out != i) begin_engine(i, false);
  }
}

std::string EngineNodes::expect_ready(std::size_t engine) const {
  const auto ready = engines_[engine]->thread->expect(LinkType::kGroupReady);
  if (!ready) return "engine " + std::to_string(engine) + " did not get ready";
  const auto body = ready->read<abi::GroupReady>().value();
  if (body.status == StatusCode::kOk) return "";
  return std::string(status_name(body.status)) + ": " + body.text;
}

std::string EngineNodes::expect_ready() const {
  for (std::size_t i = 0; i < engines_.size(); ++i) {
    if (std::string wrong = expect_ready(i); !wrong.empty()) return wrong;
  }
  return "";
}

std::string EngineNodes::break_all(const std::set<std::size_t>& without) {
  abi::Break message{};
  message.group_id = kGroup;
  message.epoch = epoch_;
  message.cause = StatusCode::kAborted;
  message.failed_rank = -1;
  abi::set_text(message.text, "test", 4);
  std::uint64_t resume = ~std::uint64_t{0};
  for (std::size_t i = 0; i < engines_.size(); ++i) {
    if (!without.contains(i)) engines_[i]->thread->send(LinkType::kBreak, message);
  }
  for (std::size_t i = 0; i < engines_.size(); ++i) {
    if (without.contains(i)) continue;
    const auto broken = engines_[i]->thread->expect(LinkType::kBroken);
    if (!broken) return "engine " + std::to_string(i) + " did not break";
    resume = std::min(resume, broken->read<abi::Broken>().value().next_index);
  }
  resume_index_ = resume;
  return "";
}

void EngineNodes::take_next_index(std::uint64_t index) {
  resume_index_ = std::min(resume_index_, options_.first_op + index);
}

void EngineNodes::resume_engine(std::size_t which) const {
  abi::Resume message{kGroup, epoch_, resume_index_, StatusCode::kOk, -1, {}};
  message.view = views_.contains(which) ? views_.at(which) : epoch_;
  message.epoch_key[0] = epoch_ * 31;
  message.epoch_key[1] = epoch_ * 37;
  engines_[which]->thread->send(LinkType::kResume, message);
}

void EngineNodes::resume(const std::set<std::size_t>& without) {
  ++epoch_;
  go_back_to(resume_index_ - options_.first_op);
  for (std::size_t i = 0; i < engines_.size(); ++i) {
    if (!without.contains(i)) resume_engine(i);
  }
}

std::string EngineNodes::expect_resumed(const std::set<std::size_t>& without) const {
  for (std::size_t i = 0; i < engines_.size(); ++i) {
    if (!without.contains(i) && !engines_[i]->thread->expect(LinkType::kResumed))
      return "engine " + std::to_string(i) + " did not go on";
  }
  return "";
}

std::string EngineNodes::break_and_resume() {
  if (std::string wrong = break_all(); !wrong.empty()) return wrong;
  resume();
  return expect_resumed();
}

void EngineNodes::mask(std::uint32_t number) {
  ranks_[number]->since = 0;
  inputs_.clear();
  for (const auto& engine : engines_) tell_rank(*engine, number);
}

void EngineNodes::admit(std::uint32_t number) {
  Rank& rank = *ranks_[number];
  rank.since = epoch_ + 1;
  rank.first_index = resume_index_;
  rank.first = resume_index_ - options_.first_op;
  rank.num_recv_rows.assign(shape_.depth, 0);
  rank.member += 1000;
  for (auto& made : rank.made) made.clear();
  make(rank);
  inputs_.clear();
  for (std::size_t to = 0; to < engines_.size(); ++to) {
    if (engines_[to]->node != rank.engine->node) tell_address(to, engine_of(number));
    tell_rank(*engines_[to], number);
  }
}

void EngineNodes::move(std::uint32_t number, std::size_t engine) {
  ranks_[number]->engine = engines_[engine].get();
  attach(*ranks_[number]);
}

void EngineNodes::stop(std::size_t which) {
  engines_[which]->thread->stop();
  engines_[which]->stopped = true;
}

void EngineNodes::restart(std::size_t which) {
  Engine& engine = *engines_[which];
  if (!engine.stopped) stop(which);
  engine.stopped = false;
  engine.thread->start();
  for (const auto& rank : ranks_) {
    if (rank->engine == &engine) rank->session->add_to(*engine.thread);
  }
  for (std::size_t to = 0; to < engines_.size(); ++to) {
    if (engines_[to]->node != engine.node) tell_address(to, which);
  }
  begin_engine(which, true);
}

std::string EngineNodes::remove() {
  for (const auto& engine : engines_) engine->thread->send(LinkType::kRemoveGroup, abi::GroupRef{kGroup});
  for (const auto& engine : engines_) {
    if (!engine->thread->expect(LinkType::kGroupRemoved)) return "the group was not removed";
  }
  return "";
}

// ---- the clients

epd_buffers_t EngineNodes::buffers(const Rank& rank, std::uint32_t slot) const {
  const abi::UserArenaLayout layout(shape_);
  return region_buffers([&](Region region) -> std::byte* {
    return abi::region_bytes(shape_, region) == 0 ? nullptr : rank.user.bytes() + layout.at(slot, region);
  });
}

std::set<std::uint32_t> EngineNodes::lost() const {
  std::set<std::uint32_t> lost;
  for (const auto& rank : ranks_) {
    if (!active(*rank)) lost.insert(rank->number);
  }
  return lost;
}

const std::vector<Input>& EngineNodes::inputs(Round round) {
  auto found = inputs_.find(round);
  if (found != inputs_.end()) return found->second;
  return inputs_.emplace(round, without_ranks(case_, make_inputs(case_, round), lost())).first->second;
}

void EngineNodes::call(std::uint32_t number, const FarStep& step, std::uint32_t timeout_ms) {
  Rank& rank = *ranks_[number];
  const Input& input = inputs(step.round)[number];
  const std::size_t index = rank.next++;
  const epd_buffers_t b = buffers(rank, step.slot);
  const bool makes = step.dispatch && !step.cached;
  abi::Call call = step.dispatch ? dispatch_on(step.slot) : combine_on(step.slot);
  call.route = step.record;
  call.timeout_ms = timeout_ms;
  if (makes) {
    rank.made[step.record].push_back(index);
    lost_at_[index] = lost();
  }
  if (step.dispatch) {
    if (case_.send_weights) call.flags |= abi::kFlagWeights;
    if (step.cached) call.flags |= abi::kFlagCached;
    if (case_.zero_padding) call.flags |= abi::kFlagZeroPadding;
    if (case_.mark_unused) call.flags |= abi::kFlagMarkUnused;
    call.flags |= case_.at(step.round).row_format << abi::kFormatShift;
    fill_dispatch(case_, b, input, step.cached);
  } else {
    if (case_.weighted) call.flags |= abi::kFlagWeights;
    call.flags |= abi::return_flags(case_.return_weights);
    call.flags |= biases_of(case_, step.round) << abi::kBiasShift;
    fill_combine(case_, b, number, step.round, rank.num_recv_rows[step.slot]);
  }
  rank.in_flight.push_back({rank.ringer->ring(call, makes ? input.num_tokens : 0, epoch_), index});
}

std::optional<abi::CallEnd> EngineNodes::wait(std::uint32_t number, int timeout_ms) {
  Rank& rank = *ranks_[number];
  const std::uint32_t first = rank.in_flight.front().number;
  if (!rank.ringer->ended(first, timeout_ms)) return std::nullopt;
  rank.in_flight.pop_front();
  return rank.ringer->end(first);
}

// The first call in flight has ended.
std::string EngineNodes::conclude(Rank& rank, const std::vector<FarStep>& steps) {
  const std::size_t index = rank.in_flight.front().step;
  const abi::CallEnd end = *wait(rank.number);
  const FarStep& step = steps[index];
  const std::string operation =
      "operation " + std::to_string(index) + " of rank " + std::to_string(rank.number) +
      (step.dispatch ? step.cached ? ", a cached dispatch: " : ", a dispatch: " : ", a combine: ");
  if (end.ending != abi::CallEnding::kCarriedOut)
    return operation + (end.ending == abi::CallEnding::kFailed ? "failed" : "was discarded") + stuck();
  std::string difference;
  if (end.index != options_.first_op + index) {
    difference = "has number " + std::to_string(end.index);
  } else if (step.dispatch) {
    rank.num_recv_rows[step.slot] = end.num_recv_rows;
    epd_result_t told{};
    told.num_recv_rows = end.num_recv_rows;
    difference = check_dispatch(case_.at(step.round), buffers(rank, step.slot), inputs(step.round),
                                rank.number, told, nullptr);
  } else {
    difference = check_combined(rank, end, step);
  }
  return difference.empty() ? "" : operation + difference;
}

// Ranks that have gone since the dispatch add nothing, back or not. A rank that has come since has no tokens.
std::string EngineNodes::check_combined(const Rank& rank, const abi::CallEnd& end,
                                        const FarStep& step) const {
  const epd_buffers_t b = buffers(rank, step.slot);
  const std::vector<std::size_t>& made = rank.made[step.record];
  std::uint32_t dropped = 0;
  std::string difference;
  if (made.empty()) {
    const auto* const out = static_cast<const std::uint8_t*>(b.out);
    const bool untouched = std::all_of(out, out + abi::region_bytes(shape_, Region::kOut),
                                       [](std::uint8_t byte) { return byte == kPoison; });
    if (!untouched) difference = "wrote to the output of a rank that came after the dispatch";
  } else {
    std::set<std::uint32_t> gone = lost();
    for (const auto& other : ranks_) {
      if (other->first > made.back()) gone.insert(other->number);
    }
    // Clients did not choose ranks that were lost at the dispatch.
    const std::vector<Input> inputs =
        without_ranks(case_, make_inputs(case_, step.round), lost_at_.at(made.back()));
    difference = check_combine(case_, b, inputs, rank.number, step.round, gone);
    dropped = selections_of(case_, inputs[rank.number], gone);
  }
  if (!difference.empty() || end.num_dropped == dropped) return difference;
  return std::to_string(end.num_dropped) + " selections dropped, not " + std::to_string(dropped);
}

std::string EngineNodes::run(const std::vector<FarStep>& steps, std::size_t until) {
  until = std::min(until, steps.size());
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  const auto done = [&](const auto& rank) {
    return !active(*rank) || (rank->next >= until && rank->in_flight.empty());
  };
  while (!std::all_of(ranks_.begin(), ranks_.end(), done)) {
    if (std::chrono::steady_clock::now() > end) return stuck();
    for (const auto& rank : ranks_) {
      if (!active(*rank)) continue;
      while (!rank->in_flight.empty() && rank->ringer->ended(rank->in_flight.front().number, 0)) {
        if (std::string wrong = conclude(*rank, steps); !wrong.empty()) return wrong;
      }
      const auto uses_slot = [&](const auto& each) {
        return steps[each.step].slot == steps[rank->next].slot;
      };
      if (rank->next < until && std::none_of(rank->in_flight.begin(), rank->in_flight.end(), uses_slot))
        call(rank->number, steps[rank->next]);
    }
  }
  return "";
}

std::string EngineNodes::stuck() const {
  std::string text = "operations do not end";
  for (const auto& rank : ranks_) {
    text += "; rank " + std::to_string(rank->number) + " is before operation " + std::to_string(rank->next);
    for (const auto& each : rank->in_flight) text += ", waits for " + std::to_string(each.step);
  }
  for (const auto& engine : engines_) {
    const auto asked = engine->thread->expect(LinkType::kBreakRequest, 100);
    if (asked) text += "; " + std::string(asked->read<abi::Break>().value().text);
  }
  return text;
}

// Operations that were not completed everywhere are called again.
void EngineNodes::go_back_to(std::uint64_t index) {
  for (const auto& rank : ranks_) {
    rank->in_flight.clear();
    rank->next = index;
    for (auto& made : rank->made) {
      while (!made.empty() && made.back() >= index) made.pop_back();
    }
  }
}

}  // namespace epd::test
