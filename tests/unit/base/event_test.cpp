// Events for operators: their bounded memory, and that it agrees with the log.
#include "base/event.h"

#include <gtest/gtest.h>
#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>

namespace epd {
namespace {

std::vector<std::uint64_t> sequences(const EventBatch& batch) {
  std::vector<std::uint64_t> result;
  for (const Event& event : batch.events) result.push_back(event.sequence);
  return result;
}

TEST(EventLog, RemembersTheLastAndCountsWhatAReaderLost) {
  EventLog log(4);
  EXPECT_TRUE(log.read(0, 10, 0).events.empty());
  for (int i = 0; i < 3; ++i) log.add({});
  EXPECT_EQ(sequences(log.read(0, 10, 0)), (std::vector<std::uint64_t>{1, 2, 3}));
  EXPECT_EQ(log.read(0, 10, 0).lost, 0u);
  for (int i = 0; i < 7; ++i) log.add({});  // 10 by now; 7 .. 10 are remembered
  EventBatch batch = log.read(0, 10, 0);
  EXPECT_EQ(sequences(batch), (std::vector<std::uint64_t>{7, 8, 9, 10}));
  EXPECT_EQ(batch.lost, 6u);
  EXPECT_EQ(batch.newest, 10u);
  EXPECT_EQ(log.read(6, 10, 0).lost, 0u);
  batch = log.read(7, 2, 0);
  EXPECT_EQ(sequences(batch), (std::vector<std::uint64_t>{8, 9}));
  EXPECT_TRUE(log.read(10, 10, 0).events.empty());
  EXPECT_TRUE(log.read(99, 10, 0).events.empty());
}

Event of(EventOwner owner) {
  Event event;
  event.owner = owner;
  return event;
}

TEST(EventLog, AFloodOfOneUserLeavesTheEventsOfOthers) {
  EventLog log(16);
  for (int i = 0; i < 3; ++i) log.add(of(kDaemonOwner));  // 1 .. 3
  for (int i = 0; i < 2; ++i) log.add(of(1001));          // 4, 5
  for (int i = 0; i < 5000; ++i) log.add(of(1002));
  const EventBatch batch = log.read(0, 100, 0);
  ASSERT_EQ(batch.events.size(), 16u);
  EXPECT_EQ(std::count_if(batch.events.begin(), batch.events.end(),
                          [](const Event& e) { return e.owner == kDaemonOwner; }),
            3);
  EXPECT_EQ(batch.events[4].sequence, 5u);
  EXPECT_EQ(batch.events[4].owner, 1001);
  EXPECT_EQ(batch.events[5].sequence, 5005u - 10) << "of the flood, the last";
  EXPECT_EQ(batch.events.back().sequence, 5005u);
  EXPECT_EQ(batch.lost, 5005u - 16) << "the hole is counted";
}

TEST(EventLog, HolesAreCountedWhereverAReaderBegins) {
  EventLog log(8);
  for (int i = 0; i < 200; ++i) log.add(of(i % 5 == 0 ? kDaemonOwner : i % 7));
  for (std::uint64_t since = 0; since < 200; ++since) {
    std::uint64_t seen = since;
    std::uint64_t counted = 0;
    for (EventBatch batch = log.read(seen, 3, 0); !batch.events.empty(); batch = log.read(seen, 3, 0)) {
      counted += batch.lost + batch.events.size();
      seen = batch.events.back().sequence;
    }
    EXPECT_EQ(seen, 200u);
    EXPECT_EQ(counted, 200 - since);
  }
}

TEST(EventLog, AReaderThatWaitsIsWoken) {
  EventLog log;
  std::thread writer([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    log.add({});
  });
  EXPECT_EQ(log.read(0, 10, 20'000).events.size(), 1u);
  writer.join();
}

TEST(EventLog, ReadersAndWritersAtOnceSeeEveryEventOrHearOfItsLoss) {
  EventLog log(16);
  constexpr std::uint64_t kEach = 2000;
  std::vector<std::thread> writers;
  writers.reserve(2);
  for (int i = 0; i < 2; ++i) {
    writers.emplace_back([&] {
      for (std::uint64_t k = 0; k < kEach; ++k) log.add({});
    });
  }
  std::uint64_t seen = 0;
  std::uint64_t counted = 0;
  while (seen < 2 * kEach) {
    const EventBatch batch = log.read(seen, 5, 20'000);
    ASSERT_FALSE(batch.events.empty());
    ASSERT_EQ(batch.events.front().sequence, seen + batch.lost + 1);
    counted += batch.lost + batch.events.size();
    seen = batch.events.back().sequence;
  }
  for (std::thread& writer : writers) writer.join();
  EXPECT_EQ(counted, 2 * kEach);
}

TEST(RecordEvent, IsLoggedAndRemembered) {
  EventLog log;
  record_event(EventKind::kRankJoined, LogLevel::kInfo, "nobody listens");
  log.install();
  testing::internal::CaptureStderr();
  record_event(EventKind::kGroupBroke, LogLevel::kWarning, "group breaks",
               {{"group", 9}, {"text", "so it is"}});
  record_event(EventKind::kOther, LogLevel::kDebug, "below the log's level");
  log_flush();
  const std::string line = testing::internal::GetCapturedStderr();
  EXPECT_NE(line.find("event=\"group breaks\" group=9 text=\"so it is\""), std::string::npos) << line;
  const EventBatch batch = log.read(0, 10, 0);
  ASSERT_EQ(batch.events.size(), 2u) << "the log's level is the log's alone";
  const Event& event = batch.events[0];
  EXPECT_EQ(event.kind, EventKind::kGroupBroke);
  EXPECT_EQ(event.level, LogLevel::kWarning);
  EXPECT_EQ(event.text, "group breaks");
  ASSERT_EQ(event.fields.size(), 2u);
  EXPECT_EQ(event.fields[1], (std::pair<std::string, std::string>{"text", "so it is"}));
  EXPECT_GT(event.unix_ms, 1'600'000'000'000);
}

// One client did this with 3,346 attaches each second.
TEST(RecordEvent, AFloodOfSessionsIsLimitedForItsUserAloneAndToldInTheEnd) {
  EventLog log;
  log.install();
  constexpr int kFlood = 20'000;
  testing::internal::CaptureStderr();
  for (int i = 0; i < kFlood; ++i)
    record_of_user(1001, EventKind::kSessionAttached, LogLevel::kInfo, "session attached", {{"session", i}});
  record_of_user(1002, EventKind::kSessionAttached, LogLevel::kInfo, "session attached", {{"session", -1}});
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  LogLimiter::tell_suppressed();
  log_flush();
  const std::string lines = testing::internal::GetCapturedStderr();
  EXPECT_NE(lines.find("session=-1"), std::string::npos) << "the other user's line";
  EXPECT_LT(std::count(lines.begin(), lines.end(), '\n'), kFlood / 4);
  std::uint64_t told = 0;
  std::uint64_t left_out = 0;
  for (const Event& event : log.read(0, 4096, 0).events) {
    if (event.owner != 1001) continue;
    if (event.text == "session attached") {
      ++told;
    } else {
      left_out += std::stoull(event.fields.at(1).second);
      EXPECT_EQ(event.fields.at(2), (std::pair<std::string, std::string>{"uid", "1001"}));
    }
  }
  EXPECT_EQ(told + left_out, std::uint64_t{kFlood});
}

TEST(RecordEvent, ARateLimitTellsHowManyItLeftOut) {
  EventLog log;
  log.install();
  LogLimiter limiter(3);
  testing::internal::CaptureStderr();
  for (int i = 0; i < 50; ++i)
    limiter.record(EventKind::kRefused, LogLevel::kWarning, "refused", {{"i", i}}, 7);
  std::this_thread::sleep_for(std::chrono::milliseconds(1100));
  limiter.record(EventKind::kRefused, LogLevel::kWarning, "refused", {{"i", 50}}, 7);
  log_flush();
  testing::internal::GetCapturedStderr();
  std::vector<Event> events = log.read(0, 100, 0).events;
  std::erase_if(events, [](const Event& event) { return event.owner != 7; });  // limiters of other tests
  ASSERT_LT(events.size(), 12u);
  EXPECT_GE(events.size(), 5u);
  std::uint64_t told = 0;
  std::uint64_t left_out = 0;
  for (const Event& event : events) {
    if (event.text == "refused") {
      ++told;
    } else {
      left_out += std::stoull(event.fields.at(1).second);
    }
  }
  EXPECT_EQ(told + left_out, 51u);
}

}  // namespace
}  // namespace epd
