// Calls that name memory of the caller's own: what a stream gets for one.
#include "client_calls_fixture.h"

#include <algorithm>
#include <string>

namespace epd::testing {
namespace {

class ClientCallsMemory : public ClientCalls {
 protected:
  void SetUp() override {
    ClientCalls::SetUp();
    if (IsSkipped()) return;
    epd_memory_init(&memory_);
    auto* const word = cuda_.pinned_word();
    *word = 1;
    memory_.rank_offsets = reinterpret_cast<std::int32_t*>(word);
    memory_.topk_weights = reinterpret_cast<const float*>(word);
  }
  // Kinds of what the stream has got since, and the names of kernels; a launch in brackets.
  std::string got(CUstream stream, std::size_t since) {
    static constexpr const char* kNames[] = {"write", "wait", "check", "call", "await", "in", "out"};
    std::string text;
    const auto ops = cuda_.enqueued(stream);
    for (std::size_t i = since; i < ops.size(); ++i) {
      text += std::string(text.empty() ? "" : " ") + kNames[ops[i].kind];
      if (ops[i].kernel != nullptr) text += std::string("@") + ops[i].kernel;
    }
    return text;
  }
  epd_dispatch_args_t with_memory(std::uint32_t slot, bool deferred = false) {
    epd_dispatch_args_t args = dispatch_args(slot);
    args.num_tokens = 0;  // nothing of a word is read
    args.memory = &memory_;
    args.defer_receive = deferred ? 1 : 0;
    return args;
  }

