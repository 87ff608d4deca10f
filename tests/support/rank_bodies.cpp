#include "support/rank_bodies.h"

namespace epd::test {

std::vector<RankProcess> start_group(
    const Daemon& daemon, const Case& c, const std::string& name,
    const std::function<std::string(const Group&, std::uint32_t rank)>& body) {
  return start_ranks(c.num_ranks, [&](std::uint32_t rank) {
    const Session session(daemon.socket(), daemon.device(rank), c.wait_by_on(rank));
    const Group group(session, c.config(name.c_str(), rank));
    return body(group, rank);
  });
}

epd_status_t submit_dispatch(const Group& group, const Case& c, std::uint32_t rank, std::uint32_t round,
                             std::uint32_t timeout_ms, epd_ticket_t* ticket, epd_handle_t* handle) {
  const std::uint32_t slot = round % c.depth;
  const Input input = make_input(c, rank, round);
  fill_dispatch(c, group.buffers(slot), input);
  epd_dispatch_args_t args;
  epd_dispatch_args_init(&args);
  args.slot = slot;
  args.num_tokens = input.num_tokens;
  args.timeout_ms = timeout_ms;
  return group.dispatch(&args, ticket, handle);
}

std::uint64_t resume(const Group& group, std::int32_t timeout_ms) {
  epd_resume_info_t info;
  epd_resume_info_init(&info);
  must(epd_group_resume(group.get(), timeout_ms, &info), "resume");
  return info.resume_op;
}

}  // namespace epd::test
