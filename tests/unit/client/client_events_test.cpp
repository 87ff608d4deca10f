// Events of operations (EPD_WAIT_BY_EVENT). The streams wait as MEMOP waits do, which ClientCuda tests.
#include "client_cuda_fixture.h"

#include <sys/wait.h>
#include <unistd.h>

namespace epd::testing {
namespace {

class ClientEvents : public ClientCudaBase {
 protected:
  ClientEvents() { wait_by_ = EPD_WAIT_BY_EVENT; }
  epd_status_t find(epd_ticket_t ticket, CUevent* event) {
    void* found = nullptr;
    const epd_status_t status = epd_ticket_event(group_, ticket, &found);
    *event = static_cast<CUevent>(found);
    return status;
  }
  CUevent event_of(epd_ticket_t ticket) {
    CUevent event = nullptr;
    EXPECT_EQ(find(ticket, &event), EPD_OK) << epd_last_error();
    return event;
  }
  void expect_no_event(epd_ticket_t ticket, epd_status_t status, const char* text) {
    CUevent event = nullptr;
    EXPECT_EQ(find(ticket, &event), status);
    EXPECT_ERROR_HAS(text);
    EXPECT_EQ(event, nullptr);
  }
  CUresult query(CUevent event) {
    cuda_.settle();
    cuda_.set_current(cuda_.context());
    const CUresult result = cuEventQuery(event);
    cuda_.set_current(nullptr);
    return result;
  }
  epd_ticket_t submitted(std::uint32_t slot, bool deferred = false) {
    epd_ticket_t ticket = 0;
    EXPECT_EQ(dispatch(slot, stream_, &ticket, deferred), EPD_OK) << epd_last_error();
    return ticket;
  }
};

TEST_F(ClientEvents, AnEventCompletesWithItsOperation) {
  const epd_ticket_t tickets[] = {submitted(0), submitted(1)};
  const CUevent events[] = {event_of(tickets[0]), event_of(tickets[1])};
  EXPECT_NE(events[0], events[1]);
  EXPECT_EQ(query(events[0]), CUDA_ERROR_NOT_READY);
  for (const int slot : {0, 1}) {
    end_call(slot == 0);
    EXPECT_EQ(query(events[slot]), CUDA_SUCCESS) << "well or not";
    EXPECT_EQ(query(events[1]), slot == 0 ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS);
  }
  EXPECT_EQ(wait(tickets[0]), EPD_OK);
  EXPECT_EQ(event_of(tickets[0]), events[0]) << "also when the ticket is retired";
  EXPECT_EQ(cuda_.stuck(stream_), 0u);
}

TEST_F(ClientEvents, StreamsWaitForTheEventThatIsThere) {
  const epd_ticket_t ticket = submitted(0);
  ASSERT_EQ(epd_ticket_wait_on_stream(group_, ticket, other_), EPD_OK) << epd_last_error();
  EXPECT_EQ(cuda_.stuck(other_), 1u);
  for (const StreamOp& op : cuda_.enqueued(other_)) EXPECT_NE(op.kind, StreamOp::kWait) << "for the word";
  end_call();
  EXPECT_EQ(cuda_.stuck(other_), 0u);
  EXPECT_EQ(event_of(ticket), event_of(ticket));
}

TEST_F(ClientEvents, ADeferredOperationHasItsEventFromItsFirstWaitOn) {
  const epd_ticket_t ticket = submitted(0, true);
  expect_no_event(ticket, EPD_NOT_FOUND, "no stream waits for it (defer_receive)");
  ASSERT_EQ(epd_ticket_wait_on_stream(group_, ticket, other_), EPD_OK) << epd_last_error();
  const CUevent event = event_of(ticket);
  EXPECT_EQ(query(event), CUDA_ERROR_NOT_READY);
  end_call();
  EXPECT_EQ(query(event), CUDA_SUCCESS);
}

// A wait that was enqueued before is not affected: its stream continues with the first operation's end.
TEST_F(ClientEvents, TheSlotsNextOperationTakesTheEventOver) {
  const epd_ticket_t first = submitted(0);
  const CUevent event = event_of(first);
  cuda_.set_current(cuda_.context());
  ASSERT_EQ(cuStreamWaitEvent(other_, event, 0), CUDA_SUCCESS);
  cuda_.set_current(nullptr);
  const epd_ticket_t second = submitted(0);
  expect_no_event(first, EPD_NOT_FOUND, "its slot has a later operation");
  EXPECT_EQ(event_of(second), event);
  end_call();
  EXPECT_EQ(cuda_.stuck(other_), 0u);
  EXPECT_EQ(query(event), CUDA_ERROR_NOT_READY) << "never early";
  end_call();
  EXPECT_EQ(query(event), CUDA_SUCCESS);
}

// The event of an operation with memory of the caller's is recorded after the copies of its outputs.
TEST_F(ClientEvents, OtherStreamsWaitForOutputsByTheEvent) {
  epd_memory_t memory;
  epd_handle_t handle = 0;
  epd_ticket_t ticket = 0;
  ASSERT_EQ(dispatch(0, stream_, &ticket, false, &handle), EPD_OK) << epd_last_error();
  end_call();
  ASSERT_EQ(wait(ticket), EPD_OK);
  epd_combine_args_t args;
  epd_combine_args_init(&args);
  args.handle = handle;
  epd_memory_init(&memory);
  auto* const out = reinterpret_cast<std::uint32_t*>(cuda_.pinned_bytes(3 * 128 * 2));
  *out = 0x5a5a5a5a;
  memory.out = out;
  args.memory = &memory;
  ASSERT_EQ(epd_combine(group_, &args, stream_, &ticket), EPD_OK) << epd_last_error();
  const CUevent event = event_of(ticket);
  ASSERT_EQ(epd_ticket_wait_on_stream(group_, ticket, other_), EPD_OK) << epd_last_error();
  EXPECT_EQ(query(event), CUDA_ERROR_NOT_READY);
  EXPECT_EQ(cuda_.stuck(other_), 1u);
  end_call();
  EXPECT_EQ(query(event), CUDA_SUCCESS);
  EXPECT_NE(*out, 0x5a5a5a5a) << "the region was copied";
  EXPECT_EQ(cuda_.stuck(other_), 0u);
  const epd_ticket_t next = submitted(0);
  EXPECT_EQ(epd_ticket_wait_on_stream(group_, ticket, other_), EPD_INVALID_ARGUMENT)
      << "its event is another's";
  EXPECT_NE(next, ticket);
}

TEST_F(ClientEvents, TheSessionsEndCompletesThem) {
  const CUevent event = event_of(submitted(0));
  daemon_.end_session(StatusCode::kPermissionDenied, "the operator said so");
  daemon_.hang_up();
  for (int i = 0; i < 2000 && query(event) != CUDA_SUCCESS; ++i) ::usleep(5000);
  EXPECT_EQ(query(event), CUDA_SUCCESS);
}

TEST_F(ClientEvents, OtherProcessesMayOpenThem) {
  const CUevent event = event_of(submitted(0));
  CUipcEventHandle handle;
  cuda_.set_current(cuda_.context());
  EXPECT_EQ(cuIpcGetEventHandle(&handle, event), CUDA_SUCCESS);
  cuda_.set_current(nullptr);
  end_call();
}

TEST_F(ClientEvents, WhatHasNoEventSaysWhy) {
  expect_no_event(0, EPD_NOT_FOUND, "ticket 0 has no event");
  expect_no_event(77, EPD_NOT_FOUND, "ticket 77 has no event");
  epd_ticket_t ticket = 0;
  ASSERT_EQ(dispatch(1, static_cast<CUstream>(EPD_NO_STREAM), &ticket), EPD_OK) << epd_last_error();
  expect_no_event(ticket, EPD_NOT_FOUND, "no ticket of a stream's operation");
  end_host_call();
  EXPECT_EQ(epd_ticket_event(group_, ticket, nullptr), EPD_INVALID_ARGUMENT);
  EXPECT_ERROR_HAS("event is NULL");
  for (const epd_wait_by_t by : {EPD_WAIT_BY_MEMOP, EPD_WAIT_BY_KERNEL}) {
    ASSERT_EQ(attach_again(by), EPD_OK) << epd_last_error();
    ticket = submitted(0);
    expect_no_event(ticket, EPD_INVALID_ARGUMENT, "allowed: with EPD_WAIT_BY_EVENT at attach");
    end_call();
  }
}

TEST_F(ClientEvents, TheDriversErrors) {
  epd_ticket_t ticket = 0;
  for (const char* call : {"cuEventRecord", "cuStreamWaitValue32"}) {
    cuda_.fail(call, CUDA_ERROR_LAUNCH_FAILED);
    EXPECT_EQ(dispatch(0, stream_, &ticket), EPD_INTERNAL);
    EXPECT_ERROR_HAS(std::string(call) + ": CUDA_ERROR_LAUNCH_FAILED");
    EXPECT_ERROR_HAS("was submitted");
    cuda_.fail(call, CUDA_SUCCESS);
    expect_no_event(ticket, EPD_NOT_FOUND, "has no event");
    end_call();
    EXPECT_EQ(wait(ticket), EPD_OK);
  }
  cuda_.fail("cuEventCreate", CUDA_ERROR_OUT_OF_MEMORY);
  detach();
  ASSERT_EQ(attach_to(daemon_, &session_, 10'000, EPD_WAIT_BY_EVENT), EPD_OK) << epd_last_error();
  epd_group_config_t config = small_config();
  EXPECT_EQ(epd_group_join(session_, &config, &group_), EPD_RESOURCE_EXHAUSTED);
  EXPECT_ERROR_HAS("cuEventCreate: CUDA_ERROR_OUT_OF_MEMORY");
  cuda_.fail("cuEventCreate", CUDA_SUCCESS);
}

// An event that is recorded there would belong to the graph.
TEST_F(ClientEvents, CapturedOperationsHaveNone) {
  CUgraph graph = nullptr;
  cuda_.set_current(cuda_.context());
  ASSERT_EQ(cuStreamBeginCapture(stream_, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL), CUDA_SUCCESS);
  const epd_ticket_t ticket = submitted(0, true);
  ASSERT_EQ(epd_ticket_wait_on_stream(group_, ticket, stream_), EPD_OK) << epd_last_error();
  ASSERT_EQ(cuStreamEndCapture(stream_, &graph), CUDA_SUCCESS);
  expect_no_event(ticket, EPD_NOT_FOUND, "it was captured");
  cuGraphDestroy(graph);
  cuda_.set_current(nullptr);
}

}  // namespace
}  // namespace epd::testing
