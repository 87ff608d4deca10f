// The client library's calls, their results and counts, with a scripted engine.
#include "client_fixture.h"

#include <atomic>
#include <future>
#include <thread>
#include <vector>

namespace epd::testing {
namespace {

TEST_F(ClientOps, CallsCarryWhatWasAsked) {
  epd_handle_t handle = 0;
  epd_dispatch_args_t args;
  epd_dispatch_args_init(&args);
  args.slot = 2;
  args.num_tokens = 5;
  args.timeout_ms = 1234;
  epd_ticket_t ticket = 0;
  ASSERT_EQ(epd_dispatch(group_, &args, EPD_NO_STREAM, &ticket, &handle), EPD_OK);
  const auto first = daemon_.next_call();
  ASSERT_TRUE(first.has_value());
  EXPECT_EQ(first->op, abi::Op::kDispatch);
  EXPECT_EQ(first->epoch, 1u);
  EXPECT_EQ(first->slot, 2u);
  EXPECT_EQ(first->route, 2u);
  EXPECT_EQ(first->num_tokens, 5u);
  EXPECT_EQ(first->timeout_ms, 1234u);
  EXPECT_EQ(first->flags, abi::kFlagWeights);
  daemon_.complete(*first);
  epd_result_t result;
  epd_result_init(&result);
  ASSERT_EQ(wait(ticket, &result), EPD_OK);
  EXPECT_EQ(result.op_index, 0u);
  EXPECT_EQ(result.num_recv_rows, 5u);
  EXPECT_EQ(result.done_us, 70u);

  epd_ticket_t second = 0;
  ASSERT_EQ(combine(2, handle, &second), EPD_OK) << epd_last_error();
  const auto answer = daemon_.next_call();
  ASSERT_TRUE(answer.has_value());
  EXPECT_EQ(answer->op, abi::Op::kCombine);
  EXPECT_EQ(answer->route, 2u);
  EXPECT_EQ(answer->flags, 0u);
  daemon_.complete(*answer);
  EXPECT_EQ(wait(second), EPD_OK);
}

TEST_F(ClientOps, ArgumentsAreCheckedBeforeAnythingIsCalled) {
  epd_ticket_t ticket = 0;
  epd_dispatch_args_t args;
  epd_dispatch_args_init(&args);
  args.slot = 4;
  EXPECT_EQ(epd_dispatch(group_, &args, EPD_NO_STREAM, &ticket, nullptr), EPD_INVALID_ARGUMENT);
  EXPECT_ERROR_HAS("slot is 4; allowed: 0 .. 3");
  args.slot = 0;
  args.num_tokens = 9;
  EXPECT_EQ(epd_dispatch(group_, &args, EPD_NO_STREAM, &ticket, nullptr), EPD_INVALID_ARGUMENT);
  EXPECT_ERROR_HAS("num_tokens is 9; allowed: 0 .. 8");
  args.num_tokens = 1;
  args.omit_weights = 2;
  EXPECT_EQ(epd_dispatch(group_, &args, EPD_NO_STREAM, &ticket, nullptr), EPD_INVALID_ARGUMENT);
  EXPECT_ERROR_HAS("omit_weights is 2; allowed: 0 or 1");
  args.omit_weights = 0;
  epd_combine_args_t combine_args;
  epd_combine_args_init(&combine_args);
  for (const std::int32_t wrong : {-1, EPD_NO_WAIT, INT32_MIN}) {
    args.timeout_ms = combine_args.timeout_ms = wrong;
    const std::string text = "timeout_ms is " + std::to_string(wrong) +
                             "; allowed: 1 or more milliseconds, or 0 (the daemon's default)";
    EXPECT_EQ(epd_dispatch(group_, &args, EPD_NO_STREAM, &ticket, nullptr), EPD_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS(text);
    EXPECT_EQ(epd_combine(group_, &combine_args, EPD_NO_STREAM, &ticket), EPD_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS(text);
  }
  args.timeout_ms = 0;
  args.size = 3;
  EXPECT_EQ(epd_dispatch(group_, &args, EPD_NO_STREAM, &ticket, nullptr), EPD_INVALID_ARGUMENT);
  EXPECT_EQ(epd_dispatch(group_, nullptr, EPD_NO_STREAM, &ticket, nullptr), EPD_INVALID_ARGUMENT);
  EXPECT_EQ(epd_dispatch(nullptr, &args, EPD_NO_STREAM, &ticket, nullptr), EPD_INVALID_ARGUMENT);
  args.size = sizeof(args);
  EXPECT_EQ(epd_dispatch(group_, &args, EPD_NO_STREAM, nullptr, nullptr), EPD_INVALID_ARGUMENT);
  epd_counts_t counts;
  epd_counts_init(&counts);
  for (const std::int32_t wrong : {-5, INT32_MIN}) {
    const auto expect_refused = [wrong](epd_status_t status) {
      EXPECT_EQ(status, EPD_INVALID_ARGUMENT);
      EXPECT_ERROR_HAS("timeout_ms is " + std::to_string(wrong) +
                       "; allowed: 1 or more milliseconds, EPD_FOREVER (-1, or 0) or EPD_NO_WAIT (-2)");
    };
    expect_refused(epd_ticket_wait(group_, 1, wrong, nullptr));
    expect_refused(epd_ticket_counts(group_, 1, wrong, &counts));
    expect_refused(epd_ticket_wait_sent(group_, 1, wrong));
    expect_refused(epd_group_resume(group_, wrong, nullptr));
  }
  EXPECT_FALSE(daemon_.next_call(20).has_value());
}

TEST_F(ClientOps, BusySlotWouldBlock) {
  const epd_ticket_t ticket = dispatch(1);
  epd_dispatch_args_t args;
  epd_dispatch_args_init(&args);
  args.slot = 1;
  epd_ticket_t other = 0;
  EXPECT_EQ(epd_dispatch(group_, &args, EPD_NO_STREAM, &other, nullptr), EPD_WOULD_BLOCK);
  EXPECT_ERROR_HAS("slot 1");
  EXPECT_EQ(epd_ticket_pending(group_, ticket), 1);
  EXPECT_EQ(epd_ticket_poll(group_, ticket, nullptr), EPD_WOULD_BLOCK);
  EXPECT_EQ(wait(ticket, nullptr, 20), EPD_DEADLINE_EXCEEDED);
  EXPECT_EQ(epd_ticket_pending(group_, ticket), 1) << "a wait that gives up does not retire";
  daemon_.complete(*daemon_.next_call());
  // Seen by the call itself: nobody has waited for the ticket.
  EXPECT_EQ(epd_dispatch(group_, &args, EPD_NO_STREAM, &other, nullptr), EPD_OK) << epd_last_error();
  EXPECT_EQ(epd_ticket_pending(group_, ticket), 0);
  EXPECT_EQ(epd_ticket_poll(group_, ticket, nullptr), EPD_OK);
  EXPECT_EQ(epd_ticket_poll(group_, ticket, nullptr), EPD_NOT_FOUND) << "retired";
}

// Calls of former epochs still wait for the engine.
TEST_F(ClientOps, FailuresBringTheirMessage) {
  const epd_ticket_t first = dispatch(0);
  const epd_ticket_t second = dispatch(1);
  daemon_.complete(*daemon_.next_call(), StatusCode::kDeadlineExceeded, 0, "rank 0 did not announce");
  daemon_.end(*daemon_.next_call(), abi::CallEnding::kDiscarded);
  epd_result_t result;
  epd_result_init(&result);
  EXPECT_EQ(wait(first, &result), EPD_DEADLINE_EXCEEDED);
  EXPECT_STREQ(epd_last_error(), "rank 0 did not announce");
  EXPECT_EQ(result.status, EPD_DEADLINE_EXCEEDED);
  EXPECT_EQ(result.failed_rank, 0);
  EXPECT_EQ(epd_ticket_pending(group_, first), 0);
  EXPECT_EQ(wait(second), EPD_DEADLINE_EXCEEDED) << "it was not carried out";
  ASSERT_EQ(epd_group_resume(group_, EPD_NO_WAIT, nullptr), EPD_OK) << epd_last_error();
  const epd_ticket_t third = dispatch(0);
  daemon_.complete(*daemon_.next_call(), StatusCode::kRankLost, 0);
  EXPECT_EQ(wait(third), EPD_RANK_LOST);
  EXPECT_ERROR_HAS("rank 0") << "made from the code when the engine left no text";
}

TEST_F(ClientOps, SleepingWaiterIsWoken) {
  const epd_ticket_t ticket = dispatch(0);
  auto waiting = std::async(std::launch::async, [&] { return wait(ticket); });
  ASSERT_TRUE(daemon_.await_client_sleep());
  daemon_.complete(*daemon_.next_call());
  EXPECT_EQ(waiting.get(), EPD_OK);
  EXPECT_FALSE(daemon_.client_sleeps());
}

TEST_F(ClientOps, DeafDoorbellIsNotTheEnd) {
  daemon_.hang_up_doorbell();
  const epd_ticket_t ticket = dispatch(0);
  auto waiting = std::async(std::launch::async, [&] { return wait(ticket); });
  pause_ms(30);
  daemon_.complete(*daemon_.next_call());
  EXPECT_EQ(waiting.get(), EPD_OK);
  EXPECT_EQ(epd_session_check(session_), EPD_OK);
}

TEST_F(ClientOps, CountsComeBeforeTheRows) {
  const epd_ticket_t ticket = dispatch(1, 6);
  epd_counts_t counts;
  epd_counts_init(&counts);
  EXPECT_EQ(epd_ticket_counts(group_, ticket, EPD_NO_WAIT, &counts), EPD_WOULD_BLOCK);
  EXPECT_EQ(epd_ticket_counts(group_, ticket, 20, &counts), EPD_DEADLINE_EXCEEDED);
  auto waiting =
      std::async(std::launch::async, [&] { return epd_ticket_counts(group_, ticket, EPD_FOREVER, &counts); });
  ASSERT_TRUE(daemon_.await_client_sleep());
  const auto call = daemon_.next_call();
  daemon_.publish_counts(*call);
  ASSERT_EQ(waiting.get(), EPD_OK) << epd_last_error();
  EXPECT_EQ(counts.num_recv_rows, 6u);
  EXPECT_EQ(counts.rank_offsets[0], 0);
  EXPECT_EQ(counts.rank_offsets[2], 6);
  EXPECT_EQ(counts.expert_counts[0], 6);
  EXPECT_EQ(counts.expert_counts[1], 0);
  EXPECT_EQ(epd_ticket_pending(group_, ticket), 1);
  daemon_.complete(*call);
  EXPECT_EQ(wait(ticket), EPD_OK) << "counts do not retire the ticket";
  EXPECT_EQ(epd_ticket_counts(group_, ticket, EPD_NO_WAIT, &counts), EPD_NOT_FOUND);
}

// The leader waits for another ticket when the counts come.
TEST_F(ClientOps, CountsReachAFollower) {
  const epd_ticket_t first = dispatch(0);
  auto leader = std::async(std::launch::async, [&] { return wait(first); });
  ASSERT_TRUE(daemon_.await_client_sleep());
  const epd_ticket_t second = dispatch(1);
  epd_counts_t counts;
  epd_counts_init(&counts);
  auto follower =
      std::async(std::launch::async, [&] { return epd_ticket_counts(group_, second, EPD_FOREVER, &counts); });
  const auto a = daemon_.next_call();
  const auto b = daemon_.next_call();
  pause_ms(5);
  daemon_.publish_counts(*b);
  EXPECT_EQ(follower.get(), EPD_OK);
  daemon_.complete(*a);
  EXPECT_EQ(leader.get(), EPD_OK);
}

TEST_F(ClientOps, CountsEndWithTheOperation) {
  const epd_ticket_t ticket = dispatch(0);
  epd_counts_t counts;
  epd_counts_init(&counts);
  auto waiting =
      std::async(std::launch::async, [&] { return epd_ticket_counts(group_, ticket, EPD_FOREVER, &counts); });
  ASSERT_TRUE(daemon_.await_client_sleep());
  daemon_.complete(*daemon_.next_call(), StatusCode::kRankLost, 0, "rank 0 died");
  EXPECT_EQ(waiting.get(), EPD_RANK_LOST);
  EXPECT_EQ(wait(ticket), EPD_RANK_LOST);
  epd_ticket_t noop = 0;
  ASSERT_EQ(epd_group_resume(group_, EPD_NO_WAIT, nullptr), EPD_OK) << epd_last_error();
  ASSERT_EQ(epd_noop(group_, 0, EPD_NO_STREAM, &noop), EPD_OK);
  EXPECT_EQ(epd_ticket_counts(group_, noop, EPD_NO_WAIT, &counts), EPD_INVALID_ARGUMENT);
}

TEST_F(ClientOps, OlderAndNewerStructsOfOperations) {
  struct Newer {
    epd_dispatch_args_t known{};
    std::uint32_t unknown[2] = {0, 0};
  } newer;
  newer.known.size = sizeof(newer);
  newer.known.num_tokens = 2;
  epd_ticket_t ticket = 0;
  ASSERT_EQ(epd_dispatch(group_, &newer.known, EPD_NO_STREAM, &ticket, nullptr), EPD_OK) << epd_last_error();
  newer.unknown[1] = 1;
  newer.known.slot = 1;
  EXPECT_EQ(epd_dispatch(group_, &newer.known, EPD_NO_STREAM, &ticket, nullptr), EPD_INVALID_ARGUMENT);
  // An older caller that knows nothing of weights and timeouts: zero, whatever lies behind.
  newer.known.size = offsetof(epd_dispatch_args_t, omit_weights);
  newer.known.omit_weights = 77;
  ASSERT_EQ(epd_dispatch(group_, &newer.known, EPD_NO_STREAM, &ticket, nullptr), EPD_OK) << epd_last_error();
  ASSERT_TRUE(daemon_.next_call().has_value());
  const auto old = daemon_.next_call();
  EXPECT_EQ(old->flags, std::uint32_t{abi::kFlagWeights});
  daemon_.complete(*old);
  epd_result_t result;
  epd_result_init(&result);
  result.size = offsetof(epd_result_t, num_recv_rows);
  result.num_recv_rows = 4711;
  EXPECT_EQ(wait(ticket, &result), EPD_OK);
  EXPECT_EQ(result.num_recv_rows, 4711u) << "written behind the caller's struct";
  EXPECT_EQ(result.size, offsetof(epd_result_t, num_recv_rows));
}

TEST_F(ClientAuto, RoundTripsWakeASleepingEngine) {
  for (int i = 0; i < 300; ++i) {
    epd_ticket_t ticket = 0;
    ASSERT_EQ(epd_noop(group_, static_cast<std::uint32_t>(i % 4), EPD_NO_STREAM, &ticket), EPD_OK)
        << epd_last_error();
    ASSERT_EQ(wait(ticket), EPD_OK) << epd_last_error();
  }
}

TEST_F(ClientAuto, ManyThreadsOnOneSession) {
  constexpr int kThreads = 8;
  constexpr int kRounds = 150;
  std::vector<epd_group_t*> groups(kThreads);
  for (epd_group_t*& group : groups) {
    const epd_group_config_t config = small_config();
    ASSERT_EQ(epd_group_join(session_, &config, &group), EPD_OK) << epd_last_error();
  }
  std::atomic<int> hooks{0};
  std::atomic<int> bad{0};
  std::vector<std::thread> threads;
  threads.reserve(groups.size());
  for (epd_group_t* group : groups) {
    threads.emplace_back([&, group] {
      for (int i = 0; i < kRounds; ++i) {
        epd_dispatch_args_t args;
        epd_dispatch_args_init(&args);
        args.slot = static_cast<std::uint32_t>(i % 4);
        args.num_tokens = static_cast<std::uint32_t>(i % 9);
        epd_ticket_t ticket = 0;
        epd_counts_t counts;
        epd_counts_init(&counts);
        epd_status_t status = EPD_WOULD_BLOCK;
        while ((status = epd_dispatch(group, &args, EPD_NO_STREAM, &ticket, nullptr)) == EPD_WOULD_BLOCK)
          pause_ms(1);
        if (status != EPD_OK) ++bad;
        if (epd_ticket_counts(group, ticket, 20'000, &counts) != EPD_OK) ++bad;
        if (counts.num_recv_rows != args.num_tokens) ++bad;
        if (i % 3 == 0) {
          const auto count = [](const epd_result_t*, void* user) { ++*static_cast<std::atomic<int>*>(user); };
          if (epd_ticket_on_complete(group, ticket, count, &hooks) != EPD_OK) ++bad;
        } else if (epd_ticket_wait(group, ticket, 20'000, nullptr) != EPD_OK) {
          ++bad;
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  detach();
  EXPECT_EQ(bad, 0);
  EXPECT_EQ(hooks, kThreads * kRounds / 3);
}

// Many threads wait for tickets of one group, whose calls end in reverse order.
TEST_F(ClientOps, WaitersAreWokenEachForItsTicket) {
  epd_group_config_t config = small_config();
  config.depth = 16;
  epd_group_leave(group_);
  ASSERT_EQ(epd_group_join(session_, &config, &group_), EPD_OK);
  std::vector<std::future<epd_status_t>> waiting;
  std::vector<FakeCall> calls;
  for (std::uint32_t slot = 0; slot < 16; ++slot) {
    const epd_ticket_t ticket = dispatch(slot);
    waiting.push_back(
        std::async(std::launch::async, [this, ticket] { return wait(ticket, nullptr, EPD_FOREVER); }));
    calls.push_back(*daemon_.next_call());
  }
  ASSERT_TRUE(daemon_.await_client_sleep());
  for (std::size_t i = calls.size(); i-- > 0;) {
    daemon_.complete(calls[i]);
    EXPECT_EQ(waiting[i].get(), EPD_OK);
  }
}

}  // namespace
}  // namespace epd::testing
