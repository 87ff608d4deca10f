// A session on a CUDA device: the fake driver below, the scripted daemon beside it.
#pragma once

#include "client_fixture.h"
#include "proto/call_words.h"
#include "watched_cuda.h"

#include <atomic>
#include <map>
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

inline constexpr bool kHasKernels =
#ifdef EPD_CLIENT_HAS_KERNELS
    true;
#else
    false;
#endif

// The tests do the work of the engine's kernels. No engine ever hears of a call. The streams wait as they do
// by default.
class ClientCudaBase : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!kHasKernels) GTEST_SKIP() << "this libepd has no kernels: no nvcc";
    daemon_.set(cuda_settings());
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
    member_ = &daemon_.member(0);
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
  abi::CallWords& words() {
    cuda_.settle();
    return *reinterpret_cast<abi::CallWords*>(base_ + abi::UserArenaLayout(member_->shape).calls);
  }
  std::uintptr_t address(const std::uint32_t& word) { return reinterpret_cast<std::uintptr_t>(&word); }
  // The call that was enqueued last.
  abi::Call last_call() { return call_at(words().tail - 1); }
  abi::Call call_at(std::uint32_t number) {
    const abi::PackedCall& packed = words().calls[number % abi::kCallSlots];
    for (const std::uint64_t word : packed.words) EXPECT_EQ(word >> 32, std::uint32_t{number + 1});
    return abi::unpack(packed);
  }
  abi::Call host_call_at(std::uint32_t number) {
    const abi::PackedCall& packed = words().host_calls[number % abi::kCallSlots];
    for (const std::uint64_t word : packed.words) EXPECT_EQ(word >> 32, std::uint32_t{number + 1});
    return abi::unpack(packed);
  }
  // The engine's kernel reports the end of a call like this.
  void tell_result(const abi::Call& call, abi::CallEnding ending = abi::CallEnding::kCarriedOut) {
    abi::CallResult& place = member_->results().places[abi::place_of(call.result)];
    std::uint32_t& runs = runs_[call.result];
    const std::uint32_t values[] = {static_cast<std::uint32_t>(ending), 5, 2, 70, call.result, 9, 0, ++runs};
    ++writing_;
    for (std::uint32_t i = 0; i < abi::CallResult::kWords; ++i)
      std::atomic_ref(place.words[i]).store(std::uint64_t{writing_} << 32 | values[i]);
  }
  // Ends the oldest of the host's calls.
  void end_host_call(abi::CallEnding ending = abi::CallEnding::kCarriedOut) {
    abi::Results& results = member_->results();
    tell_result(host_call_at(results.host_ended), ending);
    std::atomic_ref(results.host_ended).fetch_add(1);
  }
  // The engine's kernel ends the oldest call that has not ended like this.
  void end_call(bool well = true) {
    const abi::Call call = call_at(words().done);
    tell_result(call, well ? abi::CallEnding::kCarriedOut : abi::CallEnding::kFailed);
    if (!well) cuda_.poke(address(words().failed), words().failed + 1);
    if (call.flagged) cuda_.poke(address(words().flags[abi::flag_of(call.op, call.slot)]), 1);
    cuda_.poke(address(words().done), words().done + 1);
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
  WatchedCuda cuda_;
  const CUstream stream_ = cuda_.make_stream();
  const CUstream other_ = cuda_.make_stream();
  FakeDaemon daemon_;
  epd_session_t* session_ = nullptr;
  epd_group_t* group_ = nullptr;
  std::uintptr_t base_ = 0;
  FakeMember* member_ = nullptr;
  std::map<std::uint32_t, std::uint32_t> runs_;  // by result
  std::uint32_t writing_ = 0;
  epd_wait_by_t wait_by_ = EPD_WAIT_BY_MEMOP;
};

// Tests of these hold for every way in which a stream waits.
class ClientCuda : public ClientCudaBase, public ::testing::WithParamInterface<epd_wait_by_t> {
 protected:
  void SetUp() override {
    wait_by_ = GetParam();
    ClientCudaBase::SetUp();
  }
  static bool by_kernel() { return GetParam() == EPD_WAIT_BY_KERNEL; }
  static bool by_event() { return GetParam() == EPD_WAIT_BY_EVENT; }
  // How many waits have not ended. After each there is an event, if the session has events.
  std::size_t waits_in(CUstream stream) const {
    const std::size_t stuck = cuda_.stuck(stream);
    return by_event() ? (stuck + 1) / 2 : stuck;
  }
};

}  // namespace epd::testing
