// Joins and leaves of several threads of one session: none waits for another, deadlines are kept, and what
// comes too late is left again.
#include "client_fixture.h"

#include <dirent.h>
#include <chrono>
#include <future>
#include <thread>
#include <vector>

namespace epd::testing {
namespace {

using std::chrono::seconds;
using std::chrono::steady_clock;

constexpr char kHeld[] = "held";

std::size_t open_descriptors() {
  std::size_t count = 0;
  DIR* const directory = ::opendir("/proc/self/fd");
  while (::readdir(directory) != nullptr) ++count;
  ::closedir(directory);
  return count;
}

class ClientRequests : public ClientAuto {
 protected:
  void hold_joins() {
    FakeSettings settings;
    settings.hold_join = kHeld;
    daemon_.set(settings);
  }
  static epd_group_config_t config(const char* name, std::int32_t rank, std::int32_t timeout_ms) {
    epd_group_config_t config = small_config();
    config.name = name;
    config.rank = rank;
    config.timeout_ms = timeout_ms;
    return config;
  }
  struct Joined {
    epd_status_t status;
    std::string text;
    epd_group_t* group;
  };
  Joined join(const char* name, std::int32_t rank, std::int32_t timeout_ms) {
    const epd_group_config_t wanted = config(name, rank, timeout_ms);
    epd_group_t* group = nullptr;
    const epd_status_t status = epd_group_join(session_, &wanted, &group);
    return {status, status != EPD_OK ? epd_last_error() : "", group};
  }
  std::future<Joined> join_aside(std::int32_t rank, std::int32_t timeout_ms) {
    return std::async(std::launch::async, [=, this] { return join(kHeld, rank, timeout_ms); });
  }
  void expect_in_use(epd_group_t* group) {
    epd_ticket_t ticket = 0;
    ASSERT_EQ(epd_noop(group, 0, EPD_NO_STREAM, &ticket), EPD_OK) << epd_last_error();
    EXPECT_EQ(epd_ticket_wait(group, ticket, 20'000, nullptr), EPD_OK) << epd_last_error();
  }
};

TEST_F(ClientRequests, AJoinThatWaitsHoldsUpNoOtherCall) {
  hold_joins();
  auto slow = join_aside(0, 60'000);
  ASSERT_TRUE(daemon_.await_held(1));
  const Joined quick = join("quick", 0, 10'000);
  ASSERT_EQ(quick.status, EPD_OK) << quick.text;
  expect_in_use(quick.group);
  epd_group_leave(quick.group);
  EXPECT_EQ(daemon_.left(), 1u);
  expect_in_use(group_);
  EXPECT_EQ(slow.wait_for(seconds(0)), std::future_status::timeout);
  daemon_.answer_join(0);
  const Joined joined = slow.get();
  ASSERT_EQ(joined.status, EPD_OK) << joined.text;
  expect_in_use(joined.group);
}

TEST_F(ClientRequests, RepliesComeInAnyOrderAndReachWhoeverAsked) {
  hold_joins();
  constexpr std::int32_t kJoins = 2;
  std::vector<std::future<Joined>> joins;
  for (std::int32_t rank = 0; rank < kJoins; ++rank) joins.push_back(join_aside(rank, 60'000));
  ASSERT_TRUE(daemon_.await_held(kJoins));
  for (std::int32_t rank = kJoins; rank-- > 0;) {
    daemon_.answer_join(rank);
    const Joined joined = joins[static_cast<std::size_t>(rank)].get();
    ASSERT_EQ(joined.status, EPD_OK) << joined.text;
    EXPECT_EQ(epd_group_rank(joined.group), static_cast<std::uint32_t>(rank));
    epd_buffers_t buffers;
    epd_buffers_init(&buffers);
    ASSERT_EQ(epd_group_buffers(joined.group, 0, &buffers), EPD_OK);
    buffers.topk_weights[0] = 7.5f;
    FakeMember& member = daemon_.member(static_cast<std::size_t>(kJoins - rank));
    const abi::UserArenaLayout layout(member.shape);
    EXPECT_EQ(*member.user.as<float>(layout.at(0, abi::Region::kTopkWeights)), 7.5f) << "its own arena";
  }
}

TEST_F(ClientRequests, TheDaemonsDeathEndsAllThatWait) {
  hold_joins();
  auto one = join_aside(0, 60'000);
  auto two = join_aside(1, 60'000);
  ASSERT_TRUE(daemon_.await_held(2));
  daemon_.hang_up();
  EXPECT_EQ(one.get().status, EPD_DAEMON_LOST);
  EXPECT_EQ(two.get().status, EPD_DAEMON_LOST);
  EXPECT_EQ(join("after", 0, 10'000).status, EPD_DAEMON_LOST);
}

// Nobody calls the library any more when the answer comes.
TEST_F(ClientRequests, AJoinThatIsAnsweredTooLateIsLeftAgain) {
  hold_joins();
  const Joined late = join(kHeld, 0, 1);
  EXPECT_EQ(late.status, EPD_DEADLINE_EXCEEDED);
  EXPECT_EQ(epd_session_check(session_), EPD_OK) << "the session goes on";
  expect_in_use(group_);
  const std::size_t descriptors = open_descriptors();
  daemon_.answer_join(0);
  for (int i = 0; i < 10'000 && daemon_.left() == 0; ++i) pause_ms(1);
  EXPECT_EQ(daemon_.left(), 1u);
  for (int i = 0; i < 10'000 && open_descriptors() > descriptors; ++i) pause_ms(1);
  EXPECT_LE(open_descriptors(), descriptors) << "of the arena and the board";
  const Joined again = join("again", 0, 10'000);
  EXPECT_EQ(again.status, EPD_OK) << again.text;
}

// A request that could not even be sent costs nothing but the call.
TEST_F(ClientRequests, ADaemonThatReadsNothingCostsTheCallsTheirDeadlineAndNothingElse) {
  FakeSettings settings;
  settings.deaf = true;
  daemon_.set(settings);
  constexpr int kJoins = 200;  // more than the socket takes
  std::vector<std::future<Joined>> joins;
  const auto begin = steady_clock::now();
  for (int i = 0; i < kJoins; ++i) {
    joins.push_back(std::async(std::launch::async, [this] { return join("deaf", 0, 300); }));
  }
  std::size_t unsent = 0;
  for (auto& join : joins) {
    const Joined joined = join.get();
    EXPECT_EQ(joined.status, EPD_DEADLINE_EXCEEDED) << joined.text;
    if (joined.text.find("nothing was sent") != std::string::npos) ++unsent;
  }
  EXPECT_LT(steady_clock::now() - begin, seconds(60));
  EXPECT_GT(unsent, 0u);
  EXPECT_LT(unsent, static_cast<std::size_t>(kJoins));
  EXPECT_EQ(epd_session_check(session_), EPD_OK) << epd_last_error();
  daemon_.set(FakeSettings{});
  const std::size_t sent = static_cast<std::size_t>(kJoins) - unsent;
  for (int i = 0; i < 10'000 && daemon_.left() < sent; ++i) pause_ms(1);
  EXPECT_EQ(daemon_.left(), sent) << "each membership that came too late";
  expect_in_use(group_);
}

// ---- calls that are looped over, and waits of hooks ------------------------------------------------

TEST_F(ClientOps, ReleasingAHandleNoticesTheDaemonsDeath) {
  epd_group_config_t config = small_config();
  config.name = "kept";
  config.num_handles = 1;
  epd_group_t* group = nullptr;
  ASSERT_EQ(epd_group_join(session_, &config, &group), EPD_OK) << epd_last_error();
  epd_dispatch_args_t args;
  epd_dispatch_args_init(&args);
  args.keep_handle = 1;
  epd_ticket_t ticket = 0;
  epd_handle_t handle = 0;
  ASSERT_EQ(epd_dispatch(group, &args, EPD_NO_STREAM, &ticket, &handle), EPD_OK) << epd_last_error();
  EXPECT_EQ(epd_handle_release(group, handle), EPD_WOULD_BLOCK);
  daemon_.hang_up();
  epd_status_t status = EPD_WOULD_BLOCK;
  for (int i = 0; i < 10'000 && status == EPD_WOULD_BLOCK; ++i) {
    status = epd_handle_release(group, handle);
    pause_ms(1);
  }
  EXPECT_EQ(status, EPD_DAEMON_LOST);
  EXPECT_EQ(epd_handle_release(group, handle), EPD_DAEMON_LOST) << "and goes on saying so";
}

struct Resuming {
  epd_group_t* group = nullptr;
  std::promise<void> begun;
  epd_status_t status = EPD_OK;
};

TEST_F(ClientOps, AHookThatResumesForEverDoesNotKeepLeaveFromReturning) {
  Resuming resuming;
  resuming.group = group_;
  const epd_ticket_t ticket = dispatch(0);
  ASSERT_EQ(epd_ticket_on_complete(
                group_, ticket,
                [](const epd_result_t*, void* user) {
                  auto* mine = static_cast<Resuming*>(user);
                  mine->begun.set_value();
                  mine->status = epd_group_resume(mine->group, EPD_FOREVER, nullptr);
                },
                &resuming),
            EPD_OK);
  const auto call = daemon_.next_call();
  daemon_.write_board(abi::GroupState::kBroken, 1, 0, StatusCode::kEngineRestarted, "its engine died");
  daemon_.complete(*call);
  resuming.begun.get_future().wait();
  auto leaving = std::async(std::launch::async, [&] { epd_group_leave(group_); });
  const bool left = leaving.wait_for(seconds(20)) == std::future_status::ready;
  EXPECT_TRUE(left);
  if (!left) daemon_.hang_up();  // lets it return
  leaving.get();
  EXPECT_EQ(resuming.status, left ? EPD_ABORTED : EPD_DAEMON_LOST);
}

}  // namespace
}  // namespace epd::testing
