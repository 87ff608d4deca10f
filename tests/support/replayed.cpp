#include "support/replayed.h"

#include "support/ranks.h"

#include <cstring>

namespace epd::test {
namespace {

constexpr std::int32_t kToldMs = 10'000;  // the stream has been synchronised

}  // namespace

Replayed::Replayed(const Group& group, const Case& c, std::uint32_t rank)
    : group_(group),
      case_(c),
      rank_(rank),
      bytes_(group.slot_bytes()),
      stream_(group.gpu()),
      given_(pinned_memory(group.gpu(), 3 * bytes_)),
      n_(reinterpret_cast<std::uint32_t*>(pinned_memory(group.gpu(), 4))),
      n_at_(allocate_on_gpu(group.gpu(), 4).address),
      graph_(capture()) {}

void Replayed::play(std::uint64_t round) {
  const Input input = input_of(case_, rank_, round);
  std::memset(given_, kPoison, 3 * bytes_);
  fill_dispatch(case_, group_.buffers_in(given_), input);
  *n_ = input.num_tokens;
  launch();
}

void Replayed::play_with_a_bad_choice() {
  std::memset(given_, kPoison, 3 * bytes_);
  fill_dispatch(case_, group_.buffers_in(given_), input_of(case_, rank_, 0));
  static_cast<std::int32_t*>(group_.buffers_in(given_).topk_idx)[0] = 1 << 20;
  *n_ = 1;
  launch();
}

void Replayed::launch() {
  stream_.launch(graph_);
  ++replays_;
  RANK_CHECK(stream_.finish(kStreamSeconds), "the stream waits");
}

void Replayed::check(std::uint64_t round, const std::set<std::uint32_t>& lost) {
  const epd_buffers_t received = group_.buffers_in(given_ + bytes_);
  std::string text = check_received(case_, received, rank_, round, must_be_told(dispatch_, EPD_OK), lost);
  RANK_CHECK(text.empty(), text);
  must_be_told(combine_, EPD_OK);
  text = check_combined(case_, group_.buffers_in(given_ + 2 * bytes_), rank_, round, lost);
  RANK_CHECK(text.empty(), text);
}

void Replayed::must_end(epd_status_t status) {
  must_be_told(dispatch_, status);
  must_be_told(combine_, status);
}

// Checks the last replay. Results of earlier replays, which nobody has asked for, are passed over if they
// differ.
std::uint32_t Replayed::must_be_told(Captured& of, epd_status_t status) const {
  epd_result_t result;
  for (epd_status_t told = EPD_OK;;) {
    epd_result_init(&result);
    told = epd_ticket_wait(group_.get(), of.ticket, kToldMs, &result);
    const bool earlier = result.runs > of.runs && result.runs < replays_;
    if (told == status || !earlier) must(told, "the ticket", status);
    RANK_CHECK(result.runs > of.runs && result.runs <= replays_,
               "of " + std::to_string(replays_) + " replays, after " + std::to_string(of.runs) +
                   ", the result is of " + std::to_string(result.runs));
    of.runs = result.runs;
    if (told == status) return result.num_recv_rows;
  }
}

GpuGraph Replayed::capture() {
  stream_.begin_capture();
  stream_.copy_in(n_at_, n_, 4);
  stream_.copy_in(group_.slot_on_gpu(0), given_, bytes_);
  epd_dispatch_args_t args = dispatch_args(case_, 0);
  args.num_tokens_at = reinterpret_cast<const std::uint32_t*>(n_at_);
  epd_handle_t handle = 0;
  must(epd_dispatch(group_.get(), &args, stream_.get(), &dispatch_.ticket, &handle), "dispatch");
  stream_.copy_out(given_ + bytes_, group_.slot_on_gpu(0), bytes_);
  const epd_buffers_t slot = group_.buffers_in(group_.slot_on_gpu(0));
  stream_.copy(slot.y, slot.recv_x, abi::region_bytes(case_.shape(), abi::Region::kY));
  epd_combine_args_t then = combine_args(case_, 0);
  then.handle = handle;
  must(epd_combine(group_.get(), &then, stream_.get(), &combine_.ticket), "combine");
  stream_.copy_out(given_ + 2 * bytes_, group_.slot_on_gpu(0), bytes_);
  return stream_.end_capture();
}

}  // namespace epd::test
