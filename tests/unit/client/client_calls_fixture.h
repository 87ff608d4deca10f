// A group whose operations are calls: what the engine's kernel does, the tests do.
#pragma once

#include "client_cuda_fixture.h"
#include "proto/call_words.h"

#include <atomic>
#include <map>
#include <string>

namespace epd::testing {

// No engine ever hears of a call. The streams wait by kernel.
class ClientCalls : public ClientCudaBase {
 protected:
  void SetUp() override {
    if (!kHasKernels) GTEST_SKIP() << "this libepd has no kernels: no nvcc";
    wait_by_ = EPD_WAIT_BY_KERNEL;
    resident_ = true;
    ClientCudaBase::SetUp();
    member_ = &daemon_.member(0);
  }
  void TearDown() override {
    EXPECT_FALSE(daemon_.next_submission(1).has_value()) << "of a call the engine's loop hears nothing";
    ClientCudaBase::TearDown();
  }
  // Its streams have MEMOP waits.
  void use_memop_waits() {
    ASSERT_EQ(attach_again(EPD_WAIT_BY_MEMOP), EPD_OK) << epd_last_error();
    member_ = &daemon_.member(0);
  }
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
  // What the engine's kernel tells of a call's end.
  void tell_result(const abi::Call& call, abi::CallEnding ending = abi::CallEnding::kCarriedOut) {
    abi::CallResult& place = member_->results().places[abi::place_of(call.result)];
    std::uint32_t& runs = runs_[call.result];
    const std::uint32_t values[] = {static_cast<std::uint32_t>(ending), 5, 2, 70, call.result, 9, 0, ++runs};
    ++writing_;
    for (std::uint32_t i = 0; i < abi::CallResult::kWords; ++i)
      std::atomic_ref(place.words[i]).store(std::uint64_t{writing_} << 32 | values[i]);
  }
  // Of the oldest of the host's.
  void end_host_call(abi::CallEnding ending = abi::CallEnding::kCarriedOut) {
    abi::Results& results = member_->results();
    tell_result(host_call_at(results.host_ended), ending);
    std::atomic_ref(results.host_ended).fetch_add(1);
  }
  // What the engine's kernel does with the oldest one that it has not ended.
  void end_call(bool well = true) {
    const abi::Call call = call_at(words().done);
    tell_result(call, well ? abi::CallEnding::kCarriedOut : abi::CallEnding::kFailed);
    if (!well) cuda_.poke(address(words().failed), words().failed + 1);
    if (call.flagged) cuda_.poke(address(words().flags[abi::flag_of(call.op, call.slot)]), 1);
    cuda_.poke(address(words().done), words().done + 1);
  }
  epd_dispatch_args_t dispatch_args(std::uint32_t slot) {
    epd_dispatch_args_t args;
    epd_dispatch_args_init(&args);
    args.slot = slot;
    args.num_tokens = 3;
    return args;
  }
  epd_status_t dispatch_with(const epd_dispatch_args_t& args) { return dispatch_in(stream_, args); }
  epd_status_t dispatch_in(void* stream, const epd_dispatch_args_t& args) {
    return epd_dispatch(group_, &args, stream, &ticket_, &handle_);
  }
  void expect_refused(const epd_dispatch_args_t& args, const char* text) {
    const std::uint32_t enqueued = words().tail;
    EXPECT_EQ(dispatch_with(args), EPD_INVALID_ARGUMENT);
    EXPECT_ERROR_HAS(text);
    EXPECT_EQ(words().tail, enqueued);
  }
  void break_and_resume(std::uint64_t epoch) {
    write_board(abi::GroupState::kBroken, epoch - 1, StatusCode::kEngineRestarted, "the engine is back");
    write_board(abi::GroupState::kActive, epoch, StatusCode::kEngineRestarted, "the engine is back");
  }
  void write_board(abi::GroupState state, std::uint64_t epoch, StatusCode cause, const std::string& text) {
    abi::Board& board = member_->board();
    board.change.fetch_add(1);
    board.state = static_cast<std::uint32_t>(state);
    board.epoch = epoch;
    board.cause = static_cast<std::uint32_t>(cause);
    abi::set_text(board.message, text.data(), text.size());
    board.change.fetch_add(1);
  }

  FakeMember* member_ = nullptr;
  std::map<std::uint32_t, std::uint32_t> runs_;  // by result
  std::uint32_t writing_ = 0;
  epd_ticket_t ticket_ = 0;
  epd_handle_t handle_ = 0;
};

}  // namespace epd::testing
