// Whose rows an engine of host devices moves first.
#include "base/clock.h"
#include "engine_fixture.h"

#include <gtest/gtest.h>
#include <memory>
#include <vector>

namespace epd::test {
namespace {

class EnginePriority : public EngineFixture {};

// While rows of one priority can move, those of a lower one stand back.
TEST_F(EnginePriority, HigherMovesFirst) {
  abi::GroupShape shape = kShape;
  shape.num_ranks = 1;
  shape.max_tokens = 20000;
  shape.hidden = 1024;
  std::vector<std::unique_ptr<RawSession>> sessions;
  std::vector<std::unique_ptr<RawGroup>> groups;
  const std::int32_t priorities[] = {-1, 5};
  for (std::uint64_t i = 0; i < 2; ++i) {
    sessions.push_back(std::make_unique<RawSession>(200 + i));
    sessions.back()->add_to(*engine_view_[0]);
    groups.push_back(std::make_unique<RawGroup>(200 + i, shape));
    groups.back()->priority = priorities[i];
    groups.back()->add_to_engine({engine_view_[0]}, {sessions.back().get()}, 0, false);
  }
  // Both as large, the low one first. The high one takes half of what both take, in equal turns it would take
  // all; unless the low one has run before, because this thread did not.
  bool overtakes = false;
  for (int i = 0; i < 20 && !overtakes; ++i) {
    abi::Submission s = submission(0, Op::kDispatch, 0);
    s.num_tokens = shape.max_tokens;
    s.submit_ns = MonotonicClock().now_ns();  // both are told how long after this they ended
    std::uint32_t done_us[2];
    for (auto& session : sessions) session->submit(s);
    for (std::uint64_t each = 0; each < 2; ++each) {
      const auto done = sessions[each]->wait(30000);
      ASSERT_TRUE(done.has_value());
      ASSERT_EQ(done->status, StatusCode::kOk);
      done_us[each] = done->done_us;
    }
    overtakes = std::uint64_t{done_us[1]} * 4 < std::uint64_t{done_us[0]} * 3;
  }
  EXPECT_TRUE(overtakes) << "the lower priority is not held back";
}

}  // namespace
}  // namespace epd::test
