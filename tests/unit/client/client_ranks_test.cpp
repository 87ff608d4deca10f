// The client library's view of the ranks of its group: the mask that kernels read, and how long each was
// waited for, with a scripted engine.
#include "client_fixture.h"

#include "proto/waits.h"

#include <vector>

namespace epd::testing {
namespace {

class ClientRanks : public ClientTest {
 protected:
  void SetUp() override { ASSERT_EQ(attach_to(daemon_, &session_), EPD_OK) << epd_last_error(); }
  void join() {
    epd_group_config_t config = small_config();
    config.policy = EPD_POLICY_DEGRADE;
    ASSERT_EQ(epd_group_join(session_, &config, &group_), EPD_OK) << epd_last_error();
  }
  std::vector<std::int32_t> mask() const {
    const std::int32_t* words = nullptr;
    EXPECT_EQ(epd_group_active_mask(group_, &words), EPD_OK) << epd_last_error();
    return {words, words + 2};
  }
  // The set is of the next epoch.
  void resume_with(std::uint64_t active) {
    daemon_.member(0).board().active[0] = active;
    daemon_.write_board(abi::GroupState::kActive, ++epoch_, 0, StatusCode::kRankLost, "rank 0 died");
    ASSERT_EQ(epd_group_resume(group_, EPD_NO_WAIT, nullptr), EPD_OK) << epd_last_error();
  }

  std::uint64_t epoch_ = 1;
};

TEST_F(ClientRanks, TheMaskIsWhatTheLastResumeHasFound) {
  FakeSettings settings;
  settings.active = 3;
  daemon_.set(settings);
  join();
  const std::int32_t* at_first = nullptr;
  ASSERT_EQ(epd_group_active_mask(group_, &at_first), EPD_OK);
  EXPECT_EQ(mask(), (std::vector<std::int32_t>{1, 1}));
  daemon_.member(0).board().active[0] = 2;
  EXPECT_EQ(epd_group_active(group_, 0), 0) << "the board says so already";
  EXPECT_EQ(mask(), (std::vector<std::int32_t>{1, 1})) << "and nobody has resumed";
  resume_with(2);
  EXPECT_EQ(mask(), (std::vector<std::int32_t>{0, 1}));
  resume_with(3);
  EXPECT_EQ(mask(), (std::vector<std::int32_t>{1, 1}));
  const std::int32_t* at_last = nullptr;
  ASSERT_EQ(epd_group_active_mask(group_, &at_last), EPD_OK);
  EXPECT_EQ(at_last, at_first);
  const FakeMember& member = daemon_.member(0);
  EXPECT_EQ(member.user.as<std::int32_t>(abi::UserArenaLayout(member.shape).active)[1], 1)
      << "it lies in the user arena";
  EXPECT_EQ(epd_group_active_mask(group_, nullptr), EPD_INVALID_ARGUMENT);
}

TEST_F(ClientRanks, WaitsAreThoseThatTheEngineHasCounted) {
  join();
  std::int64_t ready[2] = {-1, -1};
  std::int64_t arrived[2] = {-1, -1};
  ASSERT_EQ(epd_group_waits(group_, ready, arrived), EPD_OK) << epd_last_error();
  EXPECT_EQ(ready[0] + ready[1] + arrived[0] + arrived[1], 0);
  const FakeMember& member = daemon_.member(0);
  abi::PeerWait* const peers = abi::RankWaits::in(member.board_mapping.bytes(), member.shape).peers;
  peers[0].ready_ns = 70;
  peers[0].arrived_ns = 5'000'000'000;
  peers[1].ready_ns = 3;
  ASSERT_EQ(epd_group_waits(group_, ready, nullptr), EPD_OK) << epd_last_error();
  EXPECT_EQ(ready[0], 70);
  EXPECT_EQ(ready[1], 3);
  EXPECT_EQ(arrived[0], 0) << "not wanted";
  ASSERT_EQ(epd_group_waits(group_, nullptr, arrived), EPD_OK) << epd_last_error();
  EXPECT_EQ(arrived[0], 5'000'000'000);
  EXPECT_EQ(epd_group_waits(group_, nullptr, nullptr), EPD_OK);
}

}  // namespace
}  // namespace epd::testing