  epd_memory_t memory_{};
};

TEST_F(ClientCallsMemory, AKernelWaitTakesOneLaunch) {
  const std::size_t before = cuda_.launches();
  ASSERT_EQ(dispatch_with(with_memory(1)), EPD_OK) << epd_last_error();
  EXPECT_EQ(cuda_.launches(), before + 1);
  EXPECT_EQ(got(stream_, 0), "in@epd::dispatch call@epd::dispatch await@epd::dispatch out@epd::dispatch");
  EXPECT_EQ(last_call().slot, 1u);
  EXPECT_EQ(cuda_.stuck(stream_), 1u);
}

TEST_F(ClientCallsMemory, ADeferredOneTakesTwo) {
  const std::size_t before = cuda_.launches();
  ASSERT_EQ(dispatch_with(with_memory(1, true)), EPD_OK) << epd_last_error();
  EXPECT_EQ(got(stream_, 0), "in@epd::dispatch call@epd::dispatch");
  EXPECT_EQ(cuda_.stuck(stream_), 0u);
  ASSERT_EQ(epd_ticket_wait_on_stream(group_, ticket_, other_), EPD_OK) << epd_last_error();
  EXPECT_EQ(got(other_, 0), "await@epd::dispatch out@epd::dispatch");
  EXPECT_EQ(cuda_.launches(), before + 2);
  // The outputs are copied once.
  EXPECT_EQ(epd_ticket_wait_on_stream(group_, ticket_, stream_), EPD_INVALID_ARGUMENT);
  EXPECT_ERROR_HAS("whose outputs another stream copies; allowed: once, with defer_receive");
  end_call();
  EXPECT_EQ(cuda_.stuck(other_), 0u);
}

TEST_F(ClientCallsMemory, AMemopWaitIsBetweenTwoKernels) {
  use_memop_waits();
  ASSERT_EQ(dispatch_with(with_memory(1)), EPD_OK) << epd_last_error();
  EXPECT_EQ(got(stream_, 0), "in@epd::dispatch call@epd::dispatch wait out@epd::dispatch");
  EXPECT_EQ(epd_ticket_wait_on_stream(group_, ticket_, other_), EPD_INVALID_ARGUMENT);
  end_call();
  EXPECT_EQ(cuda_.stuck(stream_), 0u);
  ASSERT_EQ(dispatch_with(with_memory(1, true)), EPD_OK) << epd_last_error();
  ASSERT_EQ(epd_ticket_wait_on_stream(group_, ticket_, other_), EPD_OK) << epd_last_error();
  EXPECT_EQ(got(other_, 0), "wait out@epd::dispatch");
  end_call();
}

TEST_F(ClientCallsMemory, WithoutAStreamItIsRefused) {
  EXPECT_EQ(dispatch_in(EPD_NO_STREAM, with_memory(0)), EPD_UNSUPPORTED);
  EXPECT_ERROR_HAS("memory is given with EPD_NO_STREAM on a CUDA device; allowed: memory in a stream");
}

// Whether the regions' counts are those of a handle follows from what was submitted.
TEST_F(ClientCallsMemory, RowsOfACombineAreCountedByTheDispatchOrByTheCaller) {
  epd_dispatch_args_t args = dispatch_args(0);
  args.keep_handle = 1;
  ASSERT_EQ(dispatch_with(args), EPD_OK) << epd_last_error();
  end_call();
  epd_memory_t memory;
  epd_memory_init(&memory);
  memory.y = memory_.rank_offsets;
  epd_combine_args_t combine;
  epd_combine_args_init(&combine);
  combine.slot = 2;
  combine.handle = handle_;
  combine.memory = &memory;
  ASSERT_EQ(epd_combine(group_, &combine, stream_, &ticket_), EPD_OK) << epd_last_error();
  end_call();
  ASSERT_EQ(dispatch_with(dispatch_args(0)), EPD_OK) << epd_last_error();
  end_call();
  EXPECT_EQ(epd_combine(group_, &combine, stream_, &ticket_), EPD_INVALID_ARGUMENT);
  EXPECT_ERROR_HAS(
      "a later dispatch has replaced them, or the group has broken; allowed: memory.rank_offsets");
  args = dispatch_args(3);
  args.handle = combine.handle;
  args.num_tokens = 0;
  ASSERT_EQ(dispatch_with(args), EPD_OK) << epd_last_error();  // which counts it again
  end_call();
  ASSERT_EQ(epd_combine(group_, &combine, stream_, &ticket_), EPD_OK) << epd_last_error();
  end_call();
  break_and_resume(2);
  ASSERT_EQ(epd_group_resume(group_, 1000, nullptr), EPD_OK) << epd_last_error();
  EXPECT_EQ(epd_combine(group_, &combine, stream_, &ticket_), EPD_INVALID_ARGUMENT);
}

TEST_F(ClientCallsMemory, TokensThatADeviceHasCountedAreCountedAgain) {
  std::uint32_t& n = *cuda_.pinned_word();
  n = 2;
  epd_dispatch_args_t args = dispatch_args(0);
  args.num_tokens = 0;
  args.num_tokens_at = &n;
  ASSERT_EQ(dispatch_with(args), EPD_OK) << epd_last_error();
  end_call();
  epd_memory_t memory;
  epd_memory_init(&memory);
  memory.topk_weights = memory_.topk_weights;
  epd_combine_args_t combine;
  epd_combine_args_init(&combine);
  combine.handle = handle_;
  combine.weighted = 1;
  combine.memory = &memory;
  EXPECT_EQ(epd_combine(group_, &combine, stream_, &ticket_), EPD_INVALID_ARGUMENT);
  EXPECT_ERROR_HAS("num_tokens is 0, and libepd does not know the n of handle");
  n = 0;
  combine.num_tokens_at = &n;
  ASSERT_EQ(epd_combine(group_, &combine, stream_, &ticket_), EPD_OK) << epd_last_error();
  end_call();
}

TEST_F(ClientCallsMemory, MoreRowsThanRoomAreToldByTheTicket) {
  memory_.recv_src = memory_.rank_offsets;
  memory_.recv_rows = 4;
  epd_dispatch_args_t args = with_memory(0);
  ASSERT_EQ(dispatch_with(args), EPD_OK) << epd_last_error();
  // The engine counts no rows here, but its result says five.
  end_call();
  epd_result_t result;
  epd_result_init(&result);
  EXPECT_EQ(epd_ticket_wait(group_, ticket_, 20'000, &result), EPD_RESOURCE_EXHAUSTED);
  EXPECT_ERROR_HAS("the dispatch brought 5 rows, and memory.recv_rows is 4");
  EXPECT_EQ(result.num_recv_rows, 5u);
  EXPECT_EQ(result.status, EPD_RESOURCE_EXHAUSTED);
}

}  // namespace
}  // namespace epd::testing
