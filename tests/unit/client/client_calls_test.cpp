// The client library where operations are calls: what its streams and its host enqueue, and what it is told.
#include "client_calls_fixture.h"
#include "stream_words.h"

#include <atomic>
#include <chrono>
#include <set>
#include <thread>
#include <vector>

namespace epd::testing {
namespace {

TEST_F(ClientCalls, ACallSaysAllThatTheOperationIs) {
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
    end_call();
    EXPECT_EQ(cuda_.stuck(stream_), 0u);
  }
  EXPECT_EQ(words().tail, 3u);
  EXPECT_EQ(words().enqueued[2], 3u);
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
  end_call();
  args.sms = 1'000'000;  // more than a call can state, and than there are
  args.defer_receive = 1;
  ASSERT_EQ(dispatch_with(args), EPD_OK) << epd_last_error();
  EXPECT_EQ(last_call().sms, abi::kMaxCallSms);
  EXPECT_EQ(last_call().flags, abi::kFlagDefer);
  end_call();
}

TEST_F(ClientCalls, HandlesNameRecords) {
  epd_combine_args_t args;
  epd_combine_args_init(&args);
  args.handle = 1;
  EXPECT_EQ(epd_combine(group_, &args, stream_, &ticket_), EPD_NOT_FOUND);
  EXPECT_ERROR_HAS("handle 1 is of a slot that has had no dispatch");
  std::set<epd_handle_t> handles;
  for (std::uint32_t slot = 0; slot < 2; ++slot) {
    for (int twice = 0; twice < 2; ++twice) {
      ASSERT_EQ(dispatch_with(dispatch_args(slot)), EPD_OK) << epd_last_error();
      end_call();
      handles.insert(handle_);
    }
  }
  EXPECT_EQ(handles.size(), 2u);
  args.handle = handle_;
  args.slot = 3;
  ASSERT_EQ(epd_combine(group_, &args, stream_, &ticket_), EPD_OK) << epd_last_error();
  end_call();
  EXPECT_EQ(last_call().op, abi::Op::kCombine);
  EXPECT_EQ(last_call().slot, 3u);
  EXPECT_EQ(last_call().route, 1u);
  EXPECT_EQ(last_call().num_tokens, 0u);
  epd_dispatch_args_t cached = dispatch_args(0);
  cached.handle = handle_;
  ASSERT_EQ(dispatch_with(cached), EPD_OK) << epd_last_error();
  EXPECT_EQ(last_call().num_tokens, 0u);
  end_call();
  EXPECT_EQ(last_call().flags, abi::kFlagWeights | abi::kFlagCached);
  EXPECT_EQ(handle_, args.handle);
  args.handle += 1;
  EXPECT_EQ(epd_combine(group_, &args, stream_, &ticket_), EPD_NOT_FOUND);
}

TEST_F(ClientCalls, KeptHandlesTakeRecordsAndGiveThemBack) {
  epd_dispatch_args_t keep = dispatch_args(0);
  keep.keep_handle = 1;
  epd_handle_t kept[2] = {};
  for (std::uint32_t i = 0; i < 2; ++i) {
    ASSERT_EQ(dispatch_with(keep), EPD_OK) << epd_last_error();
    EXPECT_EQ(last_call().route, 4 + i);
    end_call();
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
  cuda_.fail("epd::dispatch", CUDA_ERROR_LAUNCH_FAILED);
  EXPECT_EQ(dispatch_with(keep), EPD_INTERNAL);
  cuda_.fail("epd::dispatch", CUDA_SUCCESS);
  ASSERT_EQ(dispatch_with(keep), EPD_OK) << epd_last_error();
  end_call();
  EXPECT_EQ(handle_, kept[0]);
  EXPECT_EQ(last_call().route, 4u);
}

// If a handle could be given back while a call uses its record, the record would be overwritten under the
// call.
TEST_F(ClientCalls, AHandleThatACallUsesIsNotGivenBack) {
  epd_dispatch_args_t keep = dispatch_args(0);
  keep.keep_handle = 1;
  for (void* const stream : {static_cast<void*>(stream_), EPD_NO_STREAM}) {
    SCOPED_TRACE(stream == EPD_NO_STREAM ? "by the host" : "in a stream");
    const auto end = [&] { stream == EPD_NO_STREAM ? end_host_call() : end_call(); };
    ASSERT_EQ(dispatch_in(stream, keep), EPD_OK) << epd_last_error();
    EXPECT_EQ(epd_handle_release(group_, handle_), EPD_WOULD_BLOCK);
    EXPECT_ERROR_HAS("an operation in flight uses handle");
    end();
    epd_combine_args_t args;
    epd_combine_args_init(&args);
    args.handle = handle_;
    ASSERT_EQ(epd_combine(group_, &args, stream, &ticket_), EPD_OK) << epd_last_error();
    ASSERT_EQ(epd_ticket_drop(group_, ticket_), EPD_OK) << epd_last_error();
    EXPECT_EQ(epd_handle_release(group_, handle_), EPD_WOULD_BLOCK) << "nobody asks, but it runs";
    end();
    EXPECT_EQ(epd_handle_release(group_, handle_), EPD_OK) << epd_last_error();
    EXPECT_EQ(epd_handle_release(group_, handle_), EPD_NOT_FOUND);
  }
  // However many calls come after it: its place is not given to another before it has ended.
  keep.slot = 1;
  ASSERT_EQ(dispatch_in(other_, keep), EPD_OK) << epd_last_error();
  const abi::Call kept = last_call();
  const epd_handle_t handle = handle_;
  for (std::uint32_t i = 0; i < abi::kOnceResults + 10; ++i) {
    ASSERT_EQ(dispatch_in(EPD_NO_STREAM, dispatch_args(0)), EPD_OK) << epd_last_error();
    end_host_call();
  }
  EXPECT_EQ(epd_handle_release(group_, handle), EPD_WOULD_BLOCK);
  tell_result(kept);
  EXPECT_EQ(epd_handle_release(group_, handle), EPD_OK) << epd_last_error();
  cuda_.poke(address(words().done), words().tail);
  // A resume ends all of before.
  ASSERT_EQ(dispatch_in(stream_, keep), EPD_OK) << epd_last_error();
  cuda_.poke(address(words().done), words().tail);
  break_and_resume(2);
  EXPECT_EQ(epd_handle_release(group_, handle_), EPD_WOULD_BLOCK);
  ASSERT_EQ(epd_group_resume(group_, 1000, nullptr), EPD_OK) << epd_last_error();
  EXPECT_EQ(epd_handle_release(group_, handle_), EPD_OK) << epd_last_error();
}

TEST_F(ClientCalls, TokensAreCountedWhenTheStreamGetsThere) {
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
  end_call();
  args.handle = handle_;
  expect_refused(args, "num_tokens_at is given under a handle");
  args = dispatch_args(0);
  args.num_tokens = 9;
  expect_refused(args, "num_tokens is 9; allowed: 0 .. 8");
}

// ---- calls of the host ----------------------------------------------------------------------------

TEST_F(ClientCalls, WithoutAStreamTheHostCalls) {
  for (std::uint32_t i = 0; i < 200; ++i) {
    epd_dispatch_args_t args = dispatch_args(i % 4);
    args.timeout_ms = i + 1;
    ASSERT_EQ(dispatch_in(EPD_NO_STREAM, args), EPD_OK) << epd_last_error();
    const abi::Call call = host_call_at(i);
    EXPECT_EQ(call.op, abi::Op::kDispatch);
    EXPECT_EQ(call.slot, i % 4);
    EXPECT_EQ(call.num_tokens, 3u);
    EXPECT_EQ(call.timeout_ms, i + 1);
    EXPECT_EQ(call.epoch, 1u);
    EXPECT_FALSE(call.flagged);
    EXPECT_EQ(epd_ticket_poll(group_, ticket_, nullptr), EPD_WOULD_BLOCK);
    EXPECT_EQ(epd_ticket_pending(group_, ticket_), 1);
    end_host_call();
    EXPECT_EQ(epd_ticket_pending(group_, ticket_), 0);
    EXPECT_EQ(wait(ticket_), EPD_OK) << epd_last_error();
    EXPECT_EQ(wait(ticket_), EPD_NOT_FOUND) << "retired";
    EXPECT_EQ(epd_ticket_poll(group_, 0, nullptr), EPD_NOT_FOUND) << "none has this number";
    EXPECT_EQ(epd_ticket_pending(group_, 0), 0);
  }
  EXPECT_EQ(words().tail, 0u);
}

// The ring's 65th call lay where the first one was, and the engine ended the session.
TEST_F(ClientCalls, DeferringCallsThatNoStreamWaitsForOverranTheRing) {
  epd_dispatch_args_t args = dispatch_args(1);
  args.defer_receive = 1;
  for (std::uint32_t i = 0; i < abi::kCallSlots; ++i)
    ASSERT_EQ(dispatch_with(args), EPD_OK) << epd_last_error();
  EXPECT_EQ(dispatch_with(args), EPD_WOULD_BLOCK);
  EXPECT_ERROR_HAS("slot 1: the rank has 64 operations with defer_receive that have not ended");
  EXPECT_ERROR_HAS("allowed: 63 before another one in a stream");
  EXPECT_EQ(epd_noop(group_, 2, other_, &ticket_), EPD_WOULD_BLOCK) << "the ring is that of all streams";
  EXPECT_EQ(words().tail, abi::kCallSlots);
  end_call();
  EXPECT_EQ(dispatch_with(args), EPD_OK) << "room for one: " << epd_last_error();
  EXPECT_EQ(dispatch_with(args), EPD_WOULD_BLOCK);
  ASSERT_EQ(epd_ticket_wait_on_stream(group_, ticket_, stream_), EPD_OK) << epd_last_error();
  for (std::uint32_t i = 0; i < 2 * abi::kCallSlots; ++i)
    ASSERT_EQ(epd_noop(group_, 1, stream_, &ticket_), EPD_OK) << "the stream waits: " << epd_last_error();
  EXPECT_EQ(words().tail, abi::kCallSlots + 1);
}

TEST_F(ClientCalls, ACallOfTheHostThatCantBeMadeLeavesNothing) {
  cuda_.fail("cuMemcpyHtoDAsync", CUDA_ERROR_LAUNCH_FAILED);
  epd_dispatch_args_t keep = dispatch_args(0);
  keep.keep_handle = 1;
  for (int i = 0; i < 3; ++i) EXPECT_EQ(dispatch_in(EPD_NO_STREAM, keep), EPD_INTERNAL);
  cuda_.fail("cuMemcpyHtoDAsync", CUDA_SUCCESS);
  ASSERT_EQ(dispatch_in(EPD_NO_STREAM, keep), EPD_OK) << epd_last_error();
  EXPECT_EQ(host_call_at(0).route, 4u);
  std::uint32_t n = 1;
  epd_dispatch_args_t args = dispatch_args(1);
  args.num_tokens = 0;
  args.num_tokens_at = &n;
  EXPECT_EQ(dispatch_in(EPD_NO_STREAM, args), EPD_INVALID_ARGUMENT);
  EXPECT_ERROR_HAS("num_tokens_at is given with EPD_NO_STREAM");
}

// ---- the bell -------------------------------------------------------------------------------------

// A reader that waits for the bell looks into the rings once.
TEST(StreamWords, TheBellIsSetWhenTheCallIsWhole) {
  struct AtTheBell : ordered::Player {
    explicit AtTheBell(const abi::CallWords& at) : words(at) { ordered::player = this; }
    ~AtTheBell() override { ordered::player = nullptr; }
    void begin(const void* at, std::size_t) override {
      EXPECT_EQ(words.bell[0], 0u) << "it is set last";
      if (at != &words.bell[0]) return;
      ++looks;
      for (const std::uint64_t word : words.calls[0].words) EXPECT_EQ(word >> 32, 1u);
      EXPECT_EQ(words.places[0].in, 1u);
      EXPECT_EQ(words.places[0].out, 2u);
    }
    void end() override {}
    void look_again(std::uint32_t) override {}
    std::uint64_t nanoseconds() override { return 0; }
    const abi::CallWords& words;
    int looks = 0;
  };
  abi::CallWords words{};
  AtTheBell player(words);
  abi::Call call;
  call.op = abi::Op::kDispatch;
  call.flagged = true;
  call.flags = abi::kFlagPlaces;
  stream_kernels::Step step;
  step.words = &words;
  step.call = abi::halves_of(call);
  step.places = {1, 2};
  EXPECT_EQ(stream_kernels::enqueue(step), 0u);
  EXPECT_EQ(player.looks, 1);
  EXPECT_EQ(words.bell[0], 1u);
  EXPECT_EQ(words.bell[1], 0u) << "it is the host's";
  // Nobody takes a call from a closed ring.
  words.bell[0] = 0;
  words.closed = 1;
  EXPECT_EQ(stream_kernels::enqueue(step), 1u);
  EXPECT_EQ(player.looks, 1);
  EXPECT_EQ(words.flags[abi::flag_of(call.op, call.slot)], 1u);
}

TEST_F(ClientCalls, TheHostSetsItsHalfOfTheBellBehindItsCall) {
  int writes = 0;
  cuda_.on_enqueue([&](CUstream, const StreamOp& op) {
    if (op.kind != StreamOp::kWrite || op.address != address(words().bell[1])) return;
    EXPECT_EQ(op.value, 1u);
    EXPECT_EQ(host_call_at(static_cast<std::uint32_t>(writes)).slot, 2u) << "the call is not there";
    ++writes;
  });
  const std::size_t launches = cuda_.launches();
  for (int i = 1; i <= 3; ++i) {
    ASSERT_EQ(dispatch_in(EPD_NO_STREAM, dispatch_args(2)), EPD_OK) << epd_last_error();
    EXPECT_EQ(writes, i);
    EXPECT_EQ(words().bell[0], 0u) << "it is the streams'";
    EXPECT_EQ(words().bell[1], 1u);
    end_host_call();
  }
  EXPECT_EQ(cuda_.launches(), launches) << "it needs no SM";
}

// The call is in the ring by then, and may be carried out.
TEST_F(ClientCalls, ACallOfTheHostWithoutABellIsSubmitted) {
  cuda_.fail("cuStreamWriteValue32", CUDA_ERROR_LAUNCH_FAILED);
  EXPECT_EQ(dispatch_in(EPD_NO_STREAM, dispatch_args(0)), EPD_INTERNAL);
  EXPECT_ERROR_HAS("was submitted and is valid, but the device may not begin it");
  cuda_.fail("cuStreamWriteValue32", CUDA_SUCCESS);
  end_host_call();
  EXPECT_EQ(wait(ticket_), EPD_OK) << epd_last_error();
  ASSERT_EQ(dispatch_in(EPD_NO_STREAM, dispatch_args(0)), EPD_OK) << epd_last_error();
  EXPECT_EQ(host_call_at(1).number, 1u);
}

// ---- results --------------------------------------------------------------------------------------

TEST_F(ClientCalls, ResultsAreWhatTheKernelTells) {
  for (const bool by_host : {true, false}) {
    ASSERT_EQ(dispatch_in(by_host ? EPD_NO_STREAM : stream_, dispatch_args(1)), EPD_OK) << epd_last_error();
    by_host ? end_host_call() : end_call();
    epd_result_t result;
    epd_result_init(&result);
    ASSERT_EQ(epd_ticket_wait(group_, ticket_, 20'000, &result), EPD_OK) << epd_last_error();
    EXPECT_EQ(result.status, EPD_OK);
    EXPECT_EQ(result.failed_rank, -1);
    EXPECT_EQ(result.op_index, 9u);
    EXPECT_EQ(result.num_recv_rows, 5u);
    EXPECT_EQ(result.num_dropped_selections, 2u);
    EXPECT_EQ(result.done_us, 70u);
    EXPECT_EQ(result.runs, 1u);
  }
}

TEST_F(ClientCalls, ResultsOfTheLastThousandAreKept) {
  std::vector<epd_ticket_t> tickets;
  for (std::uint32_t i = 0; i < abi::kOnceResults + 10; ++i) {
    ASSERT_EQ(dispatch_with(dispatch_args(0)), EPD_OK) << epd_last_error();
    tickets.push_back(ticket_);
    end_call();
  }
  EXPECT_EQ(wait(tickets[9]), EPD_NOT_FOUND);
  EXPECT_ERROR_HAS("more than 1024");
  EXPECT_EQ(wait(tickets[10]), EPD_OK) << epd_last_error();
  EXPECT_EQ(wait(tickets.back()), EPD_OK) << epd_last_error();
}

// A result of an older call in its place is not taken for its own, nor one that is half written.
TEST_F(ClientCalls, AResultIsOfItsCallAndWhole) {
  ASSERT_EQ(dispatch_in(EPD_NO_STREAM, dispatch_args(0)), EPD_OK) << epd_last_error();
  abi::Call other = host_call_at(0);
  other.result = abi::result_of(abi::place_of(other.result), 31);
  tell_result(other);
  EXPECT_EQ(epd_ticket_poll(group_, ticket_, nullptr), EPD_WOULD_BLOCK);
  tell_result(host_call_at(0));
  abi::CallResult& place = member_->results().places[abi::place_of(host_call_at(0).result)];
  const std::uint64_t whole = place.words[3];
  place.words[3] -= std::uint64_t{1} << 32;
  EXPECT_EQ(epd_ticket_poll(group_, ticket_, nullptr), EPD_WOULD_BLOCK);
  place.words[3] = whole;
  EXPECT_EQ(epd_ticket_poll(group_, ticket_, nullptr), EPD_OK) << epd_last_error();
}

TEST_F(ClientCalls, CountsComeBeforeTheEnd) {
  ASSERT_EQ(dispatch_in(EPD_NO_STREAM, dispatch_args(2)), EPD_OK) << epd_last_error();
  epd_counts_t counts;
  epd_counts_init(&counts);
  EXPECT_EQ(epd_ticket_counts(group_, ticket_, EPD_NO_WAIT, &counts), EPD_WOULD_BLOCK);
  const abi::GroupShape& shape = member_->shape;
  const abi::ResultsLayout layout(shape);
  const abi::PlacementParts at(shape);
  auto* const words = member_->results_mapping.as<std::uint64_t>(layout.counts + layout.counts_stride * 2);
  const std::uint64_t mark = std::uint64_t{host_call_at(0).result + 1} << 32;
  for (std::uint64_t i = 0; i < at.words; ++i) words[i] = mark | (100 + i);
  ASSERT_EQ(epd_ticket_counts(group_, ticket_, EPD_NO_WAIT, &counts), EPD_OK) << epd_last_error();
  for (std::uint32_t r = 0; r <= shape.num_ranks; ++r)
    EXPECT_EQ(counts.rank_offsets[r], static_cast<std::int32_t>(100 + at.rank_offsets + r));
  EXPECT_EQ(counts.expert_counts[0], static_cast<std::int32_t>(100 + at.expert_counts));
  EXPECT_EQ(counts.num_recv_rows, 100 + at.rank_offsets + shape.num_ranks);
  EXPECT_EQ(counts.expert_offsets, nullptr);
  words[3] += std::uint64_t{1} << 32;  // of another dispatch
  EXPECT_EQ(epd_ticket_counts(group_, ticket_, EPD_NO_WAIT, &counts), EPD_WOULD_BLOCK);
  end_host_call();
  EXPECT_EQ(epd_ticket_counts(group_, ticket_, EPD_NO_WAIT, &counts), EPD_NOT_FOUND);
  EXPECT_ERROR_HAS("were replaced by a later operation on slot 2");
  EXPECT_EQ(wait(ticket_), EPD_OK);
}

TEST_F(ClientCalls, InputsAreFreeWhenTheyHaveBeenSent) {
  epd_dispatch_args_t args = dispatch_args(1);
  ASSERT_EQ(dispatch_in(EPD_NO_STREAM, args), EPD_OK) << epd_last_error();
  EXPECT_EQ(epd_ticket_wait_sent(group_, ticket_, EPD_NO_WAIT), EPD_INVALID_ARGUMENT);
  end_host_call();
  args.defer_receive = 1;
  ASSERT_EQ(dispatch_in(EPD_NO_STREAM, args), EPD_OK) << epd_last_error();
  EXPECT_EQ(epd_ticket_wait_sent(group_, ticket_, EPD_NO_WAIT), EPD_WOULD_BLOCK);
  std::atomic_ref(member_->results().sent[1]).store(host_call_at(1).result + 1);
  EXPECT_EQ(epd_ticket_wait_sent(group_, ticket_, 20'000), EPD_OK) << epd_last_error();
  EXPECT_EQ(epd_ticket_poll(group_, ticket_, nullptr), EPD_WOULD_BLOCK);
  end_host_call();
  EXPECT_EQ(wait(ticket_), EPD_OK);
}

TEST_F(ClientCalls, HooksAreCalledAtTheEnd) {
  struct Seen {
    std::atomic<int> calls{0};
    epd_result_t result{};
  } seen;
  const auto hook = [](const epd_result_t* result, void* user) {
    auto* const its = static_cast<Seen*>(user);
    its->result = *result;
    ++its->calls;
  };
  for (int i = 1; i <= 3; ++i) {
    ASSERT_EQ(dispatch_in(i == 2 ? stream_ : EPD_NO_STREAM, dispatch_args(0)), EPD_OK) << epd_last_error();
    ASSERT_EQ(epd_ticket_on_complete(group_, ticket_, hook, &seen), EPD_OK) << epd_last_error();
    EXPECT_EQ(wait(ticket_), EPD_NOT_FOUND) << "it has a hook";
    i == 2 ? end_call() : end_host_call();
    for (int looks = 0; looks < 10'000 && seen.calls != i; ++looks)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    EXPECT_EQ(seen.calls, i);
    EXPECT_EQ(seen.result.num_recv_rows, 5u);
  }
  // A call of a group that is left ends too.
  ASSERT_EQ(dispatch_in(EPD_NO_STREAM, dispatch_args(0)), EPD_OK) << epd_last_error();
  ASSERT_EQ(epd_ticket_on_complete(group_, ticket_, hook, &seen), EPD_OK) << epd_last_error();
  epd_group_leave(group_);
  group_ = nullptr;
  EXPECT_EQ(seen.calls, 4);
  EXPECT_EQ(seen.result.status, EPD_ABORTED);
}

TEST_F(ClientCalls, ADroppedTicketIsForgotten) {
  ASSERT_EQ(dispatch_in(EPD_NO_STREAM, dispatch_args(0)), EPD_OK) << epd_last_error();
  EXPECT_EQ(epd_ticket_drop(group_, ticket_), EPD_OK) << epd_last_error();
  EXPECT_EQ(epd_ticket_drop(group_, ticket_), EPD_NOT_FOUND);
  EXPECT_EQ(wait(ticket_), EPD_NOT_FOUND);
  EXPECT_EQ(dispatch_in(EPD_NO_STREAM, dispatch_args(0)), EPD_WOULD_BLOCK) << "it goes on";
  end_host_call();
  EXPECT_EQ(dispatch_in(EPD_NO_STREAM, dispatch_args(0)), EPD_OK) << epd_last_error();
}

TEST_F(ClientCalls, TicketsAreForStreams) {
  epd_dispatch_args_t args = dispatch_args(1);
  args.defer_receive = 1;
  ASSERT_EQ(dispatch_with(args), EPD_OK) << epd_last_error();
  EXPECT_EQ(cuda_.stuck(stream_), 0u) << "nobody told it to wait";
  for (int twice = 0; twice < 2; ++twice)
    EXPECT_EQ(epd_ticket_wait_on_stream(group_, ticket_, other_), EPD_OK) << epd_last_error();
  EXPECT_STREQ(cuda_.enqueued(other_).back().kernel, "epd::dispatch");
  EXPECT_EQ(cuda_.stuck(other_), 2u);
  EXPECT_EQ(epd_ticket_wait_on_stream(group_, ticket_, EPD_NO_STREAM), EPD_INVALID_ARGUMENT);
  EXPECT_ERROR_HAS("stream is EPD_NO_STREAM; allowed: a stream");
  end_call();
  EXPECT_EQ(cuda_.stuck(other_), 0u);

  EXPECT_EQ(epd_ticket_wait_on_stream(group_, std::uint64_t{1} << 63, other_), EPD_NOT_FOUND);
  EXPECT_EQ(epd_noop(group_, 0, EPD_NO_STREAM, &ticket_), EPD_OK);
  EXPECT_EQ(epd_ticket_wait_on_stream(group_, ticket_, other_), EPD_INVALID_ARGUMENT);
  EXPECT_ERROR_HAS("is of an operation with EPD_NO_STREAM");
}

// It would wait for what never comes, until the group is left.
TEST_F(ClientCalls, StreamsWaitForTicketsOfTheirGroupOnly) {
  for (const epd_wait_by_t by : {EPD_WAIT_BY_KERNEL, EPD_WAIT_BY_MEMOP}) {
    SCOPED_TRACE(by);
    if (by == EPD_WAIT_BY_MEMOP) use_memop_waits();
    epd_dispatch_args_t args = dispatch_args(1);
    args.defer_receive = 1;
    ASSERT_EQ(dispatch_with(args), EPD_OK) << epd_last_error();
    epd_group_t* second = nullptr;
    const epd_group_config_t config = small_config();
    ASSERT_EQ(epd_group_join(session_, &config, &second), EPD_OK) << epd_last_error();
    epd_ticket_t foreign = 0;
    ASSERT_EQ(epd_dispatch(second, &args, stream_, &foreign, nullptr), EPD_OK) << epd_last_error();
    EXPECT_NE(foreign, ticket_);
    const std::size_t before = cuda_.enqueued_anywhere();
    EXPECT_EQ(epd_ticket_wait_on_stream(group_, foreign, other_), EPD_NOT_FOUND);
    EXPECT_ERROR_HAS("is of another group");
    for (const epd_ticket_t wrong :
         {ticket_ + 5, ticket_ ^ std::uint64_t{1} << 53, ticket_ ^ std::uint64_t{2} << 49,
          ticket_ ^ std::uint64_t{1} << 28, std::uint64_t{17}, epd_ticket_t{0}}) {
      EXPECT_EQ(epd_ticket_wait_on_stream(group_, wrong, other_), EPD_NOT_FOUND) << wrong;
      EXPECT_ERROR_HAS("never issued");
    }
    end_call();
    EXPECT_EQ(wait(ticket_), EPD_OK) << epd_last_error();
    EXPECT_EQ(epd_ticket_wait_on_stream(group_, ticket_, other_), EPD_NOT_FOUND) << "retired";
    EXPECT_EQ(cuda_.enqueued_anywhere(), before);
    EXPECT_EQ(cuda_.stuck(other_), 0u);
  }
}

TEST_F(ClientCalls, MemopWaitsAreForTheFlagOfSlotAndKind) {
  use_memop_waits();
  epd_dispatch_args_t args = dispatch_args(0);
  for (int twice = 0; twice < 2; ++twice) {
    ASSERT_EQ(dispatch_with(args), EPD_OK) << epd_last_error();
    const StreamOp waits = cuda_.enqueued(stream_).back();
    EXPECT_EQ(waits.kind, StreamOp::kWait);
    EXPECT_EQ(waits.address, address(words().flags[abi::flag_of(abi::Op::kDispatch, 0)]));
    EXPECT_EQ(waits.value, 1u);
    EXPECT_EQ(waits.kernel, nullptr);
    EXPECT_TRUE(last_call().flagged);
    EXPECT_EQ(cuda_.stuck(stream_), 1u) << "the flag of the last one has been cleared";
    end_call();
    EXPECT_EQ(cuda_.stuck(stream_), 0u);
  }
  args.defer_receive = 1;
  ASSERT_EQ(dispatch_with(args), EPD_OK) << epd_last_error();
  EXPECT_EQ(cuda_.stuck(stream_), 0u);
  for (int twice = 0; twice < 2; ++twice)
    EXPECT_EQ(epd_ticket_wait_on_stream(group_, ticket_, other_), EPD_OK) << epd_last_error();
  EXPECT_EQ(cuda_.enqueued(other_).back().kernel, nullptr);
  EXPECT_EQ(cuda_.stuck(other_), 2u);
  end_call();
  EXPECT_EQ(cuda_.stuck(other_), 0u);
}

// A graph would refuse anything but kernels and memory operations in the stream, or another question to it
// than whether it captures.
TEST_F(ClientCalls, AStreamThatCapturesMayBeUsed) {
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
    EXPECT_EQ(kinds, (std::vector{StreamOp::kCheck, StreamOp::kRing, waits}));
    EXPECT_EQ(cuda_.synchronized(), synchronized);
    EXPECT_EQ(words().tail, 0u) << "it is the stream that rings";
    cuda_.on_enqueue(nullptr);
    cuda_.hold(stream_, false);
    end_call();
    EXPECT_EQ(cuda_.stuck(stream_), 0u);
  }
}

// The ticket of a captured operation is good for all replays, and counts them.
TEST_F(ClientCalls, EachReplayHasAResult) {
  epd_ticket_t tickets[2] = {};
  CUgraph graph = nullptr;
  CUgraphExec replay = nullptr;
  {
    cuda_.set_current(cuda_.context());
    ASSERT_EQ(cuStreamBeginCapture(stream_, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL), CUDA_SUCCESS);
    for (std::uint32_t slot = 0; slot < 2; ++slot) {
      ASSERT_EQ(dispatch_with(dispatch_args(slot)), EPD_OK) << epd_last_error();
      tickets[slot] = ticket_;
    }
    ASSERT_EQ(cuStreamEndCapture(stream_, &graph), CUDA_SUCCESS);
    ASSERT_EQ(cuGraphInstantiateWithFlags(&replay, graph, 0), CUDA_SUCCESS);
  }
  EXPECT_EQ(epd_ticket_poll(group_, tickets[0], nullptr), EPD_WOULD_BLOCK) << "it has not been replayed";
  epd_result_t result;
  epd_result_init(&result);
  for (std::uint32_t i = 1; i <= 5; ++i) {
    ASSERT_EQ(cuGraphLaunch(replay, stream_), CUDA_SUCCESS);
    for (int call = 0; call < 2; ++call) {
      ASSERT_EQ(cuda_.stuck(stream_) > 0, true);
      end_call();
    }
    if (i == 2) continue;  // this one nobody asks about
    for (const epd_ticket_t ticket : tickets) {
      ASSERT_EQ(epd_ticket_wait(group_, ticket, 20'000, &result), EPD_OK) << epd_last_error();
      EXPECT_EQ(result.runs, i);
      EXPECT_EQ(epd_ticket_poll(group_, ticket, nullptr), EPD_WOULD_BLOCK) << "no other has ended";
    }
  }
  // A replay of a later epoch fails with that, and not with the break before it.
  for (std::uint64_t epoch = 2; epoch <= 3; ++epoch) {
    break_and_resume(epoch);
    epd_resume_info_t info;
    epd_resume_info_init(&info);
    ASSERT_EQ(epd_group_resume(group_, 1000, &info), EPD_OK) << epd_last_error();
    ASSERT_EQ(cuGraphLaunch(replay, stream_), CUDA_SUCCESS);
    for (int call = 0; call < 2; ++call) end_call(false);
    EXPECT_EQ(epd_ticket_poll(group_, tickets[0], nullptr), EPD_WOULD_BLOCK) << "the group still has to stop";
    write_board(abi::GroupState::kActive, epoch + 1, StatusCode::kDeadlineExceeded, "rank 1 did not come");
    EXPECT_EQ(epd_ticket_wait(group_, tickets[0], 20'000, nullptr), EPD_DEADLINE_EXCEEDED);
    EXPECT_ERROR_HAS("rank 1 did not come");
    ASSERT_EQ(epd_group_resume(group_, 1000, &info), EPD_OK) << epd_last_error();
    ++epoch;
  }
  cuGraphExecDestroy(replay);
  cuGraphDestroy(graph);
  cuda_.set_current(nullptr);
}

// Earlier calls may take all of their time, and there may be one on each slot.
TEST_F(ClientCalls, AKernelGivesUpAfterAllDeadlines) {
  epd_dispatch_args_t args = dispatch_args(0);
  args.timeout_ms = 100'000;
  ASSERT_EQ(dispatch_with(args), EPD_OK) << epd_last_error();
  EXPECT_EQ(cuda_.enqueued(stream_).back().limit_ns, (4 * 100'000ull + 5'000) * 1'000'000);
  cuda_.pass_limits();
  EXPECT_EQ(cuda_.stuck(stream_), 0u);
  end_call();
}

// ---- joining --------------------------------------------------------------------------------------

TEST_F(ClientCalls, JoinSaysWhatIsWrong) {
  epd_group_t* other = nullptr;
  epd_group_config_t config = small_config();
  for (const char* function : {"cuMemcpyDtoHAsync", "cuMemImportFromShareableHandle"}) {
    cuda_.fail(function, CUDA_ERROR_LAUNCH_FAILED);
    const std::size_t left = daemon_.left();
    EXPECT_EQ(epd_group_join(session_, &config, &other), EPD_INTERNAL);
    EXPECT_ERROR_HAS((std::string(function)).c_str());
    EXPECT_EQ(daemon_.left(), left + 1);
    cuda_.fail(function, CUDA_SUCCESS);
  }
}

TEST_F(ClientCalls, WithoutKernelsTheHostAloneCalls) {
  detach();
  cuda_.fail("cuLibraryLoadData", CUDA_ERROR_NO_BINARY_FOR_GPU);
  ASSERT_EQ(attach_to(daemon_, &session_), EPD_OK) << epd_last_error();
  cuda_.fail("cuLibraryLoadData", CUDA_SUCCESS);
  join();
  member_ = &daemon_.member(0);
  EXPECT_EQ(dispatch_with(dispatch_args(0)), EPD_UNSUPPORTED);
  EXPECT_ERROR_HAS("need libepd's kernels");
  EXPECT_ERROR_HAS("allowed: EPD_NO_STREAM");
  ASSERT_EQ(dispatch_in(EPD_NO_STREAM, dispatch_args(0)), EPD_OK) << epd_last_error();
  end_host_call();
  EXPECT_EQ(wait(ticket_), EPD_OK);
}

}  // namespace
}  // namespace epd::testing
