// Others on the GPU of a rank whose operations are calls: observers, and other groups.
#include "replaying_ranks.h"
#include "stream_rounds.h"

#include <sstream>

namespace epd::test {
namespace {

class CallsBeside : public StreamConformance {};
EPD_INSTANTIATE_CALLS(CallsBeside);

// A line of `epctl ops`: ID GROUP OP KIND RANK DEVICE SESSION SLOT TOKENS STAGE ...
struct OpsLine {
  std::string id, group, op, kind, rank, device, session, slot, tokens, stage;
};
std::vector<OpsLine> ops_of(const Daemon& daemon) {
  std::vector<OpsLine> lines;
  std::istringstream text(daemon.epctl({"ops"}).out);
  for (std::string line; std::getline(text, line);) {
    OpsLine l;
    std::istringstream words(line);
    words >> l.id >> l.group >> l.op >> l.kind >> l.rank >> l.device >> l.session >> l.slot >> l.tokens >>
        l.stage;
    if (l.id.find(':') != std::string::npos) lines.push_back(l);
  }
  return lines;
}

TEST_P(CallsBeside, EpctlListsThemWhileTheyRun) {
  const Case c = stream_case(2, 1);
  Shared<Gate> played;
  Shared<Gate> listed;
  auto ranks = replaying_ranks(daemon(), c, group_name(), [&](const ReplayingRank& self) {
    self.play(0, 1);
    played->arrive();
    if (self.rank == 1) listed->wait_for(1);
    self.play(1, 2);
    self.must_be(EPD_OK);
    played->arrive();
    listed->wait_for(2);
  });
  ASSERT_TRUE(eventually(60, [&] { return played->count == 2; }));
  std::vector<OpsLine> lines;
  EXPECT_TRUE(eventually(30, [&] {
    lines = ops_of(daemon());
    // A dispatch and a combine have ended.
    return lines.size() == 1 && lines.front().op == "2" && lines.front().stage == "wait_ready";
  })) << lines.size();
  if (lines.size() == 1) {
    const OpsLine& l = lines.front();
    const Input input = make_input(c, 0, Round(1));
    EXPECT_EQ(l.kind, "dispatch");
    EXPECT_EQ(l.rank, "0");
    EXPECT_EQ(l.device, daemon().device(0));
    EXPECT_EQ(l.slot, "0");
    EXPECT_EQ(l.tokens, std::to_string(input.num_tokens));
    EXPECT_EQ(l.stage, "wait_ready");
    const CommandResult one = daemon().epctl({"op", l.id});
    EXPECT_EQ(one.exit_code, 0) << one.err;
    EXPECT_NE(one.out.find("dispatch"), std::string::npos) << one.out;
    EXPECT_NE(one.out.find("rank 1 ("), std::string::npos) << one.out;
    EXPECT_NE(one.out.find("has not submitted it"), std::string::npos) << one.out;
  }
  listed->arrive();
  EXPECT_TRUE(eventually(60, [&] { return played->count == 4; }));
  EXPECT_TRUE(eventually(30, [&] { return ops_of(daemon()).empty(); }));
  listed->arrive();
  expect_all_ok(wait_all(ranks, 90));
}

// Rank 0's operation has all the SMs that it may have, and waits for a slow peer.
TEST_P(CallsBeside, AGroupWorksWhileAnOperationOfAnotherHoldsSms) {
  DaemonOptions options;
  use_devices(options, "cuda");
  options.sms = 1024;  // all that a device has
  Daemon own(options);
  ASSERT_TRUE(own.start());
  Shared<Gate> goes_on;
  Shared<Gate> finished;
  auto ranks = replaying_ranks(own, stream_case(2, 1), "slow", [&](const ReplayingRank& self) {
    self.play(0, 1);
    if (self.rank == 1) goes_on->wait_for(1);
    self.play(1, 4);
    self.must_be(EPD_OK);
    finished->meet(2);
  });
  ASSERT_TRUE(eventually(60, [&] {
    const std::vector<OpsLine> ops = ops_of(own);
    return ops.size() == 1 && ops.front().stage == "wait_ready";
  })) << "rank 0 waits for rank 1";
  std::vector<RankProcess> beside;
  beside.push_back(replaying_rank(own, stream_case(1, 1), "beside", 0, [&](const ReplayingRank& self) {
    self.play(0, 3);
    self.must_be(EPD_OK);
  }));
  expect_all_ok(wait_all(beside, 60));
  EXPECT_TRUE(eventually(30, [&] { return ops_of(own).size() == 1; })) << "it still waits";
  goes_on->arrive();
  expect_all_ok(wait_all(ranks, 90));
  own.stop();
}

}  // namespace
}  // namespace epd::test
