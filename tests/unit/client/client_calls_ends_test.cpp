// Calls when groups break or nobody comes any more: what the CPU is told, and that no stream waits for
// one that nobody takes.
#include "client_calls_fixture.h"

#include <chrono>
#include <future>
#include <thread>

namespace epd::testing {
namespace {

// ---- breaks ---------------------------------------------------------------------------------------

TEST_F(ClientCalls, CheckSaysWhyCommandsWereNotCarriedOut) {
  ASSERT_EQ(dispatch_with(dispatch_args(0)), EPD_OK) << epd_last_error();
  end_call();
  epd_progress_t progress;
  epd_progress_init(&progress);
  EXPECT_EQ(epd_group_check(group_, nullptr), EPD_OK) << epd_last_error();
  ASSERT_EQ(dispatch_with(dispatch_args(0)), EPD_OK) << epd_last_error();
  end_call(false);
  std::thread late([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    write_board(abi::GroupState::kBroken, 1, StatusCode::kInvalidArgument, "topk_idx[3] is 99");
  });
  member_->board().next_index = 1;
  EXPECT_EQ(epd_group_check(group_, &progress), EPD_INVALID_ARGUMENT);
  EXPECT_ERROR_HAS("topk_idx[3] is 99");
  late.join();
  EXPECT_EQ(progress.ended, 2u);
  EXPECT_EQ(progress.failed, 1u);
  EXPECT_EQ(progress.next_op, 1u);
  EXPECT_EQ(dispatch_with(dispatch_args(0)), EPD_INVALID_ARGUMENT) << "refused at once";
  EXPECT_EQ(words().tail, 2u);
}

TEST_F(ClientCalls, AfterAResumeCallsAreOfTheNextEpoch) {
  EXPECT_EQ(words().epoch, 1u) << "the join's";
  for (const std::uint32_t slot : {0u, 1u}) {
    ASSERT_EQ(dispatch_with(dispatch_args(slot)), EPD_OK) << epd_last_error();
    end_call();
  }
  ASSERT_EQ(dispatch_with(dispatch_args(0)), EPD_OK) << epd_last_error();
  end_call(false);
  break_and_resume(2);
  EXPECT_EQ(epd_group_check(group_, nullptr), EPD_ENGINE_RESTARTED);
  epd_resume_info_t info;
  epd_resume_info_init(&info);
  EXPECT_EQ(words().epoch, 1u);
  EXPECT_EQ(dispatch_with(dispatch_args(0)), EPD_ENGINE_RESTARTED);
  ASSERT_EQ(epd_group_resume(group_, 1000, &info), EPD_OK) << epd_last_error();
  EXPECT_EQ(info.epoch, 2u);
  EXPECT_EQ(words().epoch, 2u);
  EXPECT_EQ(epd_group_check(group_, nullptr), EPD_OK) << "what failed before has been told of";
  ASSERT_EQ(dispatch_with(dispatch_args(0)), EPD_OK) << epd_last_error();
  EXPECT_EQ(last_call().epoch, 2u);
  end_call();
  ASSERT_EQ(epd_group_resume(group_, 1000, &info), EPD_OK) << "nothing had broken";
  EXPECT_EQ(words().epoch, 2u);
  epd_combine_args_t args;
  epd_combine_args_init(&args);
  args.handle = handle_;
  EXPECT_EQ(epd_combine(group_, &args, stream_, &ticket_), EPD_OK) << "handles stay: " << epd_last_error();
  end_call();
}

// The engine dies again before the client has noticed that it was back.
TEST_F(ClientCalls, AResumeIsOfTheEpochThatIsThere) {
  ASSERT_EQ(dispatch_with(dispatch_args(0)), EPD_OK) << epd_last_error();
  end_call(false);
  epd_resume_info_t info;
  epd_resume_info_init(&info);
  break_and_resume(2);
  break_and_resume(3);
  EXPECT_EQ(epd_group_resume(group_, 20'000, &info), EPD_OK) << epd_last_error();
  EXPECT_EQ(info.epoch, 3u);
  EXPECT_EQ(words().epoch, 3u);
  break_and_resume(4);
  EXPECT_EQ(dispatch_with(dispatch_args(0)), EPD_ENGINE_RESTARTED) << "of that it has not been told";
  EXPECT_EQ(epd_group_resume(group_, 20'000, &info), EPD_OK) << epd_last_error();
  ASSERT_EQ(dispatch_with(dispatch_args(0)), EPD_OK) << epd_last_error();
  EXPECT_EQ(last_call().epoch, 4u);
  end_call();
}

// B6: what check had read was then compared with what resume has noted since, a difference of less than
// none: after five seconds 4294967295 calls were said not to have been carried out.
TEST_F(ClientCalls, CheckBesideAResumeFindsTheGroupWell) {
  ASSERT_EQ(dispatch_with(dispatch_args(0)), EPD_OK) << epd_last_error();
  cuda_.after_next_copy([this] {
    end_call(false);
    break_and_resume(2);
    epd_resume_info_t info;
    epd_resume_info_init(&info);
    EXPECT_EQ(epd_group_resume(group_, 1000, &info), EPD_OK) << epd_last_error();
  });
  EXPECT_EQ(epd_group_check(group_, nullptr), EPD_OK) << epd_last_error();
  EXPECT_EQ(epd_group_check(group_, nullptr), EPD_OK) << epd_last_error();
}

// B5: a slot's last call of 2^31 calls ago or more looked as if it were still to come, and the wait for
// it took all of its limit, minutes on one of the application's SMs.
TEST_F(ClientCalls, ASlotThatWasNotUsedForLongIsNotWaitedFor) {
  for (const std::uint32_t since : {1u << 31, (1u << 31) + 1, 3u << 30, 0u - 65}) {
    SCOPED_TRACE(since);
    epd_dispatch_args_t args = dispatch_args(0);
    ASSERT_EQ(dispatch_with(args), EPD_OK) << epd_last_error();
    end_call();
    // On other slots, by graphs.
    const std::uint32_t now = words().tail + since;
    cuda_.poke(address(words().tail), now);
    cuda_.poke(address(words().done), now);
    ASSERT_EQ(epd_ticket_wait_on_stream(group_, ticket_, stream_), EPD_OK) << epd_last_error();
    EXPECT_EQ(cuda_.stuck(stream_), 0u);
    ASSERT_EQ(dispatch_with(args), EPD_OK) << epd_last_error();
    EXPECT_EQ(cuda_.stuck(stream_), 1u) << "but for this";
    end_call();
    EXPECT_EQ(cuda_.stuck(stream_), 0u);
  }
}

// ---- tickets of what was not carried out ----------------------------------------------------------

TEST_F(ClientCalls, TicketsSayWhyTheirCallsWereNotCarriedOut) {
  for (const bool by_host : {true, false}) {
    SCOPED_TRACE(by_host);
    ASSERT_EQ(dispatch_in(by_host ? EPD_NO_STREAM : stream_, dispatch_args(0)), EPD_OK) << epd_last_error();
    by_host ? end_host_call(abi::CallEnding::kFailed) : end_call(false);
    EXPECT_EQ(epd_ticket_poll(group_, ticket_, nullptr), EPD_WOULD_BLOCK) << "the group still has to stop";
    const std::uint64_t next = by_host ? 2 : 3;
    std::thread late([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(30));
      write_board(abi::GroupState::kBroken, next - 1, StatusCode::kInvalidArgument, "topk_idx[3] is 99");
      std::this_thread::sleep_for(std::chrono::milliseconds(30));
      write_board(abi::GroupState::kActive, next, StatusCode::kInvalidArgument, "topk_idx[3] is 99");
    });
    epd_result_t result;
    epd_result_init(&result);
    EXPECT_EQ(epd_ticket_wait(group_, ticket_, 20'000, &result), EPD_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("topk_idx[3] is 99");
    EXPECT_EQ(result.status, EPD_INVALID_ARGUMENT);
    late.join();
    EXPECT_EQ(dispatch_in(EPD_NO_STREAM, dispatch_args(1)), EPD_INVALID_ARGUMENT) << "refused at once";
    epd_resume_info_t info;
    epd_resume_info_init(&info);
    ASSERT_EQ(epd_group_resume(group_, 1000, &info), EPD_OK) << epd_last_error();
  }
}

// An engine that has to come back first may take longer than a group that is well takes to say why.
TEST_F(ClientCalls, ATicketWaitsAsLongAsItsGroupIsBroken) {
  ASSERT_EQ(dispatch_in(EPD_NO_STREAM, dispatch_args(0)), EPD_OK) << epd_last_error();
  end_host_call(abi::CallEnding::kDiscarded);
  write_board(abi::GroupState::kBroken, 1, StatusCode::kEngineRestarted, "the engine is away");
  EXPECT_EQ(epd_ticket_wait(group_, ticket_, 5'500, nullptr), EPD_DEADLINE_EXCEEDED) << epd_last_error();
  break_and_resume(2);
  EXPECT_EQ(wait(ticket_), EPD_ENGINE_RESTARTED);
}

// As torch captures by default. A thread that watches the group would end the capture.
TEST_F(ClientCalls, ACaptureGoesOnWhateverOtherThreadsAskOfTheGroup) {
  ASSERT_EQ(dispatch_with(dispatch_args(0)), EPD_OK) << epd_last_error();
  end_call();
  CUgraph graph = nullptr;
  cuda_.set_current(cuda_.context());
  ASSERT_EQ(cuStreamBeginCapture(stream_, CU_STREAM_CAPTURE_MODE_GLOBAL), CUDA_SUCCESS);
  const auto in_thread = [this](auto call) { return std::async(std::launch::async, call).get(); };
  EXPECT_EQ(in_thread([this] { return epd_group_check(group_, nullptr); }), EPD_OK) << epd_last_error();
  break_and_resume(2);
  EXPECT_EQ(in_thread([this] { return epd_group_resume(group_, 1000, nullptr); }), EPD_OK);
  EXPECT_EQ(epd_group_check(group_, nullptr), EPD_OK)
      << "also in the thread that captures: " << epd_last_error();
  EXPECT_EQ(dispatch_with(dispatch_args(1)), EPD_OK) << epd_last_error();
  EXPECT_EQ(cuStreamEndCapture(stream_, &graph), CUDA_SUCCESS);
  if (graph != nullptr) {
    EXPECT_EQ(cuGraphDestroy(graph), CUDA_SUCCESS);
  }
  cuda_.set_current(nullptr);
}

// Likewise check, which is told by the device that calls were not carried out.
TEST_F(ClientCalls, CheckWaitsAsLongAsTheEngineIsAway) {
  ASSERT_EQ(dispatch_with(dispatch_args(0)), EPD_OK) << epd_last_error();
  end_call(false);
  daemon_.set_serving(false);
  auto checked = std::async(std::launch::async, [this] { return epd_group_check(group_, nullptr); });
  EXPECT_NE(checked.wait_for(std::chrono::milliseconds(5'500)), std::future_status::ready);
  daemon_.set_serving(true);
  break_and_resume(2);
  EXPECT_EQ(checked.get(), EPD_ENGINE_RESTARTED);
}

// Nothing of a context that has faulted runs any more, so no call of a stream of it is ever made.
TEST_F(ClientCalls, NoTicketWaitsForAContextThatHasFaulted) {
  for (const bool hooked : {false, true}) {
    ASSERT_EQ(attach_again(EPD_WAIT_BY_KERNEL), EPD_OK) << epd_last_error();
    member_ = &daemon_.member(0);
    cuda_.hold(stream_, true);
    ASSERT_EQ(dispatch_with(dispatch_args(0)), EPD_OK) << epd_last_error();
    const epd_ticket_t in_stream = ticket_;
    ASSERT_EQ(dispatch_in(EPD_NO_STREAM, dispatch_args(1)), EPD_OK) << epd_last_error();
    std::promise<epd_status_t> told;
    auto ended = told.get_future();
    std::thread waiter;
    if (hooked) {
      const auto hook = [](const epd_result_t* result, void* user) {
        static_cast<std::promise<epd_status_t>*>(user)->set_value(result->status);
      };
      ASSERT_EQ(epd_ticket_on_complete(group_, in_stream, hook, &told), EPD_OK) << epd_last_error();
    } else {
      waiter = std::thread([&] {
        told.set_value(epd_ticket_wait(group_, in_stream, EPD_FOREVER, nullptr));
        EXPECT_ERROR_HAS("CUDA_ERROR_ILLEGAL_ADDRESS");
        EXPECT_ERROR_HAS("num_tokens_at");
      });
    }
    EXPECT_NE(ended.wait_for(std::chrono::milliseconds(300)), std::future_status::ready);
    cuda_.fail("cuStreamIsCapturing", CUDA_ERROR_ILLEGAL_ADDRESS);
    const bool in_time = ended.wait_for(std::chrono::seconds(10)) == std::future_status::ready;
    EXPECT_TRUE(in_time);
    cuda_.hold(stream_, false);
    if (!in_time) end_call();
    EXPECT_EQ(ended.get(), EPD_INTERNAL);
    if (waiter.joinable()) waiter.join();
    EXPECT_EQ(epd_ticket_poll(group_, ticket_, nullptr), EPD_WOULD_BLOCK) << "the engine has this one";
    cuda_.fail("cuStreamIsCapturing", CUDA_SUCCESS);
    if (in_time) cuda_.poke(address(words().done), words().tail);
    end_host_call();
    EXPECT_EQ(wait(ticket_), EPD_OK) << epd_last_error();
  }
}

// Its stream has gone on, so the caller waits; and its result will never come.
TEST_F(ClientCalls, AReplayWhoseEngineDiedBeforeItsResultEndsWithTheBreak) {
  CUgraph graph = nullptr;
  CUgraphExec replay = nullptr;
  cuda_.set_current(cuda_.context());
  ASSERT_EQ(cuStreamBeginCapture(stream_, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL), CUDA_SUCCESS);
  ASSERT_EQ(dispatch_with(dispatch_args(0)), EPD_OK) << epd_last_error();
  ASSERT_EQ(cuStreamEndCapture(stream_, &graph), CUDA_SUCCESS);
  ASSERT_EQ(cuGraphInstantiateWithFlags(&replay, graph, 0), CUDA_SUCCESS);
  for (std::uint64_t epoch = 1; epoch <= 4; ++epoch) {
    ASSERT_EQ(cuGraphLaunch(replay, stream_), CUDA_SUCCESS);
    const abi::Call call = call_at(words().done);
    cuda_.poke(address(words().done), words().done + 1);
    EXPECT_EQ(cuda_.stuck(stream_), 0u);
    if (epoch == 3) break_and_resume(epoch + 1);  // before the wait
    auto waited = std::async(std::launch::async,
                             [this] { return epd_ticket_wait(group_, ticket_, EPD_FOREVER, nullptr); });
    if (epoch != 3) {
      EXPECT_NE(waited.wait_for(std::chrono::milliseconds(300)), std::future_status::ready);
      break_and_resume(epoch + 1);
    }
    const bool in_time = waited.wait_for(std::chrono::seconds(10)) == std::future_status::ready;
    EXPECT_TRUE(in_time);
    if (!in_time) tell_result(call);
    EXPECT_EQ(waited.get(), EPD_ENGINE_RESTARTED);
    ASSERT_EQ(epd_group_resume(group_, 1000, nullptr), EPD_OK) << epd_last_error();
    EXPECT_EQ(epd_ticket_wait(group_, ticket_, 500, nullptr), EPD_DEADLINE_EXCEEDED) << "of the next epoch";
  }
  ASSERT_EQ(cuGraphLaunch(replay, stream_), CUDA_SUCCESS);
  end_call();
  EXPECT_EQ(wait(ticket_), EPD_OK) << epd_last_error();
  cuGraphExecDestroy(replay);
  cuGraphDestroy(graph);
  cuda_.set_current(nullptr);
}

// Calls of an epoch that has gone hold no slot.
TEST_F(ClientCalls, AResumeFreesTheSlotsOfTheHost) {
  ASSERT_EQ(dispatch_in(EPD_NO_STREAM, dispatch_args(0)), EPD_OK) << epd_last_error();
  const epd_ticket_t before = ticket_;
  break_and_resume(2);
  epd_resume_info_t info;
  epd_resume_info_init(&info);
  ASSERT_EQ(epd_group_resume(group_, 1000, &info), EPD_OK) << epd_last_error();
  ASSERT_EQ(dispatch_in(EPD_NO_STREAM, dispatch_args(0)), EPD_OK) << epd_last_error();
  EXPECT_EQ(host_call_at(1).epoch, 2u);
  end_host_call(abi::CallEnding::kDiscarded);
  end_host_call();
  EXPECT_EQ(wait(before), EPD_ENGINE_RESTARTED);
  EXPECT_EQ(wait(ticket_), EPD_OK);
}

// ---- nobody comes any more ------------------------------------------------------------------------

// A call that was enqueued in between clears a flag that has been raised.
TEST_F(ClientCalls, FlagsAreRaisedAgainAndAgain) {
  use_memop_waits();
  ASSERT_EQ(dispatch_with(dispatch_args(0)), EPD_OK) << epd_last_error();
  daemon_.hang_up();
  EXPECT_TRUE(cuda_.await_idle(stream_));
  cuda_.poke(address(words().flags[abi::flag_of(abi::Op::kDispatch, 0)]), 0);
  EXPECT_EQ(epd_ticket_wait_on_stream(group_, ticket_, stream_), EPD_OK);
  EXPECT_TRUE(cuda_.await_idle(stream_));
}

// A handle names a record, which nothing has written since this rank joined.
TEST_F(ClientCalls, UnderHandlesOfBeforeANewcomerHasNoTokensAndALateRankNone) {
  FakeSettings settings = cuda_settings();
  settings.resume_index = 5;
  daemon_.set(settings);
  epd_group_config_t config = small_config();
  config.name = "late";
  config.policy = EPD_POLICY_DEGRADE_LATE;
  ASSERT_EQ(epd_group_join(session_, &config, &group_), EPD_OK) << epd_last_error();
  epd_dispatch_args_t args = dispatch_args(0);
  args.handle = 1;  // the routing of slot 0
  EXPECT_EQ(dispatch_with(args), EPD_INVALID_ARGUMENT);
  EXPECT_ERROR_HAS("num_tokens is 3; allowed: 0, as handle 1 is of a dispatch before this rank joined");
  args.num_tokens = 0;
  EXPECT_EQ(dispatch_with(args), EPD_OK) << epd_last_error();
  daemon_.member(1).board().state.store(static_cast<std::uint32_t>(abi::GroupState::kLost));
  ASSERT_EQ(epd_group_restore(group_, 0, nullptr), EPD_OK) << epd_last_error();
  EXPECT_EQ(dispatch_with(args), EPD_NOT_FOUND);
  EXPECT_ERROR_HAS("handle 1 is of before epd_group_restore");
  EXPECT_EQ(dispatch_with(dispatch_args(0)), EPD_OK) << epd_last_error();
  const epd_handle_t after = handle_;
  EXPECT_EQ(dispatch_with(args), EPD_NOT_FOUND) << "the record has a routing again, and another handle";
  args.handle = after;
  EXPECT_EQ(dispatch_with(args), EPD_OK) << epd_last_error();
}

}  // namespace
}  // namespace epd::testing
