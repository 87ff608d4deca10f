// The client library with commands: what its streams enqueue.
#include "client_commands_fixture.h"
#include "epd/epd.hpp"

#include <set>
#include <vector>

namespace epd::testing {
namespace {

TEST_F(ClientCommands, ACallSaysAllThatTheOperationIs) {
  for (std::uint32_t i = 0; i < 3; ++i) {
    ASSERT_EQ(dispatch_with(dispatch_args(2)), EPD_OK) << epd_last_error();
    EXPECT_EQ(cuda_.stuck(stream_), 1u);
    const abi::Call call = last_call();
    EXPECT_EQ(call.number, i);
    EXPECT_EQ(call.op, abi::Op::kDispatch);
    EXPECT_EQ(call.slot, 2u);
    EXPECT_EQ(call.route, 2u);
    EXPECT_EQ(call.num_tokens, 3u);
    EXPECT_EQ(call.flags, abi::kFlagWeights);
    EXPECT_EQ(call.sms, 0u);
    EXPECT_EQ(call.timeout_ms, 0u);
    EXPECT_EQ(call.epoch, 1u);
    EXPECT_FALSE(call.flagged);
    end_command();
    EXPECT_EQ(cuda_.stuck(stream_), 0u);
  }
  EXPECT_EQ(words().tail, 3u);
  EXPECT_EQ(words().rung[2], 3u);
  epd_dispatch_args_t args = dispatch_args(1);
  args.omit_weights = 1;
  args.timeout_ms = 77;
  args.sms = 3;
  args.num_tokens = 8;
  ASSERT_EQ(dispatch_with(args), EPD_OK) << epd_last_error();
  EXPECT_EQ(last_call().slot, 1u);
  EXPECT_EQ(last_call().route, 1u);
  EXPECT_EQ(last_call().flags, 0u);
  EXPECT_EQ(last_call().timeout_ms, 77u);
  EXPECT_EQ(last_call().sms, 3u);
  EXPECT_EQ(last_call().num_tokens, 8u);
  end_command();
  args.sms = 1'000'000;  // more than a call has room for, and than there are
  args.defer_receive = 1;
  ASSERT_EQ(dispatch_with(args), EPD_OK) << epd_last_error();
  EXPECT_EQ(last_call().sms, abi::kMostCommandSms);
  EXPECT_EQ(last_call().flags, abi::kFlagDefer);
  end_command();
}

// Which was 64, when the engine had to know of each beforehand.
TEST_F(ClientCommands, OperationsMayDifferWithoutLimit) {
  epd_dispatch_args_t args = dispatch_args(0);
  for (std::uint32_t i = 0; i < 200; ++i) {
    args.timeout_ms = i + 1;
    args.slot = i % 4;
    ASSERT_EQ(dispatch_with(args), EPD_OK) << epd_last_error();
    EXPECT_EQ(last_call().timeout_ms, i + 1);
    end_command();
  }
}

TEST_F(ClientCommands, HandlesNameRecords) {
  epd_combine_args_t args;
  epd_combine_args_init(&args);
  args.handle = 1;
  EXPECT_EQ(epd_combine(group_, &args, stream_, &ticket_), EPD_NOT_FOUND);
  EXPECT_ERROR_HAS("handle 1 is of a slot that has had no dispatch");
  std::set<epd_handle_t> handles;
  for (std::uint32_t slot = 0; slot < 2; ++slot) {
    for (int twice = 0; twice < 2; ++twice) {
      ASSERT_EQ(dispatch_with(dispatch_args(slot)), EPD_OK) << epd_last_error();
      end_command();
      handles.insert(handle_);
    }
  }
  EXPECT_EQ(handles.size(), 2u);
  args.handle = handle_;
  args.slot = 3;
  ASSERT_EQ(epd_combine(group_, &args, stream_, &ticket_), EPD_OK) << epd_last_error();
  end_command();
  EXPECT_EQ(last_call().op, abi::Op::kCombine);
  EXPECT_EQ(last_call().slot, 3u);
  EXPECT_EQ(last_call().route, 1u);
  EXPECT_EQ(last_call().num_tokens, 0u);
  epd_dispatch_args_t cached = dispatch_args(0);
  cached.handle = handle_;
  ASSERT_EQ(dispatch_with(cached), EPD_OK) << epd_last_error();
  EXPECT_EQ(last_call().num_tokens, 0u);
  end_command();
  EXPECT_EQ(last_call().flags, abi::kFlagWeights | abi::kFlagCached);
  EXPECT_EQ(handle_, args.handle);
  args.handle += 1;
  EXPECT_EQ(epd_combine(group_, &args, stream_, &ticket_), EPD_NOT_FOUND);
}

TEST_F(ClientCommands, KeptHandlesTakeRecordsAndGiveThemBack) {
  epd_dispatch_args_t keep = dispatch_args(0);
  keep.keep_handle = 1;
  epd_handle_t kept[2] = {};
  for (std::uint32_t i = 0; i < 2; ++i) {
    ASSERT_EQ(dispatch_with(keep), EPD_OK) << epd_last_error();
    EXPECT_EQ(last_call().route, 4 + i);
    end_command();
    kept[i] = handle_;
  }
  EXPECT_EQ(dispatch_with(keep), EPD_RESOURCE_EXHAUSTED);
  EXPECT_ERROR_HAS("num_handles is 2");
  EXPECT_EQ(epd_handle_release(group_, kept[0]), EPD_OK) << epd_last_error();
  EXPECT_EQ(epd_handle_release(group_, kept[0]), EPD_NOT_FOUND);
  epd_combine_args_t args;
  epd_combine_args_init(&args);
  args.handle = kept[0];
  EXPECT_EQ(epd_combine(group_, &args, stream_, &ticket_), EPD_NOT_FOUND);
  EXPECT_ERROR_HAS("is not kept any more");
  // A launch that fails gives its record back.
  cuda_.fail("epd_command", CUDA_ERROR_LAUNCH_FAILED);
  EXPECT_EQ(dispatch_with(keep), EPD_INTERNAL);
  cuda_.fail("epd_command", CUDA_SUCCESS);
  ASSERT_EQ(dispatch_with(keep), EPD_OK) << epd_last_error();
  end_command();
  EXPECT_EQ(handle_, kept[0]);
  EXPECT_EQ(last_call().route, 4u);
}

TEST_F(ClientCommands, TokensAreCountedWhenTheStreamGetsThere) {
  std::uint32_t& n = *cuda_.pinned_word();
  n = 7;
  epd_dispatch_args_t args = dispatch_args(0);
  args.num_tokens_at = &n;
  expect_refused(args, "num_tokens is 3; allowed: 0 with num_tokens_at");
  args.num_tokens = 0;
  cuda_.hold(stream_, true);
  ASSERT_EQ(dispatch_with(args), EPD_OK) << epd_last_error();
  n = 5;
  cuda_.hold(stream_, false);
  EXPECT_EQ(last_call().num_tokens, 5u);
  end_command();
  args.handle = handle_;
  expect_refused(args, "num_tokens_at is given under a handle");
  args = dispatch_args(0);
  args.num_tokens = 9;
  expect_refused(args, "num_tokens is 9; allowed: 0 .. 8");
}

TEST_F(ClientCommands, OperationsMustBeOnAStream) {
  EXPECT_EQ(dispatch_in(EPD_NO_STREAM, dispatch_args(0)), EPD_INVALID_ARGUMENT);
  EXPECT_ERROR_HAS("stream is EPD_NO_STREAM; allowed: a stream, as the group was joined with");
  EXPECT_EQ(epd_noop(group_, 0, EPD_NO_STREAM, &ticket_), EPD_INVALID_ARGUMENT);
  EXPECT_ERROR_HAS("stream is EPD_NO_STREAM; allowed: a stream");
  EXPECT_EQ(words().tail, 0u);
  EXPECT_EQ(epd_noop(group_, 0, stream_, &ticket_), EPD_OK);
  EXPECT_EQ(last_call().op, abi::Op::kNoop);
  EXPECT_EQ(last_call().flags, 0u);
  end_command();
}

TEST_F(ClientCommands, TicketsAreForStreams) {
  epd_dispatch_args_t args = dispatch_args(1);
  args.defer_receive = 1;
  ASSERT_EQ(dispatch_with(args), EPD_OK) << epd_last_error();
  EXPECT_EQ(cuda_.stuck(stream_), 0u) << "nobody told it to wait";
  for (int twice = 0; twice < 2; ++twice)
    EXPECT_EQ(epd_ticket_wait_on_stream(group_, ticket_, other_), EPD_OK) << epd_last_error();
  EXPECT_STREQ(cuda_.enqueued(other_).back().kernel, "epd_await_command");
  EXPECT_EQ(cuda_.stuck(other_), 2u);
  EXPECT_EQ(epd_ticket_wait_on_stream(group_, ticket_, EPD_NO_STREAM), EPD_INVALID_ARGUMENT);
  EXPECT_ERROR_HAS("stream is EPD_NO_STREAM; allowed: a stream");
  end_command();
  EXPECT_EQ(cuda_.stuck(other_), 0u);

  epd_counts_t counts;
  epd_counts_init(&counts);
  const auto nothing = [](const epd_result_t*, void*) {};
  for (const epd_status_t status :
       {epd_ticket_wait(group_, ticket_, EPD_NO_WAIT, nullptr), epd_ticket_poll(group_, ticket_, nullptr),
        epd_ticket_wait_sent(group_, ticket_, EPD_NO_WAIT),
        epd_ticket_counts(group_, ticket_, EPD_NO_WAIT, &counts),
        epd_ticket_on_complete(group_, ticket_, nothing, nullptr)}) {
    EXPECT_EQ(status, EPD_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS("is of a command, which has no result for the CPU");
  }
  EXPECT_EQ(epd_ticket_pending(group_, ticket_), 0);
  EXPECT_EQ(epd_ticket_wait_on_stream(group_, ticket_ + 2, other_), EPD_OK) << "of another slot";
  EXPECT_EQ(epd_ticket_wait_on_stream(group_, ticket_ + 100, other_), EPD_NOT_FOUND);
}

TEST_F(ClientCommands, MemopWaitsAreForTheFlagOfSlotAndKind) {
  use_memop_waits();
  epd_dispatch_args_t args = dispatch_args(0);
  for (int twice = 0; twice < 2; ++twice) {
    ASSERT_EQ(dispatch_with(args), EPD_OK) << epd_last_error();
    expect(cuda_.enqueued(stream_).back(), StreamOp::kWait,
           address(words().flags[abi::flag_of(abi::Op::kDispatch, 0)]), 1);
    EXPECT_EQ(cuda_.enqueued(stream_).back().kernel, nullptr);
    EXPECT_TRUE(last_call().flagged);
    EXPECT_EQ(cuda_.stuck(stream_), 1u) << "the flag of the last one has been cleared";
    end_command();
    EXPECT_EQ(cuda_.stuck(stream_), 0u);
  }
  args.defer_receive = 1;
  ASSERT_EQ(dispatch_with(args), EPD_OK) << epd_last_error();
  EXPECT_EQ(cuda_.stuck(stream_), 0u);
  for (int twice = 0; twice < 2; ++twice)
    EXPECT_EQ(epd_ticket_wait_on_stream(group_, ticket_, other_), EPD_OK) << epd_last_error();
  EXPECT_EQ(cuda_.enqueued(other_).back().kernel, nullptr);
  EXPECT_EQ(cuda_.stuck(other_), 2u);
  end_command();
  EXPECT_EQ(cuda_.stuck(other_), 0u);
}

// What a graph would refuse: anything but kernels and memory operations in the stream, or a question to it.
TEST_F(ClientCommands, AStreamThatCapturesMayBeUsed) {
  for (const epd_wait_by_t by : {EPD_WAIT_BY_KERNEL, EPD_WAIT_BY_MEMOP}) {
    if (by == EPD_WAIT_BY_MEMOP) use_memop_waits();
    std::vector<StreamOp::Kind> kinds;
    cuda_.on_enqueue([&](CUstream stream, const StreamOp& op) {
      if (stream == stream_) kinds.push_back(op.kind);
    });
    cuda_.hold(stream_, true);
    const int synchronized = cuda_.synchronized();
    ASSERT_EQ(dispatch_with(dispatch_args(0)), EPD_OK) << epd_last_error();
    const StreamOp::Kind waits = by == EPD_WAIT_BY_KERNEL ? StreamOp::kAwait : StreamOp::kWait;
    EXPECT_EQ(kinds, (std::vector{StreamOp::kRing, waits}));
    EXPECT_EQ(cuda_.synchronized(), synchronized);
    EXPECT_EQ(words().tail, 0u) << "it is the stream that rings";
    cuda_.on_enqueue(nullptr);
    cuda_.hold(stream_, false);
    end_command();
    EXPECT_EQ(cuda_.stuck(stream_), 0u);
  }
}

// Whatever comes first may take all of its time, and there may be one on each slot.
TEST_F(ClientCommands, AKernelGivesUpAfterAllDeadlines) {
  epd_dispatch_args_t args = dispatch_args(0);
  args.timeout_ms = 100'000;
  ASSERT_EQ(dispatch_with(args), EPD_OK) << epd_last_error();
  EXPECT_EQ(cuda_.enqueued(stream_).back().limit_ns, (4 * 100'000ull + 5'000) * 1'000'000);
  cuda_.pass_limits();
  EXPECT_EQ(cuda_.stuck(stream_), 0u);
  end_command();
}

// ---- joining --------------------------------------------------------------------------------------

TEST_F(ClientCommands, JoinSaysWhatIsWrong) {
  epd_group_t* other = nullptr;
  epd_group_config_t config = small_config();
  config.commands = static_cast<epd_commands_t>(2);
  EXPECT_EQ(epd_group_join(session_, &config, &other), EPD_INVALID_ARGUMENT);
  EXPECT_ERROR_HAS("commands is 2; allowed: 0 (EPD_COMMANDS_BY_HOST) or 1 (EPD_COMMANDS_BY_STREAM)");
  cuda_.fail("cuMemcpyDtoHAsync", CUDA_ERROR_LAUNCH_FAILED);
  const std::size_t left = daemon_.left();
  EXPECT_EQ(join_with_commands(&other), EPD_INTERNAL);
  EXPECT_ERROR_HAS("cuMemcpyDtoHAsync: CUDA_ERROR_LAUNCH_FAILED");
  EXPECT_EQ(daemon_.left(), left + 1);
  cuda_.fail("cuMemcpyDtoHAsync", CUDA_SUCCESS);
}

TEST_F(ClientCommands, WithoutKernelsThereAreNone) {
  detach();
  cuda_.fail("cuLibraryLoadData", CUDA_ERROR_NO_BINARY_FOR_GPU);
  ASSERT_EQ(attach_to(daemon_, &session_), EPD_OK) << epd_last_error();
  EXPECT_EQ(join_with_commands(&group_), EPD_UNSUPPORTED);
  EXPECT_ERROR_HAS("commands is 1 (EPD_COMMANDS_BY_STREAM), which needs libepd's kernels");
  cuda_.fail("cuLibraryLoadData", CUDA_SUCCESS);
}

TEST_F(ClientCommands, TheWrapperHasThemToo) {
  AttachOptions where;
  where.socket_path = daemon_.socket_path();
  where.wait_by = EPD_WAIT_BY_KERNEL;
  detach();
  Session session(where);
  Config config;
  config.name = "g";
  config.num_ranks = 2;
  config.num_experts = 4;
  config.max_tokens = 8;
  config.hidden = 128;
  config.topk = 2;
  config.commands = EPD_COMMANDS_BY_STREAM;
  Group group = session.join(config);
  base_ = reinterpret_cast<std::uintptr_t>(group.buffers(0).x.data());
  member_ = &daemon_.member(0);
  std::uint32_t& n = *cuda_.pinned_word();
  n = 6;
  DispatchOptions options;
  options.num_tokens_at = &n;
  {
    const Dispatch dispatched = group.dispatch(0, 0, stream_, options);
    EXPECT_EQ(last_call().num_tokens, 6u);
    end_command();
    dispatched.ticket.wait_on_stream(other_);
  }
  EXPECT_EQ(cuda_.stuck(other_), 0u);
  EXPECT_EQ(group.check().ended, 1u);
}

}  // namespace
}  // namespace epd::testing
