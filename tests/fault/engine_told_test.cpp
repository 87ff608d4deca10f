// An engine dies, and a group ends before the next one is there: what is submitted to the group that has
// ended does not hold up the others of its session.
#include "common/signal.h"
#include "fault.h"
#include "hostile.h"

#include "support/engine_pages.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <memory>

namespace epd::test {
namespace {

using abi::AttachType;

std::uint64_t group_stalls(const abi::EnginePage& page, std::uint64_t session_id) {
  for (const abi::StatisticsRow& row : page.sessions.rows) {
    if (row.key != 0 && row.session_id == session_id)
      return row.stalls[static_cast<std::size_t>(abi::Stall::kGroup)];
  }
  return 0;
}

// Submits noops by hand, so that nothing but the engine can refuse them.
TEST(EngineTold, AGroupThatEndedMeanwhileStallsNoOther) {
  DaemonOptions options;
  options.devices = 2;
  // The group is to end before the next engine is there.
  options.settings = {{"engine.restart_backoff_min_ms", "2000"}};
  Daemon daemon(std::move(options));
  ASSERT_TRUE(daemon.start());
  const EnginePages pages(daemon);
  expect_all_ok(run_ranks(1, 60, [&](std::uint32_t) -> std::string {
    HostileSession session(daemon.socket(), "host:0");
    const abi::Joined alone = session.join("alone");
    const Mapping map =
        Mapping::map(session.answer().fds[1].get(), sizeof(abi::Board), Access::kReadOnly).value();
    const auto& board = *map.as<const abi::Board>();
    auto peer = std::make_unique<HostileSession>(daemon.socket(), "host:1");
    abi::Join join = HostileSession::good_join("pair");
    join.shape.num_ranks = 2;
    RANK_CHECK(send_message(session.socket(), AttachType::kJoin, join).ok(), "join");
    join.rank = 1;
    RANK_CHECK(peer->ask(AttachType::kJoin, join) == "OK", "join of the peer");
    RANK_CHECK(session.next_answer() == "OK", "join");
    const abi::Joined pair = session.answer().read<abi::Joined>().value();

    // The supervisor hears of both deaths at once.
    const pid_t engine = daemon.engine(0);
    RANK_CHECK(stop_process(daemon.pid()), "stop");
    RANK_CHECK(send_signal(engine, SIGKILL) == 0, "kill");
    RANK_CHECK(eventually(10, [&] { return !is_running(engine); }), "the engine is still there");
    peer.reset();
    daemon.signal(SIGCONT);
    // It is told to resume when it has been told of all.
    RANK_CHECK(eventually(20, [&] { return board.epoch.load() > alone.epoch; }), "the group did not go on");
    for (int i = 0; i < 10; ++i) {
      const abi::Submission ended = session.noop(pair);
      session.push(ended);
      abi::Submission behind = session.noop(alone);
      behind.epoch = board.epoch.load();
      session.push(behind);
      const std::optional<abi::Completion> first = session.take();
      RANK_CHECK(first && first->ticket == ended.ticket && first->status == StatusCode::kEngineRestarted,
                 "the one of the group that has ended");
      const std::optional<abi::Completion> second = session.take();
      RANK_CHECK(second && second->ticket == behind.ticket && second->status == StatusCode::kOk,
                 "the one behind it");
    }
    const std::uint64_t stalls = group_stalls(pages.of(0), session.id());
    RANK_CHECK(stalls == 0, std::to_string(stalls) + " submissions had to wait for a group");
    return "";
  }));
  daemon.stop();
}

}  // namespace
}  // namespace epd::test
