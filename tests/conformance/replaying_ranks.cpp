#include "replaying_ranks.h"

namespace epd::test {

void ReplayingRank::play(std::uint64_t first, std::uint64_t last, const std::set<std::uint32_t>& lost) const {
  for (std::uint64_t round = first; round < last; ++round) {
    replayed.play(round);
    replayed.check(round, lost);
  }
}

void ReplayingRank::must_be(epd_status_t status) const {
  must(epd_group_check(group.get(), nullptr), "check", status);
}

void ReplayingRank::must_become(epd_status_t status) const {
  const bool wrong = eventually(30, [&] { return epd_group_check(group.get(), nullptr) != EPD_OK; });
  RANK_CHECK(wrong, std::string("check never said ") + epd_status_name(status));
  must_be(status);
}

void ReplayingRank::resume() const {
  epd_resume_info_t info;
  epd_resume_info_init(&info);
  must(epd_group_resume(group.get(), 30000, &info), "resume");
}

void as_replaying_rank(const Daemon& daemon, const Case& c, const std::string& group, std::uint32_t rank,
                       const ReplayingBody& body) {
  const Session session(daemon.socket(), daemon.device(rank), c.wait_by_on(rank));
  const Group joined(session, c.config(group.c_str(), rank));
  Replayed replayed(joined, c, rank);
  body({joined, replayed, rank});
}

RankProcess replaying_rank(const Daemon& daemon, const Case& c, const std::string& group, std::uint32_t rank,
                           const ReplayingBody& body) {
  return RankProcess([&]() -> std::string {
    as_replaying_rank(daemon, c, group, rank, body);
    return "";
  });
}

std::vector<RankProcess> replaying_ranks(const Daemon& daemon, const Case& c, const std::string& group,
                                         const ReplayingBody& body) {
  std::vector<RankProcess> ranks;
  for (std::uint32_t rank = 0; rank < c.num_ranks; ++rank)
    ranks.push_back(replaying_rank(daemon, c, group, rank, body));
  return ranks;
}

}  // namespace epd::test
