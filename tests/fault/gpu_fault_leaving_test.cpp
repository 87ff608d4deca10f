// Whom MPS is not asked to terminate: who has only lost its session, and who is leaving by itself.
#include "common/fd.h"
#include "gpu_fault_fixture.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace epd::test {
namespace {

constexpr std::size_t kBytes = 4096;

// An illegal call ends that session, and nothing else of its process.
TEST_F(OneGpuFault, AnIllegalCallTerminatesNothing) {
  if (!gpus_->can_terminate()) GTEST_SKIP() << "no nvidia-cuda-mps-control to be asked here";
  Shared<Stage> stage;
  RankProcess client([&]() -> std::string {
    const int gpu = static_cast<int>(victims_gpu());
    const GpuAllocation own = allocate_on_gpu(gpu, kBytes);
    const Session session(daemon().socket(), device_of(kVictim));
    const Case c = fault_case(1, 1);
    const Group group(session, c.config("illegal", 0));
    abi::Call illegal;
    illegal.op = abi::Op::kNoop;
    illegal.epoch = 1;
    illegal.slot = abi::kMaxDepth - 1;
    stage->ready.arrive();
    stage->joined.wait_for(1);
    const abi::PackedCall packed = abi::pack(illegal);
    const std::uint32_t one = 1;
    std::byte* const words = group.slot_on_gpu(0) + abi::UserArenaLayout(c.shape()).calls;
    copy_to_gpu(gpu, words + offsetof(abi::CallWords, host_calls), &packed, sizeof(packed));
    copy_to_gpu(gpu, words + offsetof(abi::CallWords, bell[1]), &one, sizeof(one));
    RANK_CHECK(eventually(20, [&] { return epd_session_check(session.get()) == EPD_INVALID_ARGUMENT; }),
               epd_last_error());
    stage->finished.wait_for(1);
    const std::vector<std::byte> pattern(kBytes, std::byte{0x5a});
    std::vector<std::byte> now(kBytes);
    copy_to_gpu(gpu, own.address, pattern.data(), kBytes);
    copy_from_gpu(gpu, now.data(), own.address, kBytes);
    RANK_CHECK(now == pattern, "its own memory has changed");
    return "";
  });
  ASSERT_TRUE(eventually(60, [&] { return stage->ready.count == 1; }));
  gpus_->list_clients({daemon().engine(victims_gpu()), client.pid()});
  stage->joined.open();
  EXPECT_TRUE(eventually(20, [&] { return gpus_->session_of(client.pid()).empty(); }));
  EXPECT_EQ(daemon().log().find("work on the GPU"), std::string::npos) << "MPS was asked";
  EXPECT_FALSE(gpus_->was_terminated(client.pid()));
  stage->finished.open();
  const RankOutcome outcome = client.wait(40);
  EXPECT_TRUE(outcome.ok) << outcome.to_string();
  gpus_->expect_no_engine_died();
}

// It detaches while MPS still says who its clients are; and is evicted twice before that.
TEST_F(OneGpuFault, AnEvictedClientThatLeavesMeanwhileIsNotTerminated) {
  if (!gpus_->can_hold_mps()) GTEST_SKIP() << "the true MPS does not wait for a test";
  start({{"mps.timeout_ms", "60000"}}, 1);
  Shared<Stage> stage;
  RankProcess client([&]() -> std::string {
    {
      const Session session(daemon().socket(), device_of(kVictim));
      stage->ready.arrive();
      stage->joined.wait_for(1);
    }
    stage->finished.wait_for(1);  // its process is still there
    return "";
  });
  ASSERT_TRUE(eventually(60, [&] { return stage->ready.count == 1; }));
  gpus_->list_clients({daemon().engine(victims_gpu()), client.pid()});
  const std::string session = gpus_->session_of(client.pid());
  const HeldMps held(*gpus_);
  for (int i = 0; i < 2; ++i) EXPECT_EQ(daemon().epctl({"evict", "session", session}).exit_code, 0);
  EXPECT_TRUE(eventually(20, [&] { return held.asked().find("get_client_list") != std::string::npos; }));
  stage->joined.open();
  EXPECT_TRUE(eventually(20, [&] { return gpus_->session_of(client.pid()).empty(); }));
  held.unblock();
  EXPECT_TRUE(eventually(
      20, [&] { return daemon().log().find("work on the GPU not terminated") != std::string::npos; }));
  EXPECT_NE(daemon().log().find("has ended meanwhile"), std::string::npos);
  EXPECT_EQ(held.asked(), "get_server_list\nget_client_list 1\n") << "asked once, and to terminate nobody";
  stage->finished.open();
  EXPECT_TRUE(client.wait(40).ok);
}

// An engine closes its link when nothing of it runs any more. One whose process does not end then is killed.
TEST_F(OneGpuFault, AnEngineThatHasLeftIsNotTerminated) {
  if (!gpus_->can_terminate()) GTEST_SKIP() << "no nvidia-cuda-mps-control to be asked here";
  constexpr int kEnginesLink = 3;
  const pid_t engine = daemon().engine(victims_gpu());
  gpus_->list_clients({engine});
  ASSERT_TRUE(hang_process(engine));
  const UniqueFd pidfd(static_cast<int>(::syscall(SYS_pidfd_open, engine, 0)));
  const UniqueFd link(static_cast<int>(::syscall(SYS_pidfd_getfd, pidfd.get(), kEnginesLink, 0)));
  if (!link.valid()) GTEST_SKIP() << "may not take a descriptor of another process here";
  ASSERT_EQ(::shutdown(link.get(), SHUT_RDWR), 0);
  EXPECT_TRUE(eventually(30, [&] {
    return daemon().engine(victims_gpu()) > 0 && daemon().engine(victims_gpu()) != engine &&
           all_devices_answer(daemon().socket(), "cuda", 1, nullptr);
  }));
  EXPECT_TRUE(eventually(20, [&] { return daemon().log().find("engine killed") != std::string::npos; }))
      << "it was to hang";
  EXPECT_FALSE(gpus_->was_terminated(engine));
}

}  // namespace
}  // namespace epd::test
