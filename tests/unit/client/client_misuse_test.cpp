// Handles where they must not be used: after their end, and in a forked child. And memory that runs out in
// the thread that watches for all.
#include "client_fixture.h"
#include "common/signal.h"

#include <sys/wait.h>
#include <unistd.h>
#include <atomic>
#include <cstdlib>
#include <functional>
#include <future>
#include <new>

namespace {

// No memory beyond what fits into a string, in the thread that says so.
thread_local bool out_of_memory = false;

void* take_memory(std::size_t bytes) {
  void* const memory = out_of_memory ? nullptr : std::malloc(bytes != 0 ? bytes : 1);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace

// For the whole program, the library included.
void* operator new(std::size_t bytes) {
  return take_memory(bytes);
}
void* operator new[](std::size_t bytes) {
  return take_memory(bytes);
}
void operator delete(void* memory) noexcept {
  std::free(memory);
}
void operator delete[](void* memory) noexcept {
  std::free(memory);
}
void operator delete(void* memory, std::size_t) noexcept {
  std::free(memory);
}
void operator delete[](void* memory, std::size_t) noexcept {
  std::free(memory);
}

namespace epd::testing {
namespace {

// ---- after the end --------------------------------------------------------------------------------

TEST_F(ClientOps, HandlesAreKnownAfterTheirEnd) {
  const auto expect_ended = [](epd_status_t status) {
    EXPECT_EQ(status, EPD_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("is a handle that is no more");
  };
  epd_ticket_t ticket = 0;
  epd_group_t* const group = group_;
  EXPECT_EQ(epd_group_leave(group), EPD_OK) << epd_last_error();
  expect_ended(epd_noop(group, 0, EPD_NO_STREAM, &ticket));
  expect_ended(epd_ticket_wait(group, 1, EPD_NO_WAIT, nullptr));
  expect_ended(epd_group_resume(group, EPD_NO_WAIT, nullptr));
  expect_ended(epd_group_advance(group, &ticket, EPD_NO_WAIT, nullptr, nullptr));
  expect_ended(epd_handle_release(group, 1));
  EXPECT_EQ(epd_group_rank(group), UINT32_MAX);
  EXPECT_EQ(epd_group_active(group, 0), 0);
  EXPECT_EQ(epd_group_sum_ranks(group), 0u);
  EXPECT_EQ(epd_ticket_pending(group, 1), 0);
  expect_ended(epd_group_leave(group));
  EXPECT_EQ(daemon_.left(), 1u);

  const epd_group_config_t config = small_config();
  ASSERT_EQ(epd_group_join(session_, &config, &group_), EPD_OK) << epd_last_error();
  epd_group_t* const second = group_;
  epd_session_t* const session = session_;
  detach();
  expect_ended(epd_noop(second, 0, EPD_NO_STREAM, &ticket));
  expect_ended(epd_session_check(session));
  expect_ended(epd_group_join(session, &config, &group_));
  expect_ended(epd_group_leave(second));
  expect_ended(epd_session_detach(session));
  EXPECT_EQ(epd_group_leave(nullptr), EPD_OK);
  EXPECT_EQ(epd_session_detach(nullptr), EPD_OK);
}

// ---- in a forked child ----------------------------------------------------------------------------

// Runs it in a child; the line of the first check that failed, or 0. Killed if it hangs.
int in_child(const std::function<int()>& body) {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(body());
  for (int i = 0; i < 20'000; ++i) {
    int status = 0;
    if (::waitpid(child, &status, WNOHANG) == child) return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    pause_ms(1);
  }
  ADD_FAILURE() << "the child hangs";
  send_signal(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  return -1;
}

#define CHILD_CHECK(condition) \
  if (!(condition)) return __LINE__ % 200 + 1

TEST_F(ClientOps, AForkedChildIsToldAndTakesNothingAlong) {
  // The hook starts the library's thread, which the child does not have.
  std::promise<void> ran;
  const epd_ticket_t hooked = dispatch(0);
  ASSERT_EQ(
      epd_ticket_on_complete(
          group_, hooked,
          [](const epd_result_t*, void* user) { static_cast<std::promise<void>*>(user)->set_value(); }, &ran),
      EPD_OK);
  daemon_.complete(*daemon_.next_call());
  ran.get_future().wait();
  const epd_ticket_t ticket = dispatch(1);
  const auto call = daemon_.next_call();
  const std::string parent = "process " + std::to_string(::getpid());

  const int failed = in_child([&]() -> int {
    const auto refused = [&](epd_status_t status) {
      return status == EPD_INVALID_ARGUMENT &&
             std::string(epd_last_error()).find(parent) != std::string::npos;
    };
    epd_ticket_t made = 0;
    epd_handle_t handle = 0;
    epd_group_t* joined = nullptr;
    const epd_group_config_t config = small_config();
    epd_dispatch_args_t args;
    epd_dispatch_args_init(&args);
    epd_combine_args_t combine_args;
    epd_combine_args_init(&combine_args);
    epd_session_info_t info;
    epd_session_info_init(&info);
    epd_buffers_t buffers;
    epd_buffers_init(&buffers);
    epd_counts_t counts;
    epd_counts_init(&counts);
    CHILD_CHECK(refused(epd_session_check(session_)));
    CHILD_CHECK(refused(epd_session_info(session_, &info)));
    CHILD_CHECK(refused(epd_group_join(session_, &config, &joined)));
    CHILD_CHECK(refused(epd_dispatch(group_, &args, EPD_NO_STREAM, &made, &handle)));
    CHILD_CHECK(refused(epd_combine(group_, &combine_args, EPD_NO_STREAM, &made)));
    CHILD_CHECK(refused(epd_noop(group_, 2, EPD_NO_STREAM, &made)));
    CHILD_CHECK(refused(epd_noop(group_, 2, nullptr, &made)));
    CHILD_CHECK(refused(epd_handle_release(group_, 1)));
    CHILD_CHECK(refused(epd_group_buffers(group_, 0, &buffers)));
    CHILD_CHECK(refused(epd_group_resume(group_, EPD_FOREVER, nullptr)));
    CHILD_CHECK(refused(epd_group_advance(group_, &made, EPD_FOREVER, nullptr, nullptr)));
    CHILD_CHECK(refused(epd_group_check(group_, nullptr)));
    CHILD_CHECK(refused(epd_ticket_wait(group_, ticket, EPD_FOREVER, nullptr)));
    CHILD_CHECK(refused(epd_ticket_counts(group_, ticket, EPD_FOREVER, &counts)));
    CHILD_CHECK(refused(epd_ticket_wait_sent(group_, ticket, EPD_FOREVER)));
    CHILD_CHECK(refused(epd_ticket_wait_on_stream(group_, ticket, nullptr)));
    CHILD_CHECK(refused(epd_ticket_on_complete(
        group_, ticket, [](const epd_result_t*, void*) {}, nullptr)));
    CHILD_CHECK(epd_ticket_pending(group_, ticket) == 0 && epd_group_active(group_, 0) == 0);
    CHILD_CHECK(epd_group_rank(group_) == UINT32_MAX);
    CHILD_CHECK(epd_group_sum_ranks(group_) == 0);
    CHILD_CHECK(refused(epd_group_leave(group_)));
    CHILD_CHECK(refused(epd_session_detach(session_)));
    return 0;
  });
  EXPECT_EQ(failed, 0) << "the check in line " << failed - 1 << " modulo 200";

  EXPECT_EQ(daemon_.left(), 0u);
  EXPECT_FALSE(daemon_.next_call(0).has_value());
  daemon_.complete(*call);
  EXPECT_EQ(wait(ticket), EPD_OK) << epd_last_error();
  wait_completed(dispatch(0));
}

// ---- out of memory --------------------------------------------------------------------------------

// The thread that watches the connection for all may find no memory for the words of its end.
TEST_F(ClientOps, MemoryThatRunsOutInOneThreadLeavesNoOtherWaiting) {
  const epd_ticket_t first = dispatch(0);
  const epd_ticket_t second = dispatch(1);
  const auto wait_poor = [&](epd_ticket_t ticket) {
    out_of_memory = true;
    const epd_status_t status = epd_ticket_wait(group_, ticket, EPD_FOREVER, nullptr);
    out_of_memory = false;
    return status;
  };
  EXPECT_EQ(wait(first, nullptr, 1), EPD_DEADLINE_EXCEEDED)
      << "what waiting itself needs is there from now on";
  // The first is the leader.
  auto leader = std::async(std::launch::async, [&] { return wait_poor(first); });
  ASSERT_TRUE(daemon_.await_client_sleep());
  auto follower = std::async(std::launch::async, [&] { return wait(second, nullptr, EPD_FOREVER); });
  pause_ms(20);
  daemon_.hang_up();
  const auto ended = [](epd_status_t status) {
    return status == EPD_DAEMON_LOST || status == EPD_RESOURCE_EXHAUSTED;
  };
  EXPECT_TRUE(ended(leader.get()));
  EXPECT_TRUE(ended(follower.get())) << "somebody else watches";
  EXPECT_NE(epd_session_check(session_), EPD_OK);
}

}  // namespace
}  // namespace epd::testing
