// epd_group_restore on a rank that takes part, and on one that was late.
#include "client_fixture.h"

#include <future>
#include <string>

namespace epd::testing {
namespace {

class ClientRestore : public ClientTest {
 protected:
  void SetUp() override {
    ASSERT_EQ(attach_to(daemon_, &session_), EPD_OK) << epd_last_error();
    group_ = join(late_config());
  }
  static epd_group_config_t late_config() {
    epd_group_config_t config = small_config();
    config.policy = EPD_POLICY_DEGRADE_LATE;
    return config;
  }
  epd_group_t* join(const epd_group_config_t& config) {
    epd_group_t* group = nullptr;
    EXPECT_EQ(epd_group_join(session_, &config, &group), EPD_OK) << epd_last_error();
    return group;
  }
  // How the daemon answers from now on: at which operation joins begin, and whether the rank was not late.
  void answer(std::uint64_t resume_index, bool keeps_member = false) {
    FakeSettings settings;
    settings.automatic = false;
    settings.resume_index = resume_index;
    settings.keeps_member = keeps_member;
    daemon_.set(settings);
  }
  // This rank, whose last membership has the number, is late.
  void lose(std::size_t membership) {
    daemon_.member(membership).board().state.store(static_cast<std::uint32_t>(abi::GroupState::kLost));
  }
};

TEST_F(ClientRestore, RefusesWhatItCannotServe) {
  epd_group_config_t config = small_config();
  config.name = "fails-fast";
  EXPECT_EQ(epd_group_restore(join(config), 0, nullptr), EPD_INVALID_ARGUMENT);
  EXPECT_ERROR_HAS("policy is 0; allowed: 2 (EPD_POLICY_DEGRADE_LATE)");
  config = late_config();
  config.name = "spans";
  config.span = EPD_SPAN_CLUSTER;
  epd_group_t* const spans = join(config);
  EXPECT_EQ(epd_group_restore(spans, 0, nullptr), EPD_UNSUPPORTED);
  EXPECT_EQ(epd_group_restore(spans, EPD_NO_WAIT, nullptr), EPD_INVALID_ARGUMENT);
  epd_ticket_t ticket = 0;
  ASSERT_EQ(epd_noop(group_, 0, EPD_NO_STREAM, &ticket), EPD_OK) << epd_last_error();
  EXPECT_EQ(epd_group_restore(group_, 0, nullptr), EPD_WOULD_BLOCK);
  EXPECT_ERROR_HAS("is in flight");
}

TEST_F(ClientRestore, ARankThatTakesPartWaitsForTheEpoch) {
  answer(0, true);
  epd_resume_info_t info;
  epd_resume_info_init(&info);
  auto restoring = std::async(std::launch::async, [&] { return epd_group_restore(group_, 1, &info); });
  ASSERT_TRUE(daemon_.await_client_sleep());
  daemon_.write_board(abi::GroupState::kBroken, 1, 0, StatusCode::kAborted, "rank 0 has rejoined");
  pause_ms(20);  // longer than the timeout, which is for the calls of the others
  daemon_.write_board(abi::GroupState::kActive, 2, 9, StatusCode::kAborted, "rank 0 has rejoined");
  EXPECT_EQ(restoring.get(), EPD_OK) << epd_last_error();
  EXPECT_EQ(info.epoch, 2u);
  EXPECT_EQ(info.resume_op, 9u);
}

// They were accepted, and gave zeros.
TEST_F(ClientRestore, OnALateRankHandlesOfBeforeHaveEnded) {
  epd_handle_t before = 0;
  wait_completed(dispatch(0, 3, &before));
  for (const std::uint64_t resume_index : {7u, 20u}) {  // it is lost and comes back twice
    SCOPED_TRACE(resume_index);
    answer(resume_index);
    lose(resume_index == 7 ? 0 : 1);
    epd_resume_info_t info;
    epd_resume_info_init(&info);
    ASSERT_EQ(epd_group_restore(group_, 0, &info), EPD_OK) << epd_last_error();
    EXPECT_EQ(info.resume_op, resume_index);
    epd_ticket_t ticket = 0;
    EXPECT_EQ(combine(0, before, &ticket), EPD_NOT_FOUND);
    EXPECT_ERROR_HAS("handle " + std::to_string(before) + " is of before epd_group_restore");
    epd_handle_t after = 0;
    wait_completed(dispatch(0, 3, &after));
    EXPECT_EQ(combine(0, before, &ticket), EPD_NOT_FOUND);
    ASSERT_EQ(combine(0, after, &ticket), EPD_OK) << epd_last_error();
    wait_completed(ticket);
    before = after;
  }
}

TEST_F(ClientRestore, ANewcomerHasNoTokensUnderHandlesOfBefore) {
  answer(5);
  epd_group_config_t config = late_config();
  config.name = "newcomer";
  epd_group_t* const newcomer = join(config);
  epd_dispatch_args_t args;
  epd_dispatch_args_init(&args);
  args.handle = 1;  // of slot 0's record
  args.num_tokens = 3;
  epd_ticket_t ticket = 0;
  EXPECT_EQ(epd_dispatch(newcomer, &args, EPD_NO_STREAM, &ticket, nullptr), EPD_INVALID_ARGUMENT);
  EXPECT_ERROR_HAS("num_tokens is 3; allowed: 0, as handle 1 is of a dispatch before this rank joined");
  args.num_tokens = 0;
  EXPECT_EQ(epd_dispatch(newcomer, &args, EPD_NO_STREAM, &ticket, nullptr), EPD_OK) << epd_last_error();
}

// It could not continue where the group was at a combine: it has no handle.
TEST_F(ClientRestore, ANewcomerCombinesWhatWasDispatchedBeforeUnderHandle0) {
  epd_ticket_t ticket = 0;
  EXPECT_EQ(combine(0, 0, &ticket), EPD_NOT_FOUND) << "this rank has been there from the start";
  answer(5);
  epd_group_config_t config = late_config();
  config.name = "newcomer";
  group_ = join(config);
  wait_completed(dispatch(0));
  EXPECT_EQ(combine(0, 0, &ticket), EPD_OK) << epd_last_error();
  auto call = daemon_.next_call();
  EXPECT_EQ(call->route, 1u) << "a record in which it has no routing";
  daemon_.complete(*call);
  EXPECT_EQ(wait(ticket), EPD_OK);
  for (std::uint32_t slot = 1; slot < 4; ++slot) wait_completed(dispatch(slot));
  EXPECT_EQ(combine(0, 0, &ticket), EPD_NOT_FOUND);
  EXPECT_ERROR_HAS("every record has had a later one");
}

}  // namespace
}  // namespace epd::testing
