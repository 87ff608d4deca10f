// Routings as the client library keeps them: handles, kept ones, cached dispatches; and the other arguments
// of operations, with a scripted engine.
#include "client_fixture.h"

#include <cstring>
#include <future>
#include <utility>
#include <vector>

namespace epd::testing {
namespace {

class ClientHandles : public ClientTest {
 protected:
  void SetUp() override {
    ASSERT_EQ(attach_to(daemon_, &session_), EPD_OK) << epd_last_error();
    epd_group_config_t config = small_config();
    config.num_handles = 2;
    config.num_biases = 1;
    config.layout = EPD_LAYOUT_PACKED;
    ASSERT_EQ(epd_group_join(session_, &config, &group_), EPD_OK) << epd_last_error();
  }
  static epd_dispatch_args_t on_slot(std::uint32_t slot) {
    epd_dispatch_args_t args;
    epd_dispatch_args_init(&args);
    args.slot = slot;
    args.num_tokens = 3;
    return args;
  }
  epd_ticket_t keep(std::uint32_t slot, epd_handle_t* handle) {
    epd_dispatch_args_t args = on_slot(slot);
    args.keep_handle = 1;
    epd_ticket_t ticket = 0;
    EXPECT_EQ(epd_dispatch(group_, &args, EPD_NO_STREAM, &ticket, handle), EPD_OK) << epd_last_error();
    return ticket;
  }
  epd_status_t cached(std::uint32_t slot, epd_handle_t handle, epd_ticket_t* ticket,
                      std::uint32_t num_tokens = 0) {
    epd_dispatch_args_t args = on_slot(slot);
    args.num_tokens = num_tokens;
    args.handle = handle;
    epd_handle_t same = 0;
    const epd_status_t status = epd_dispatch(group_, &args, EPD_NO_STREAM, ticket, &same);
    EXPECT_TRUE(status != EPD_OK || same == handle);
    return status;
  }
  // Breaks the group at `resume_index`, and resumes.
  void break_and_resume(std::uint64_t resume_index) {
    daemon_.write_board(abi::GroupState::kActive, ++epoch_, resume_index, StatusCode::kEngineRestarted, "");
    ASSERT_EQ(epd_group_resume(group_, EPD_NO_WAIT, nullptr), EPD_OK) << epd_last_error();
  }

