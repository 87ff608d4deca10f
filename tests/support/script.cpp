#include "support/script.h"

#include "support/ranks.h"

#include <algorithm>
#include <cstring>

namespace epd::test {
namespace {

constexpr int kHangMs = 60000;  // no operation lasts that long: each has a deadline of its own
constexpr int kResumeMs = 20000;

bool allows_resume(epd_status_t status, bool degrade) {
  if (degrade && status == EPD_RANK_LOST) return true;
  return status == EPD_ABORTED || status == EPD_ENGINE_RESTARTED || status == EPD_DEADLINE_EXCEEDED ||
         status == EPD_INVALID_ARGUMENT;
}

}  // namespace

std::string ScriptStats::to_string() const {
  std::string text = std::to_string(completed) + " completed, " + std::to_string(resumes) + " resumes";
  for (const auto& [name, count] : failures) text += ", " + std::to_string(count) + " " + name;
  return text;
}

namespace {

using Kind = Step::Kind;

// The data of a routing's second use.
Round again(std::uint64_t routing, std::uint64_t use) {
  return {1000 * use + routing, routing};
}

void add_cached(const Case& c, std::uint32_t rounds, std::vector<Step>& script) {
  for (std::uint32_t r = 0; r < rounds; ++r) {
    const std::uint32_t next = (r + 1) % c.depth;
    script.push_back({Kind::kDispatch, r % c.depth, r});
    script.push_back({Kind::kCombine, next, r});
    script.push_back({Kind::kCached, r % c.depth, again(r, 1)});
    script.push_back({Kind::kCombine, next, again(r, 1)});
  }
}

// Dispatch's backward is combine, combine's backward is dispatch, both under the forward's handle.
void add_training(const Case& c, std::uint32_t rounds, std::vector<Step>& script) {
  constexpr std::uint32_t kLayers = 4;
  for (std::uint32_t first = 0; first < rounds; first += kLayers) {
    const std::uint32_t last = std::min(first + kLayers, rounds);
    for (std::uint32_t r = first; r < last; ++r) {
      script.push_back({Kind::kDispatch, r % c.depth, r, true});
      script.push_back({Kind::kCombine, (r + 1) % c.depth, r});
    }
    for (std::uint32_t r = last; r-- > first;) {
      script.push_back({Kind::kCached, (r + 1) % c.depth, again(r, 1)});
      script.push_back({Kind::kCombine, r % c.depth, again(r, 2)});
    }
  }
}

}  // namespace

std::vector<Step> make_script(const Case& c, std::uint32_t rounds, Order order) {
  std::vector<Step> script;
  if (order == Order::kCached) add_cached(c, rounds, script);
  if (order == Order::kTraining) add_training(c, rounds, script);
  if (!script.empty()) return script;
  const auto add = [&](Kind kind, std::uint32_t round) { script.push_back({kind, round % c.depth, round}); };
  const std::uint32_t window = order == Order::kInTurn ? 1 : order == Order::kWindows ? c.depth : rounds;
  for (std::uint32_t first = 0; first < rounds; first += window) {
    const std::uint32_t last = std::min(first + window, rounds);
    // Staggered: combine lags behind by depth - 1 rounds, so that slots are never wanted twice.
    const std::uint32_t lag = order == Order::kStaggered ? c.depth - 1 : last - first;
    for (std::uint32_t round = first; round < last; ++round) {
      add(Kind::kDispatch, round);
      if (order == Order::kStaggered && round >= lag) add(Kind::kCombine, round - lag);
    }
    const std::uint32_t left = order == Order::kStaggered ? (last > lag ? last - lag : 0) : first;
    for (std::uint32_t round = left; round < last; ++round) add(Kind::kCombine, round);
  }
  return script;
}

ScriptRunner::ScriptRunner(const Group& group, const Case& c, std::uint32_t rank, ScriptOptions options)
    : group_(group),
      case_(c),
      rank_(rank),
      options_(std::move(options)),
      script_(make_script(c, options_.rounds, options_.order)),
      routed_(options_.rounds),
      losses_(c, rank) {
  for (std::size_t i = 0; i < script_.size(); ++i) {
    Routed& routed = routed_[script_[i].round.routing];
    if (script_[i].kind == Kind::kDispatch) routed.dispatch = i;
    routed.last_use = i;
  }
}

std::string ScriptRunner::at(std::size_t step) const {
  const char* const names[] = {"dispatch", "cached dispatch", "combine"};
  const Step& s = script_[step];
  return case_.describe() + "; rank " + std::to_string(rank_) + ", step " + std::to_string(step) + " (" +
         names[static_cast<std::size_t>(s.kind)] + ", data " + std::to_string(s.round.data) + ", routing " +
         std::to_string(s.round.routing) + ", slot " + std::to_string(s.slot) + ")";
}

const std::vector<Input>& ScriptRunner::inputs_of(Round round) {
  const auto found = inputs_.find(round);
  if (found != inputs_.end()) return found->second;
  while (inputs_.size() > case_.depth + 1u) inputs_.erase(inputs_.begin());
  return inputs_.emplace(round, make_inputs(case_, round)).first->second;
}

bool ScriptRunner::can_submit() const {
  if (next_ == script_.size() || in_flight_.size() >= case_.depth) return false;
  const Step& next = script_[next_];
  const std::size_t dispatch = routed_[next.round.routing].dispatch;
  return std::none_of(in_flight_.begin(), in_flight_.end(), [&](const InFlight& f) {
    return script_[f.step].slot == next.slot || (f.step == dispatch && next.kind != Kind::kDispatch);
  });
}

epd_status_t ScriptRunner::submit_dispatch(const Step& s, const Input& own, epd_ticket_t& ticket) {
  Routed& routed = routed_[s.round.routing];
  const bool cached = s.kind == Kind::kCached;
  fill_dispatch(case_, group_.buffers(s.slot), own, cached);
  epd_dispatch_args_t args = dispatch_args(case_.at(s.round), own.num_tokens);
  args.slot = s.slot;
  args.timeout_ms = options_.timeout_ms;
  args.keep_handle = s.keep ? 1 : 0;
  if (cached) args.handle = routed.handle;
  epd_handle_t handle = 0;
  const epd_status_t status = group_.dispatch(&args, &ticket, &handle);
  if (status != EPD_OK) return status;
  RANK_CHECK(handle != 0 && (!cached || handle == routed.handle), "handle " + std::to_string(handle));
  routed.handle = handle;
  if (s.keep) routed.kept = true;
  return status;
}

epd_status_t ScriptRunner::submit_combine(const Step& s, epd_ticket_t& ticket) {
  Routed& routed = routed_[s.round.routing];
  // After a break this may be a redo, on a slot that the next dispatch has been prepared on meanwhile.
  fill_combine(case_, group_.buffers(s.slot), rank_, s.round, routed.num_recv_rows);
  epd_combine_args_t args = combine_args(case_, s.round);
  args.slot = s.slot;
  args.handle = routed.handle;  // 0: its dispatch came before this rank
  args.timeout_ms = options_.timeout_ms;
  return group_.combine(&args, &ticket);
}

epd_status_t ScriptRunner::submit(std::size_t step) {
  const Step& s = script_[step];
  epd_ticket_t ticket = 0;
  const epd_status_t status = s.kind == Kind::kCombine
                                  ? submit_combine(s, ticket)
                                  : submit_dispatch(s, inputs_of(s.round)[rank_], ticket);
  if (status == EPD_OK) in_flight_.push_back({step, ticket});
  return status;
}

void ScriptRunner::check(const Step& step, const epd_result_t& result, const epd_counts_t* counts) {
  const std::uint64_t routing = step.round.routing;
  if (step.kind == Step::Kind::kDispatch) losses_.make_routing(routing);
  const std::vector<Input>& all = inputs_of(step.round);
  const std::vector<Input> inputs = losses_.dispatched(routing, all);
  const bool combine = step.kind == Kind::kCombine;
  const epd_buffers_t buffers = group_.buffers(step.slot);
  std::string text = combine ? losses_.check_combine(buffers, step.round, all, result.num_dropped_selections)
                             : check_dispatch(case_.at(step.round), buffers, inputs, rank_, result, counts);
  if (!combine && text.empty()) text = losses_.check_dropped(routing, all, result.num_dropped_selections);
  if (!text.empty()) RANK_FAIL(text);
  if (!combine) routed_[step.round.routing].num_recv_rows = result.num_recv_rows;
  stats_.digests.push_back(combine ? digest_combine(case_, buffers, inputs[rank_].num_tokens)
                                   : digest_dispatch(case_.at(step.round), buffers, result.num_recv_rows));
}

// The words that kernels read. They may be of a later epoch than `lost`: then the board says so too.
void ScriptRunner::check_mask(const std::set<std::uint32_t>& lost) const {
  const std::vector<std::int32_t> mask = group_.active_mask(case_.num_ranks);
  bool same = true;
  for (std::uint32_t rank = 0; rank < case_.num_ranks; ++rank)
    same = same && (epd_group_active(group_.get(), rank) != 0) == !lost.contains(rank);
  for (std::uint32_t rank = 0; same && rank < case_.num_ranks; ++rank) {
    if (mask[rank] != (lost.contains(rank) ? 0 : 1))
      RANK_FAIL("the mask of active ranks has " + std::to_string(mask[rank]) + " for rank " +
                std::to_string(rank));
  }
}

// The list of active ranks is read by itself, so it may be of a later epoch than the one that was told.
epd_status_t ScriptRunner::take_epoch(epd_resume_info_t& info) {
  for (std::uint64_t told = 0;; told = info.epoch) {
    std::set<std::uint32_t> lost;
    for (std::uint32_t rank = 0; rank < case_.num_ranks; ++rank) {
      if (epd_group_active(group_.get(), rank) == 0) lost.insert(rank);
    }
    const epd_status_t status = epd_group_resume(group_.get(), kResumeMs, &info);
    if (status != EPD_OK) return status;
    if (info.epoch != told) continue;
    check_mask(lost);
    losses_.begin_epoch(told, lost);
    return EPD_OK;
  }
}

void ScriptRunner::spoil_inputs(const InFlight& oldest) {
  if (epd_ticket_wait_sent(group_.get(), oldest.ticket, kHangMs) != EPD_OK) return;  // the wait says why
  const Step& step = script_[oldest.step];
  const epd_buffers_t buffers = group_.buffers(step.slot);
  const abi::GroupShape shape = case_.shape();
  const auto spoil = [&](void* region, abi::Region which) {
    if (region == nullptr) return;
    std::memset(region, 0x5a, abi::region_bytes(shape, which));
    group_.update(region, abi::region_bytes(shape, which));
  };
  spoil(buffers.topk_weights, abi::Region::kTopkWeights);
  if (step.kind == Kind::kCombine) {
    spoil(buffers.y_weights, abi::Region::kYWeights);
    if (case_.hidden <= 1024) spoil(buffers.y, abi::Region::kY);
  } else {
    spoil(buffers.x, abi::Region::kX);
    spoil(buffers.x_scales, abi::Region::kXScales);
    spoil(buffers.topk_idx, abi::Region::kTopkIdx);
  }
}

epd_status_t ScriptRunner::finish_oldest() {
  const InFlight oldest = in_flight_.front();
  in_flight_.pop_front();
  const Step& step = script_[oldest.step];
  note(at(oldest.step));
  epd_counts_t counts;
  epd_counts_init(&counts);
  const bool dispatch = step.kind != Kind::kCombine;
  const bool counted = dispatch && epd_ticket_counts(group_.get(), oldest.ticket, kHangMs, &counts) == EPD_OK;
  if (case_.defer) spoil_inputs(oldest);
  epd_result_t result;
  epd_result_init(&result);
  const epd_status_t status = group_.wait(oldest.ticket, kHangMs, &result);
  const std::string said = status == EPD_OK ? "" : epd_last_error();
  RANK_CHECK(epd_ticket_pending(group_.get(), oldest.ticket) == 0,
             at(oldest.step) + " still in flight: " + said);
  RANK_CHECK(result.status == status, at(oldest.step) + " returned " + epd_status_name(status) +
                                          ", its result says " + epd_status_name(result.status));
  if (status != EPD_OK) {
    ++stats_.failures[epd_status_name(status)];
    if (options_.on_failure) options_.on_failure(status);
    RANK_CHECK(options_.recover || status == options_.end,
               at(oldest.step) + " ended with " + epd_status_name(status) + ": " + said);
    RANK_CHECK(!said.empty(), at(oldest.step) + " failed without a message");
    return status;
  }
  RANK_CHECK(result.op_index == options_.first_op + oldest.step,
             at(oldest.step) + " has number " + std::to_string(result.op_index));
  RANK_CHECK(!dispatch || counted, at(oldest.step) + " gave no counts");
  try {
    check(step, result, counted ? &counts : nullptr);
  } catch (const RankFailure& failure) {
    RANK_FAIL(at(oldest.step) + ": " + failure.text);
  }
  ++stats_.completed;
  release_handles(oldest.step);
  if (options_.on_complete) options_.on_complete(stats_.completed);
  return EPD_OK;
}

void ScriptRunner::drain() {
  while (!in_flight_.empty()) finish_oldest();
}

// Everything in flight ends first; then all ranks agree where to continue. False: the group has ended.
bool ScriptRunner::recover(epd_status_t status) {
  drain();
  if (options_.ends.contains(status) && !allows_resume(status, case_.degrade)) return false;
  RANK_CHECK(allows_resume(status, case_.degrade),
             case_.describe() + ": " + epd_status_name(status) + ": " + epd_last_error());
  epd_resume_info_t info;
  epd_resume_info_init(&info);
  if (!resume(epd_status_name(status), info)) return false;
  ++stats_.resumes;
  RANK_CHECK(info.resume_op >= options_.first_op && info.resume_op <= options_.first_op + next_,
             "resume_op is " + std::to_string(info.resume_op) +
                 "; submitted: " + std::to_string(options_.first_op + next_));
  go_back_to(info.resume_op - options_.first_op);
  return true;
}

// A dispatch that is to be done again gets a new handle.
void ScriptRunner::go_back_to(std::size_t step) {
  next_ = step;
  for (Routed& routed : routed_) {
    if (!routed.kept || routed.dispatch < step) continue;
    must(epd_handle_release(group_.get(), routed.handle), "release after a break", EPD_OK);
    routed.kept = false;
  }
}

// Every rank has completed an operation when this one has completed the one `depth` later.
void ScriptRunner::release_handles(std::size_t completed) {
  for (Routed& routed : routed_) {
    if (!routed.kept || routed.last_use + case_.depth > completed) continue;
    must(epd_handle_release(group_.get(), routed.handle), "release a kept handle");
    routed.kept = false;
  }
}

bool ScriptRunner::resume(const std::string& why, epd_resume_info_t& info) {
  note("resume after " + why);
  const epd_status_t status = take_epoch(info);
  if (status != EPD_OK && is_end(status)) return false;
  must(status, "resume after " + why);
  return true;
}

// True if a peer's failure takes this rank back into the script that it had completed.
bool ScriptRunner::redo_for_peers() {
  if (options_.finished == nullptr) return false;
  options_.finished->arrive();
  const double end = now_s() + 60;
  while (options_.finished->count.load() < num_finishers()) {
    RANK_CHECK(now_s() < end, "the other ranks have not finished in 60 s");
    sleep_ms(2);
    const std::uint64_t epoch = losses_.epoch();
    epd_resume_info_t info;
    epd_resume_info_init(&info);
    const epd_status_t status = take_epoch(info);
    if (options_.finished->count.load() >= num_finishers()) break;  // others may have left by now
    must(status, "resume while the others finish");
    if (info.epoch == epoch || info.resume_op >= options_.first_op + script_.size()) continue;
    options_.finished->count.fetch_sub(1);
    ++stats_.resumes;
    go_back_to(info.resume_op - options_.first_op);
    return true;
  }
  return false;
}

ScriptStats ScriptRunner::run() {
  epd_resume_info_t info;
  epd_resume_info_init(&info);
  if (options_.recover && !resume("nothing", info)) return stats_;  // to know the epoch
  if (case_.degrade) next_ = info.resume_op - options_.first_op;    // where the others are
  do {
    run_to_end();
  } while (redo_for_peers());
  if (stats_.completed >= script_.size()) release_handles(script_.size() + case_.depth);
  return stats_;
}

void ScriptRunner::run_to_end() {
  while (next_ < script_.size() || !in_flight_.empty()) {
    epd_status_t status = EPD_OK;
    if (can_submit()) {
      note("submit " + at(next_));
      status = submit(next_);
      if (status == EPD_WOULD_BLOCK && !in_flight_.empty()) {
        status = finish_oldest();  // it uses the routing that this one replaces
        if (status == EPD_OK) continue;
      } else if (status == EPD_OK) {
        ++next_;
        if (options_.on_submit) options_.on_submit(next_);
        continue;
      } else if (options_.on_failure) {
        options_.on_failure(status);
      }
      RANK_CHECK(options_.recover || status == options_.end,
                 at(next_) + " was refused with " + epd_status_name(status) + ": " + epd_last_error());
    } else {
      status = finish_oldest();
    }
    if (status == EPD_OK) continue;
    if (status != options_.end && recover(status)) continue;
    drain();
    next_ = script_.size();
    break;
  }
}

std::string run_case(const std::string& socket, const std::string& device, const std::string& group,
                     const Case& c, std::uint32_t rank, const ScriptOptions& options) {
  note("attach to " + device);
  const Session session(socket, device);
  note("join " + group);
  const Group member(session, c.config(group.c_str(), rank), c.in_stream_on(rank));
  return ScriptRunner(member, c, rank, options).run().to_string();
}

}  // namespace epd::test
