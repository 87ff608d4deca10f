#include "support/replayed.h"

#include "support/ranks.h"

#include <cstring>

namespace epd::test {

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
  RANK_CHECK(stream_.finish(kStreamSeconds), "the stream waits");
}

void Replayed::check(std::uint64_t round, const std::set<std::uint32_t>& lost) const {
  const epd_buffers_t received = group_.buffers_in(given_ + bytes_);
  std::string text = check_received(case_, received, rank_, round, rows_received(case_, received), lost);
  RANK_CHECK(text.empty(), text);
  text = check_combined(case_, group_.buffers_in(given_ + 2 * bytes_), rank_, round, lost);
  RANK_CHECK(text.empty(), text);
}
GpuGraph Replayed::capture() {
  stream_.begin_capture();
  stream_.copy_in(n_at_, n_, 4);
  stream_.copy_in(group_.slot_on_gpu(0), given_, bytes_);
  epd_dispatch_args_t args = dispatch_args(case_, 0);
  args.num_tokens_at = reinterpret_cast<const std::uint32_t*>(n_at_);
  epd_ticket_t ticket = 0;
  epd_handle_t handle = 0;
  must(epd_dispatch(group_.get(), &args, stream_.get(), &ticket, &handle), "dispatch");
  stream_.copy_out(given_ + bytes_, group_.slot_on_gpu(0), bytes_);
  const epd_buffers_t slot = group_.buffers_in(group_.slot_on_gpu(0));
  stream_.copy(slot.y, slot.recv_x, abi::region_bytes(case_.shape(), abi::Region::kY));
  epd_combine_args_t then = combine_args(case_, 0);
  then.handle = handle;
  must(epd_combine(group_.get(), &then, stream_.get(), &ticket), "combine");
  stream_.copy_out(given_ + 2 * bytes_, group_.slot_on_gpu(0), bytes_);
  return stream_.end_capture();
}

}  // namespace epd::test
