// Hooks: once each, on a thread of the library, whatever ends.
#include "client_fixture.h"

#include <atomic>
#include <future>
#include <thread>

namespace epd::testing {
namespace {

struct HookLog {
  std::atomic<int> calls{0};
  std::atomic<int> status{-1};
  std::promise<std::thread::id> thread;
};

void log_hook(const epd_result_t* result, void* user) {
  auto* log = static_cast<HookLog*>(user);
  log->status = result->status;
  if (++log->calls == 1) log->thread.set_value(std::this_thread::get_id());
}

TEST_F(ClientOps, HookRunsOnceOnAThreadOfTheLibrary) {
  HookLog log;
  const epd_ticket_t ticket = dispatch(0);
  ASSERT_EQ(epd_ticket_on_complete(group_, ticket, log_hook, &log), EPD_OK);
  EXPECT_EQ(epd_ticket_on_complete(group_, ticket, log_hook, &log), EPD_NOT_FOUND) << "one hook";
  EXPECT_EQ(wait(ticket, nullptr, EPD_NO_WAIT), EPD_NOT_FOUND) << "the hook retires it";
  EXPECT_EQ(log.calls, 0);
  daemon_.complete(*daemon_.next_call(), StatusCode::kDeadlineExceeded);
  EXPECT_NE(log.thread.get_future().get(), std::this_thread::get_id());
  EXPECT_EQ(log.status, EPD_DEADLINE_EXCEEDED);
  detach();
  EXPECT_EQ(log.calls, 1);
}

TEST_F(ClientOps, HookAfterTheFactRunsToo) {
  HookLog log;
  const epd_ticket_t ticket = dispatch(0);
  daemon_.complete(*daemon_.next_call());
  while (epd_ticket_pending(group_, ticket) != 0) pause_ms(1);
  ASSERT_EQ(epd_ticket_on_complete(group_, ticket, log_hook, &log), EPD_OK);
  EXPECT_NE(log.thread.get_future().get(), std::this_thread::get_id());
  EXPECT_EQ(log.status, EPD_OK);
}

TEST_F(ClientOps, HooksHearOfLeaveAndDetach) {
  HookLog left;
  ASSERT_EQ(epd_ticket_on_complete(group_, dispatch(0), log_hook, &left), EPD_OK);
  epd_group_leave(group_);
  EXPECT_EQ(left.calls, 1) << "leave returns when the hooks have run";
  EXPECT_EQ(left.status, EPD_ABORTED);
  const epd_group_config_t config = small_config();
  ASSERT_EQ(epd_group_join(session_, &config, &group_), EPD_OK);
  HookLog detached;
  ASSERT_EQ(epd_ticket_on_complete(group_, dispatch(0), log_hook, &detached), EPD_OK);
  detach();
  EXPECT_EQ(detached.calls, 1);
  EXPECT_EQ(detached.status, EPD_ABORTED);
}

TEST_F(ClientOps, HooksHearOfTheDaemonsDeath) {
  HookLog log;
  ASSERT_EQ(epd_ticket_on_complete(group_, dispatch(0), log_hook, &log), EPD_OK);
  ASSERT_TRUE(daemon_.await_client_sleep());
  daemon_.hang_up();
  log.thread.get_future().wait();
  EXPECT_EQ(log.status, EPD_DAEMON_LOST);
}

// A hook that submits the next operation, until the group is left under its feet.
struct Chain {
  epd_group_t* group;
  std::atomic<int> runs{0};
  std::atomic<bool> refused{false};
};

void chain_hook(const epd_result_t*, void* user) {
  auto* chain = static_cast<Chain*>(user);
  ++chain->runs;
  epd_ticket_t ticket = 0;
  if (epd_noop(chain->group, 0, EPD_NO_STREAM, &ticket) == EPD_OK) {
    epd_ticket_on_complete(chain->group, ticket, chain_hook, chain);
  } else {
    chain->refused = true;
  }
}

TEST_F(ClientAuto, HooksMaySubmitWhileTheGroupIsLeft) {
  Chain chain{group_};
  epd_ticket_t ticket = 0;
  ASSERT_EQ(epd_noop(group_, 0, EPD_NO_STREAM, &ticket), EPD_OK);
  ASSERT_EQ(epd_ticket_on_complete(group_, ticket, chain_hook, &chain), EPD_OK);
  while (chain.runs < 50) pause_ms(1);
  epd_group_leave(group_);
  group_ = nullptr;
  EXPECT_TRUE(chain.refused);
  const int runs = chain.runs;
  pause_ms(20);
  EXPECT_EQ(chain.runs, runs);
}

}  // namespace
}  // namespace epd::testing