  std::uint64_t epoch_ = 1;
};

TEST_F(ClientHandles, TheSlotsOwnRouteIsTheSlot) {
  epd_handle_t handle = 0;
  const epd_ticket_t ticket = dispatch(3, 2, &handle);
  const auto first = daemon_.next_call();
  EXPECT_EQ(first->route, 3u);
  daemon_.complete(*first);
  EXPECT_EQ(wait(ticket), EPD_OK);
  // Any slot may combine under it, and dispatch under it again.
  epd_ticket_t other = 0;
  ASSERT_EQ(combine(1, handle, &other), EPD_OK) << epd_last_error();
  const auto second = daemon_.next_call();
  EXPECT_EQ(second->slot, 1u);
  EXPECT_EQ(second->route, 3u);
  EXPECT_EQ(second->num_tokens, 0u);
  ASSERT_EQ(cached(2, handle, &other, 2), EPD_OK) << epd_last_error();
  const auto third = daemon_.next_call();
  EXPECT_EQ(third->flags, abi::kFlagWeights | abi::kFlagCached);
  EXPECT_EQ(third->route, 3u);
  EXPECT_EQ(third->num_tokens, 0u) << "the engine knows";
  // A handle names the record, whatever dispatch made its routing.
  epd_handle_t next = 0;
  dispatch(3, 2, &next);
  EXPECT_EQ(next, handle);
}

TEST_F(ClientHandles, KeptHandlesOutliveTheSlotsNextDispatch) {
  epd_handle_t kept = 0;
  const epd_ticket_t ticket = keep(0, &kept);
  const auto first = daemon_.next_call();
  EXPECT_EQ(first->route, 4u) << "behind those of the slots";
  daemon_.complete(*first);
  EXPECT_EQ(wait(ticket), EPD_OK);
  wait_completed(dispatch(0));
  wait_completed(dispatch(0));
  epd_ticket_t other = 0;
  ASSERT_EQ(combine(0, kept, &other), EPD_OK) << epd_last_error();
  const auto answer = daemon_.next_call();
  EXPECT_EQ(answer->route, 4u);
  EXPECT_EQ(epd_handle_release(group_, kept), EPD_WOULD_BLOCK);
  daemon_.complete(*answer);
  EXPECT_EQ(epd_handle_release(group_, kept), EPD_OK) << "the completion was seen though nobody waited";
  EXPECT_EQ(epd_handle_release(group_, kept), EPD_NOT_FOUND);
  EXPECT_EQ(combine(0, kept, &other), EPD_NOT_FOUND);
  EXPECT_ERROR_HAS("is not kept any more");
}

TEST_F(ClientHandles, OnlySoManyAreKept) {
  std::vector<epd_handle_t> kept(2);
  for (std::uint32_t i = 0; i < 2; ++i) wait_completed(keep(i, &kept[i]));
  epd_dispatch_args_t args = on_slot(0);
  args.keep_handle = 1;
  epd_ticket_t ticket = 0;
  epd_handle_t handle = 0;
  EXPECT_EQ(epd_dispatch(group_, &args, EPD_NO_STREAM, &ticket, &handle), EPD_RESOURCE_EXHAUSTED);
  EXPECT_ERROR_HAS("num_handles is 2");
  ASSERT_EQ(epd_handle_release(group_, kept[0]), EPD_OK);
  ASSERT_EQ(epd_dispatch(group_, &args, EPD_NO_STREAM, &ticket, &handle), EPD_OK) << epd_last_error();
  EXPECT_EQ(epd_handle_release(group_, handle), EPD_WOULD_BLOCK) << "its own dispatch is in flight";
}

// Whether its dispatch was carried out everywhere, only the caller knows.
TEST_F(ClientHandles, AKeptHandleStaysTakenThoughItsDispatchFails) {
  std::vector<epd_handle_t> kept(2);
  wait_completed(keep(0, &kept[0]));
  const epd_ticket_t ticket = keep(1, &kept[1]);
  daemon_.complete(*daemon_.next_call(), StatusCode::kDeadlineExceeded);
  EXPECT_EQ(wait(ticket), EPD_DEADLINE_EXCEEDED);
  ASSERT_EQ(epd_group_resume(group_, EPD_NO_WAIT, nullptr), EPD_OK) << epd_last_error();
  epd_dispatch_args_t args = on_slot(1);
  args.keep_handle = 1;
  epd_ticket_t again = 0;
  epd_handle_t handle = 0;
  EXPECT_EQ(epd_dispatch(group_, &args, EPD_NO_STREAM, &again, &handle), EPD_RESOURCE_EXHAUSTED);
  EXPECT_EQ(epd_handle_release(group_, kept[1]), EPD_OK) << epd_last_error();
  wait_completed(keep(1, &handle));
  ASSERT_EQ(combine(3, kept[0], &again), EPD_OK) << "of before the break";
}

// The group continues before this client hears what became of its old call.
TEST_F(ClientHandles, ACallOfAnOldEpochUsesItsRecordNoMore) {
  epd_handle_t handle = 0;
  const epd_ticket_t late = keep(0, &handle);
  EXPECT_EQ(epd_handle_release(group_, handle), EPD_WOULD_BLOCK);
  daemon_.end(*daemon_.next_call(), abi::CallEnding::kDiscarded);
  break_and_resume(0);
  EXPECT_EQ(epd_handle_release(group_, handle), EPD_OK) << epd_last_error();
  EXPECT_EQ(wait(late), EPD_ENGINE_RESTARTED);
}

// Calls of a rank run in order.
TEST_F(ClientHandles, ARoutingMayBeReplacedWhileItIsUsed) {
  epd_handle_t handle = 0;
  wait_completed(dispatch(0, 3, &handle));
  epd_ticket_t ticket = 0;
  ASSERT_EQ(combine(1, handle, &ticket), EPD_OK) << epd_last_error();
  dispatch(0);
  ASSERT_EQ(cached(2, handle, &ticket), EPD_OK) << epd_last_error();
}

TEST_F(ClientHandles, HandlesNeverGivenAreNotFound) {
  wait_completed(dispatch(0));
  epd_ticket_t ticket = 0;
  const epd_handle_t bad[] = {0,
                              2,
                              std::uint64_t{1} << 48,
                              std::uint64_t{1} << 48 | 1,
                              std::uint64_t{4} << 48 | 1,
                              std::uint64_t{6} << 48 | 1,
                              ~std::uint64_t{0}};
  for (const epd_handle_t handle : bad) {
    EXPECT_EQ(combine(0, handle, &ticket), EPD_NOT_FOUND) << handle;
    EXPECT_EQ(epd_handle_release(group_, handle), EPD_NOT_FOUND) << handle;
    if (handle == 0) continue;  // a new routing
    EXPECT_EQ(cached(0, handle, &ticket), EPD_NOT_FOUND) << handle;
  }
  EXPECT_EQ(epd_handle_release(group_, 1), EPD_NOT_FOUND) << "valid, but not kept";
  EXPECT_FALSE(daemon_.next_call(20).has_value());
}

TEST_F(ClientHandles, ArgumentsThatContradictEachOtherAreRefused) {
  epd_handle_t handle = 0;
  wait_completed(dispatch(0, 3, &handle));
  epd_ticket_t ticket = 0;
  EXPECT_EQ(cached(1, handle, &ticket, 4), EPD_INVALID_ARGUMENT);
  EXPECT_ERROR_HAS("num_tokens is 4; allowed: 0, or 3");
  epd_dispatch_args_t args = on_slot(1);
  args.keep_handle = 1;
  EXPECT_EQ(epd_dispatch(group_, &args, EPD_NO_STREAM, &ticket, nullptr), EPD_INVALID_ARGUMENT);
  EXPECT_ERROR_HAS("handle is NULL");
  args.handle = handle;
  EXPECT_EQ(epd_dispatch(group_, &args, EPD_NO_STREAM, &ticket, &handle), EPD_INVALID_ARGUMENT);
  EXPECT_ERROR_HAS("keep_handle is 1; allowed: 0 under a handle");
  epd_combine_args_t combine;
  epd_combine_args_init(&combine);
  combine.handle = handle;
  combine.num_biases = 2;
  EXPECT_EQ(epd_combine(group_, &combine, EPD_NO_STREAM, &ticket), EPD_INVALID_ARGUMENT);
  EXPECT_ERROR_HAS("num_biases is 2; allowed: 0 .. 1");
  combine.num_biases = 3;
  EXPECT_EQ(epd_combine(group_, &combine, EPD_NO_STREAM, &ticket), EPD_INVALID_ARGUMENT);
  EXPECT_FALSE(daemon_.next_call(20).has_value());
}

TEST_F(ClientHandles, EverySwitchIsAFlag) {
  struct {
    std::uint32_t epd_dispatch_args_t::*field;
    std::uint32_t flag;
  } const dispatch_switches[] = {{&epd_dispatch_args_t::defer_receive, abi::kFlagDefer},
                                 {&epd_dispatch_args_t::zero_padding, abi::kFlagZeroPadding},
                                 {&epd_dispatch_args_t::mark_unused, abi::kFlagMarkUnused},
                                 {&epd_dispatch_args_t::sms, 0}};
  epd_ticket_t ticket = 0;
  epd_handle_t handle = 0;
  for (const auto& [field, flag] : dispatch_switches) {
    epd_dispatch_args_t args = on_slot(0);
    args.*field = 1;
    ASSERT_EQ(epd_dispatch(group_, &args, EPD_NO_STREAM, &ticket, &handle), EPD_OK) << epd_last_error();
    const auto call = daemon_.next_call();
    EXPECT_EQ(call->flags, abi::kFlagWeights | flag);
    EXPECT_EQ(call->sms, flag == 0 ? 1u : 0u);
    daemon_.complete(*call);
    EXPECT_EQ(wait(ticket), EPD_OK);
    args.*field = 2;
    if (flag == 0) continue;
    EXPECT_EQ(epd_dispatch(group_, &args, EPD_NO_STREAM, &ticket, nullptr), EPD_INVALID_ARGUMENT) << flag;
  }
  epd_dispatch_args_t bare = on_slot(0);
  bare.omit_weights = 1;
  ASSERT_EQ(epd_dispatch(group_, &bare, EPD_NO_STREAM, &ticket, &handle), EPD_OK) << epd_last_error();
  const auto without_weights = daemon_.next_call();
  EXPECT_EQ(without_weights->flags, 0u);
  daemon_.complete(*without_weights);
  EXPECT_EQ(wait(ticket), EPD_OK);
  struct {
    std::uint32_t epd_combine_args_t::*field;
    std::uint32_t flag;
  } const combine_switches[] = {{&epd_combine_args_t::weighted, abi::kFlagWeights},
                                {&epd_combine_args_t::defer_receive, abi::kFlagDefer},
                                {&epd_combine_args_t::num_biases, 1u << abi::kBiasShift}};
  for (const auto& [field, flag] : combine_switches) {
    epd_combine_args_t args;
    epd_combine_args_init(&args);
    args.handle = handle;
    args.sms = 7;
    args.*field = 1;
    ASSERT_EQ(epd_combine(group_, &args, EPD_NO_STREAM, &ticket), EPD_OK) << epd_last_error();
    const auto call = daemon_.next_call();
    EXPECT_EQ(call->flags, flag);
    EXPECT_EQ(call->sms, 7u);
    daemon_.complete(*call);
    EXPECT_EQ(wait(ticket), EPD_OK);
  }
}

TEST_F(ClientHandles, CombineSaysWhichWeightsReturn) {
  epd_handle_t handle = 0;
  epd_ticket_t ticket = dispatch(3, 2, &handle);
  daemon_.complete(*daemon_.next_call());
  EXPECT_EQ(wait(ticket), EPD_OK);
  epd_combine_args_t args;
  epd_combine_args_init(&args);
  args.handle = handle;
  const std::pair<epd_return_weights_t, std::uint32_t> kinds[] = {
      {EPD_RETURN_WEIGHTS_NONE, 0},
      {EPD_RETURN_WEIGHTS_OWN, abi::kFlagReturnWeights},
      {EPD_RETURN_WEIGHTS_SUM, abi::kFlagReturnWeights | abi::kFlagSumWeights}};
  for (const auto& [kind, flags] : kinds) {
    args.return_weights = kind;
    ASSERT_EQ(epd_combine(group_, &args, EPD_NO_STREAM, &ticket), EPD_OK) << epd_last_error();
    const auto call = daemon_.next_call();
    EXPECT_EQ(call->flags, flags);
    daemon_.complete(*call);
    EXPECT_EQ(wait(ticket), EPD_OK);
  }
  const std::uint32_t unknown = 3;
  std::memcpy(&args.return_weights, &unknown, sizeof(unknown));
  EXPECT_EQ(epd_combine(group_, &args, EPD_NO_STREAM, &ticket), EPD_INVALID_ARGUMENT);
  EXPECT_STREQ(epd_last_error(),
               "return_weights is 3; allowed: 0 (EPD_RETURN_WEIGHTS_NONE), 1 (EPD_RETURN_WEIGHTS_OWN) or 2 "
               "(EPD_RETURN_WEIGHTS_SUM)");
}

TEST_F(ClientHandles, ZeroPaddingMeansNothingWithoutPadding) {
  epd_group_leave(group_);
  const epd_group_config_t config = small_config();  // compact
  ASSERT_EQ(epd_group_join(session_, &config, &group_), EPD_OK) << epd_last_error();
  epd_dispatch_args_t args = on_slot(0);
  args.zero_padding = 1;
  epd_ticket_t ticket = 0;
  ASSERT_EQ(epd_dispatch(group_, &args, EPD_NO_STREAM, &ticket, nullptr), EPD_OK) << epd_last_error();
  EXPECT_EQ(daemon_.next_call()->flags, abi::kFlagWeights);
}

TEST_F(ClientHandles, WaitSentComesBeforeTheEnd) {
  epd_dispatch_args_t args = on_slot(1);
  args.defer_receive = 1;
  epd_ticket_t ticket = 0;
  ASSERT_EQ(epd_dispatch(group_, &args, EPD_NO_STREAM, &ticket, nullptr), EPD_OK) << epd_last_error();
  EXPECT_EQ(epd_ticket_wait_sent(group_, ticket, EPD_NO_WAIT), EPD_WOULD_BLOCK);
  EXPECT_EQ(epd_ticket_wait_sent(group_, ticket, 20), EPD_DEADLINE_EXCEEDED);
  auto waiting =
      std::async(std::launch::async, [&] { return epd_ticket_wait_sent(group_, ticket, EPD_FOREVER); });
  ASSERT_TRUE(daemon_.await_client_sleep());
  const auto call = daemon_.next_call();
  daemon_.publish_sent(*call);
  EXPECT_EQ(waiting.get(), EPD_OK);
  EXPECT_EQ(epd_ticket_pending(group_, ticket), 1);
  daemon_.complete(*call);
  EXPECT_EQ(wait(ticket), EPD_OK);
  EXPECT_EQ(epd_ticket_wait_sent(group_, ticket, EPD_NO_WAIT), EPD_NOT_FOUND) << "retired";
}

TEST_F(ClientHandles, WaitSentEndsWithTheOperation) {
  epd_dispatch_args_t args = on_slot(1);
  args.defer_receive = 1;
  epd_ticket_t good = 0;
  epd_ticket_t bad = 0;
  ASSERT_EQ(epd_dispatch(group_, &args, EPD_NO_STREAM, &good, nullptr), EPD_OK);
  daemon_.complete(*daemon_.next_call());
  EXPECT_EQ(epd_ticket_wait_sent(group_, good, 20'000), EPD_OK) << "what has ended has been sent";
  args.slot = 2;
  ASSERT_EQ(epd_dispatch(group_, &args, EPD_NO_STREAM, &bad, nullptr), EPD_OK);
  daemon_.complete(*daemon_.next_call(), StatusCode::kRankLost, 0, "rank 0 died");
  EXPECT_EQ(epd_ticket_wait_sent(group_, bad, 20'000), EPD_RANK_LOST);
  EXPECT_STREQ(epd_last_error(), "rank 0 died");
  EXPECT_EQ(wait(bad), EPD_RANK_LOST);
  ASSERT_EQ(epd_group_resume(group_, EPD_NO_WAIT, nullptr), EPD_OK) << epd_last_error();
  EXPECT_EQ(epd_ticket_wait_sent(group_, dispatch(3), EPD_NO_WAIT), EPD_INVALID_ARGUMENT);
  EXPECT_ERROR_HAS("without defer_receive");
}

TEST_F(ClientHandles, CountsTellWhereExpertsBegin) {
  const epd_ticket_t ticket = dispatch(1, 6);
  daemon_.publish_counts(*daemon_.next_call());
  epd_counts_t counts;
  epd_counts_init(&counts);
  ASSERT_EQ(epd_ticket_counts(group_, ticket, 20'000, &counts), EPD_OK) << epd_last_error();
  ASSERT_NE(counts.expert_offsets, nullptr);
  EXPECT_EQ(counts.expert_offsets[0], 0);
  EXPECT_EQ(counts.expert_offsets[2], 6);
}

}  // namespace
}  // namespace epd::testing
