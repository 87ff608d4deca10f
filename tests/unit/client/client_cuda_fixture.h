// A session on a CUDA device: the fake driver below, the scripted daemon beside it.
#pragma once

#include "client_fixture.h"
#include "launched_operations.h"
#include "session.h"
#include "watched_cuda.h"

#include <atomic>
#include <vector>

namespace epd::testing {

inline FakeSettings cuda_settings() {
  FakeSettings settings;
  settings.automatic = false;
  settings.device_kind = abi::DeviceKind::kCuda;
  settings.device_uuid = WatchedCuda::uuid();
  settings.arena_name = WatchedCuda::memory_name();
  settings.arena_unit = std::size_t{2} << 20;
  return settings;
}

// The session's next ticket is this one's successor.
inline void start_after(epd_session_t* session, epd_ticket_t ticket) {
  client::Session& object = *reinterpret_cast<client::Handle<client::Session>*>(session)->object();
  dynamic_cast<client::LaunchedOperations&>(object.operations()).start_after(ticket);
}

// Its streams wait as they do by default.
class ClientCudaBase : public ::testing::Test {
 protected:
  void SetUp() override {
    FakeSettings settings = cuda_settings();
    settings.resident = resident_;
    daemon_.set(settings);
    ASSERT_EQ(attach_again(wait_by_), EPD_OK) << epd_last_error();
  }
  // A session whose streams wait so, with a group; the fake daemon serves one.
  epd_status_t attach_again(epd_wait_by_t wait_by) {
    detach();
    const epd_status_t status = attach_to(daemon_, &session_, 10'000, wait_by);
    if (status == EPD_OK) join();
    return status;
  }
  void join() {
    epd_group_config_t config = small_config();
    config.num_handles = 2;
    ASSERT_EQ(epd_group_join(session_, &config, &group_), EPD_OK) << epd_last_error();
    epd_buffers_t buffers;
    epd_buffers_init(&buffers);
    ASSERT_EQ(epd_group_buffers(group_, 0, &buffers), EPD_OK);
    base_ = reinterpret_cast<std::uintptr_t>(buffers.x);
  }
  void TearDown() override {
    detach();
    EXPECT_EQ(cuda_.current(), nullptr);
    EXPECT_EQ(cuda_.mapped_bytes(), 0u);
    EXPECT_EQ(cuda_.retained(), 0);
    for (const std::string& mistake : cuda_.mistakes()) ADD_FAILURE() << mistake;
  }
  void detach() {
    epd_session_detach(session_);
    session_ = nullptr;
    group_ = nullptr;
  }

  abi::UserArenaLayout arena() { return abi::UserArenaLayout(daemon_.member().shape); }
  std::uintptr_t ready(std::uint32_t slot) { return base_ + arena().ready_word(slot); }
  std::uintptr_t done(std::uint32_t slot) { return base_ + arena().done_word(slot); }
  std::uint32_t at(std::uintptr_t address) {
    cuda_.settle();
    return std::atomic_ref(*reinterpret_cast<std::uint32_t*>(address)).load();
  }
  // What the engine does at an operation's end.
  void end(const abi::Submission& submission, StatusCode status = StatusCode::kOk) {
    cuda_.poke(done(submission.slot), static_cast<std::uint32_t>(submission.ticket));
    daemon_.complete(submission, status);
  }
  epd_status_t dispatch(std::uint32_t slot, CUstream stream, epd_ticket_t* ticket, bool deferred = false,
                        epd_handle_t* handle = nullptr) {
    epd_dispatch_args_t args;
    epd_dispatch_args_init(&args);
    args.slot = slot;
    args.num_tokens = 3;
    args.defer_receive = deferred ? 1 : 0;
    return epd_dispatch(group_, &args, stream, ticket, handle);
  }
  epd_status_t combine(std::uint32_t slot, CUstream stream, epd_handle_t handle, epd_ticket_t* ticket) {
    epd_combine_args_t args;
    epd_combine_args_init(&args);
    args.slot = slot;
    args.handle = handle;
    return epd_combine(group_, &args, stream, ticket);
  }
  epd_status_t noop(std::uint32_t slot, CUstream stream, epd_ticket_t* ticket) {
    return epd_noop(group_, slot, stream, ticket);
  }
  epd_status_t wait(epd_ticket_t ticket) { return epd_ticket_wait(group_, ticket, 20'000, nullptr); }
  // All that has been submitted and not been taken yet.
  std::vector<abi::Submission> submissions() {
    std::vector<abi::Submission> all;
    while (const auto submission = daemon_.next_submission(0)) all.push_back(*submission);
    return all;
  }
  static void expect(const StreamOp& op, StreamOp::Kind kind, std::uintptr_t address, std::uint64_t value) {
    EXPECT_EQ(op.kind, kind);
    EXPECT_EQ(op.address, address);
    EXPECT_EQ(op.value, static_cast<std::uint32_t>(value));
  }

  WatchedCuda cuda_;
  const CUstream stream_ = cuda_.make_stream();
  const CUstream other_ = cuda_.make_stream();
  FakeDaemon daemon_;
  epd_session_t* session_ = nullptr;
  epd_group_t* group_ = nullptr;
  std::uintptr_t base_ = 0;
  epd_wait_by_t wait_by_ = EPD_WAIT_BY_MEMOP;
  bool resident_ = false;
};

inline constexpr bool kHasKernels =
#ifdef EPD_CLIENT_HAS_KERNELS
    true;
#else
    false;
#endif

// What holds by whatever a stream waits.
class ClientCuda : public ClientCudaBase, public ::testing::WithParamInterface<epd_wait_by_t> {
 protected:
  void SetUp() override {
    wait_by_ = GetParam();
    if (by_kernel() && !kHasKernels) GTEST_SKIP() << "this libepd has no kernels: no nvcc";
    ClientCudaBase::SetUp();
  }
  static bool by_kernel() { return GetParam() == EPD_WAIT_BY_KERNEL; }
  static bool by_event() { return GetParam() == EPD_WAIT_BY_EVENT; }
  // How many waits have not ended. Behind each there is an event, if the session has events.
  std::size_t waits_in(CUstream stream) const {
    const std::size_t stuck = cuda_.stuck(stream);
    return by_event() ? (stuck + 1) / 2 : stuck;
  }
};

}  // namespace epd::testing
