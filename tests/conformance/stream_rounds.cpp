#include "stream_rounds.h"

#include <cstdlib>
#include <cstring>
#include <utility>

namespace epd::test {
namespace {

std::string name(std::uint64_t round, const char* what) {
  return std::string(what) + " of round " + std::to_string(round);
}

}  // namespace

Case StreamConformance::stream_case(std::uint32_t num_ranks, std::uint32_t depth, epd_layout_t layout) {
  Case c;
  c.kernel_waits = kernel_waits();
  c.event_waits = event_waits();
  c.seed = base_seed() + 7000;
  c.num_ranks = num_ranks;
  c.num_experts = num_ranks * 2;
  c.max_tokens = 8;
  c.depth = depth;
  c.layout = layout;
  c.alignment = layout == EPD_LAYOUT_PACKED ? 4 : 1;
  return c;
}

Rounds::Rounds(const Group& group, const Case& c, std::uint32_t rank, std::size_t most, std::uint32_t slots)
    : group_(group),
      case_(c),
      rank_(rank),
      slots_(slots),
      bytes_(group.slot_bytes()),
      stream_(group.gpu()),
      downloads_(group.gpu()) {
  left_ = most * kCopies;
  free_ = pinned_memory(group.gpu(), left_ * bytes_);
  rounds_.reserve(most);
}

void Rounds::submit(std::uint64_t number, std::uint32_t timeout_ms, bool elsewhere) {
  must(try_submit(number, timeout_ms, elsewhere), "round " + std::to_string(number));
}

epd_status_t Rounds::try_submit(std::uint64_t number, std::uint32_t timeout_ms, bool elsewhere) {
  Round& r = add(number);
  const auto slot = static_cast<std::uint32_t>(number % slots_);
  const std::uint32_t other = elsewhere ? (slot + 1) % slots_ : slot;
  upload(r, slot);
  epd_status_t status = dispatch(r, slot, timeout_ms);
  if (status != EPD_OK) return status;
  download(r.dispatch, r.received, slot);
  answer(slot, other);
  status = combine(r, other, timeout_ms);
  if (status == EPD_OK) download(r.combine, r.combined, other);
  return status;
}

epd_status_t Rounds::try_submit_combine(std::uint64_t number) {
  Round& r = add(number);
  const auto slot = static_cast<std::uint32_t>(number % slots_);
  r.handle = handles_[number];
  upload(r, slot);
  const auto y = answer_of(case_, inputs_of(case_, number), rank_).y;
  std::byte* const place = take();
  if (!y.empty()) std::memcpy(place, y.data(), y.size() * 2);
  stream_.copy_in(group_.buffers_in(group_.slot_on_gpu(slot)).y, place, y.size() * 2);
  const epd_status_t status = combine(r, slot, 20000);
  if (status == EPD_OK) download(r.combine, r.combined, slot);
  return status;
}

std::byte* Rounds::take() {
  RANK_CHECK(left_-- > 0, "more rounds than were planned");
  return std::exchange(free_, free_ + bytes_);
}

Rounds::Round& Rounds::add(std::uint64_t number) {
  Round r;
  r.number = number;
  r.given = take();
  r.received = take();
  r.combined = take();
  rounds_.push_back(r);
  return rounds_.back();
}

void Rounds::upload(const Round& r, std::uint32_t slot) {
  std::memset(r.given, kPoison, bytes_);
  fill_dispatch(case_, group_.buffers_in(r.given), input_of(case_, rank_, r.number));
  stream_.copy_in(group_.slot_on_gpu(slot), r.given, bytes_);
}

epd_status_t Rounds::dispatch(Round& r, std::uint32_t slot, std::uint32_t timeout_ms) {
  epd_dispatch_args_t args = dispatch_args(case_, input_of(case_, rank_, r.number).num_tokens);
  args.slot = slot;
  args.timeout_ms = timeout_ms;
  const epd_status_t status = when_there_is_room(
      [&] { return epd_dispatch(group_.get(), &args, stream_.get(), &r.dispatch, &r.handle); });
  if (status == EPD_OK) handles_[r.number] = r.handle;
  if (status == EPD_OK && case_.defer)
    must(epd_ticket_wait_on_stream(group_.get(), r.dispatch, stream_.get()), "wait on the stream");
  return status;
}

void Rounds::download(epd_ticket_t ticket, std::byte* to, std::uint32_t slot) {
  const bool by_event = case_.wait_by_on(rank_) == EPD_WAIT_BY_EVENT;
  const GpuStream& its = by_event ? downloads_ : stream_;
  if (by_event) {
    void* event = nullptr;
    must(epd_ticket_event(group_.get(), ticket, &event), "the event");
    its.wait_event(event);
  }
  its.copy_out(to, group_.slot_on_gpu(slot), bytes_);
  if (by_event) stream_.wait_for(its);
}

void Rounds::answer(std::uint32_t from_slot, std::uint32_t to_slot) {
  const epd_buffers_t from = group_.buffers_in(group_.slot_on_gpu(from_slot));
  const epd_buffers_t to = group_.buffers_in(group_.slot_on_gpu(to_slot));
  const abi::GroupShape shape = case_.shape();
  stream_.copy(to.y, from.recv_x, abi::region_bytes(shape, abi::Region::kY));
  if (from_slot == to_slot) return;
  stream_.copy(to.topk_weights, from.topk_weights, abi::region_bytes(shape, abi::Region::kTopkWeights));
}

epd_status_t Rounds::combine(Round& r, std::uint32_t slot, std::uint32_t timeout_ms) {
  epd_combine_args_t args = combine_args(case_, r.number);
  args.slot = slot;
  args.handle = r.handle;
  args.timeout_ms = timeout_ms;
  const epd_status_t status =
      when_there_is_room([&] { return epd_combine(group_.get(), &args, stream_.get(), &r.combine); });
  if (status == EPD_OK && case_.defer)
    must(epd_ticket_wait_on_stream(group_.get(), r.combine, stream_.get()), "wait on the stream");
  return status;
}

void must_have_gone_well(const Group& group, std::uint32_t failed_before) {
  epd_progress_t progress;
  epd_progress_init(&progress);
  const epd_status_t status = epd_group_check(group.get(), &progress);
  if (status != EPD_RANK_LOST) must(status, "check");
  RANK_CHECK(progress.failed == failed_before, std::to_string(progress.failed) + " calls were discarded");
}

void Rounds::check_received(const Round& r, const epd_result_t& result) const {
  const epd_buffers_t copy = group_.buffers_in(r.received);
  const std::string text = test::check_received(case_, copy, rank_, r.number, result.num_recv_rows);
  RANK_CHECK(text.empty(), text);
}

void Rounds::check_combined(const Round& r) const {
  const std::string text = test::check_combined(case_, group_.buffers_in(r.combined), rank_, r.number);
  RANK_CHECK(text.empty(), text);
}

void Rounds::check_all() {
  must_have_gone_well(group_, failed_);
  for (const Round& r : rounds_) {
    epd_result_t result;
    epd_result_init(&result);
    must(epd_ticket_wait(group_.get(), r.dispatch, kWaitMs, &result), name(r.number, "dispatch"));
    must(epd_ticket_wait(group_.get(), r.combine, kWaitMs, nullptr), name(r.number, "combine"));
    check_received(r, result);
    check_combined(r);
  }
  rounds_.clear();
}

void Rounds::all_must_fail(epd_status_t status) {
  for (const Round& r : rounds_) {
    must(epd_ticket_wait(group_.get(), r.dispatch, kWaitMs, nullptr), name(r.number, "dispatch"), status);
    must(epd_ticket_wait(group_.get(), r.combine, kWaitMs, nullptr), name(r.number, "combine"), status);
  }
  epd_progress_t progress;
  epd_progress_init(&progress);
  must(epd_group_check(group_.get(), &progress), "check", status);
  failed_ = progress.failed;
  rounds_.clear();
}

bool Rounds::check_those_that_ended_well() {
  bool good = true;
  const auto ended_well = [&](epd_ticket_t ticket, epd_result_t* result, const std::string& what) {
    if (ticket == 0) return false;  // refused
    const epd_status_t status = epd_ticket_wait(group_.get(), ticket, kWaitMs, result);
    if (status == EPD_OK) return true;
    must(status, what, EPD_ENGINE_RESTARTED);
    good = false;
    return false;
  };
  for (const Round& r : rounds_) {
    epd_result_t result;
    epd_result_init(&result);
    if (ended_well(r.dispatch, &result, name(r.number, "dispatch"))) check_received(r, result);
    if (ended_well(r.combine, nullptr, name(r.number, "combine"))) check_combined(r);
  }
  rounds_.clear();
  return good;
}

void rounds_without_a_stream(const Group& group, const Case& c, std::uint32_t rank, std::uint64_t first,
                             std::uint64_t last) {
  for (std::uint64_t number = first; number < last; ++number) {
    const auto slot = static_cast<std::uint32_t>(number % c.depth);
    const epd_buffers_t b = group.buffers(slot);
    const Input input = input_of(c, rank, number);
    fill_dispatch(c, b, input);
    epd_dispatch_args_t args = dispatch_args(c, input.num_tokens);
    args.slot = slot;
    epd_ticket_t ticket = 0;
    epd_handle_t handle = 0;
    epd_result_t result;
    epd_result_init(&result);
    must(group.dispatch(&args, &ticket, &handle), name(number, "dispatch"));
    must(group.wait(ticket, kWaitMs, &result), name(number, "dispatch"));
    std::string text = check_received(c, b, rank, number, result.num_recv_rows);
    RANK_CHECK(text.empty(), text);
    std::memcpy(b.y, b.recv_x, abi::region_bytes(c.shape(), abi::Region::kY));
    epd_combine_args_t then = combine_args(c, number);
    then.slot = slot;
    then.handle = handle;
    must(group.combine(&then, &ticket), name(number, "combine"));
    must(group.wait(ticket, kWaitMs), name(number, "combine"));
    text = check_combined(c, b, rank, number);
    RANK_CHECK(text.empty(), text);
  }
}

std::uint64_t epoch_of(const Group& group) {
  epd_resume_info_t info;
  epd_resume_info_init(&info);
  must(epd_group_resume(group.get(), 20000, &info), "resume");
  return info.epoch;
}

}  // namespace epd::test
