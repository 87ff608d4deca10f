// Calls, one by one, of streams that wait by kernel.
#pragma once

#include "client_cuda_fixture.h"

#include <string>

namespace epd::testing {

class ClientCalls : public ClientCudaBase {
 protected:
  ClientCalls() { wait_by_ = EPD_WAIT_BY_KERNEL; }
  // Its streams have MEMOP waits.
  void use_memop_waits() { ASSERT_EQ(attach_again(EPD_WAIT_BY_MEMOP), EPD_OK) << epd_last_error(); }
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

  epd_ticket_t ticket_ = 0;
  epd_handle_t handle_ = 0;
};

}  // namespace epd::testing
