// Memory of the caller's own: what the library refuses, and the size rule of its struct.
#include "client_fixture.h"

#include <cstring>
#include <memory>
#include <random>
#include <vector>

namespace epd::testing {
namespace {

class ClientMemory : public ClientTest {
 protected:
  static epd_memory_t none() {
    epd_memory_t memory;
    epd_memory_init(&memory);
    return memory;
  }
  epd_status_t dispatch_with(const epd_memory_t* memory, epd_ticket_t* ticket, std::uint32_t num_tokens = 3) {
    epd_dispatch_args_t args;
    epd_dispatch_args_init(&args);
    args.num_tokens = num_tokens;
    args.memory = memory;
    return epd_dispatch(group_, &args, EPD_NO_STREAM, ticket, &handle_);
  }
  epd_status_t combine_with(const epd_memory_t* memory, std::uint32_t num_tokens = 0,
                            std::uint32_t slot = 0) {
    epd_combine_args_t args;
    epd_combine_args_init(&args);
    args.handle = handle_;
    args.slot = slot;
    args.num_tokens = num_tokens;
    args.memory = memory;
    epd_ticket_t ticket = 0;
    return epd_combine(group_, &args, EPD_NO_STREAM, &ticket);
  }
  void expect_refused(const epd_memory_t& memory, const std::string& text) {
    epd_ticket_t ticket = 0;
    EXPECT_EQ(dispatch_with(&memory, &ticket), EPD_INVALID_ARGUMENT) << text;
    EXPECT_ERROR_HAS(text);
    EXPECT_EQ(ticket, 0u);
    EXPECT_FALSE(daemon_.next_call(0).has_value()) << "nothing may have been called";
  }
  void end(epd_ticket_t ticket, StatusCode status = StatusCode::kOk) {
    const auto call = daemon_.next_call();
    ASSERT_TRUE(call.has_value());
    daemon_.complete(*call, status);
    EXPECT_EQ(wait(ticket), static_cast<epd_status_t>(status)) << epd_last_error();
    EXPECT_EQ(epd_group_resume(group_, EPD_NO_WAIT, nullptr), EPD_OK) << epd_last_error();
  }

  std::vector<std::uint16_t> x_ = std::vector<std::uint16_t>(8 * 128, 0x3f80);
  epd_handle_t handle_ = 0;
};

TEST_F(ClientMemory, WhatTheGroupHasNotIsRefusedByName) {
  epd_memory_t memory = none();
  memory.x_scales = x_.data();
  expect_refused(memory, "memory.x_scales is given; allowed: NULL, the group has no such region");
  memory = none();
  memory.recv_scales = x_.data();
  expect_refused(memory, "memory.recv_scales is given");
  memory = none();
  memory.expert_offsets = reinterpret_cast<std::int32_t*>(x_.data());
  expect_refused(memory, "memory.expert_offsets is given");
  memory = none();
  memory.reserved = 4;
  expect_refused(memory, "memory.reserved is 4; allowed: 0");
  memory = none();
  memory.rank_offsets = reinterpret_cast<std::int32_t*>(reinterpret_cast<char*>(x_.data()) + 2);
  expect_refused(memory, "allowed: an address that is a multiple of 4");
}

// An operation ignores what is the other's, also if the group has no such region.
TEST_F(ClientMemory, FieldsOfTheOtherOperationAreIgnored) {
  epd_memory_t memory = none();
  memory.bias[0] = x_.data();
  memory.out = x_.data();
  epd_ticket_t ticket = 0;
  ASSERT_EQ(dispatch_with(&memory, &ticket), EPD_OK) << epd_last_error();
  end(ticket);
}

TEST_F(ClientMemory, InputsAreInTheRegionsWhenTheEngineHearsOfThem) {
  epd_buffers_t buffers;
  epd_buffers_init(&buffers);
  ASSERT_EQ(epd_group_buffers(group_, 0, &buffers), EPD_OK);
  auto* const region = static_cast<std::uint16_t*>(buffers.x);
  std::fill_n(region, x_.size(), std::uint16_t{7});
  epd_memory_t memory = none();
  memory.x = x_.data();
  epd_ticket_t ticket = 0;
  ASSERT_EQ(dispatch_with(&memory, &ticket), EPD_OK) << epd_last_error();
  for (std::size_t i = 0; i < x_.size(); ++i) ASSERT_EQ(region[i], i < 3 * 128 ? 0x3f80 : 7) << i;
  end(ticket);
  // The region itself may be named.
  memory.x = region;
  ASSERT_EQ(dispatch_with(&memory, &ticket), EPD_OK) << epd_last_error();
  end(ticket);
}

TEST_F(ClientMemory, AFailedOperationWritesNothing) {
  std::vector<std::int32_t> offsets(3, -5);
  epd_memory_t memory = none();
  memory.rank_offsets = offsets.data();
  epd_ticket_t ticket = 0;
  ASSERT_EQ(dispatch_with(&memory, &ticket), EPD_OK) << epd_last_error();
  end(ticket, StatusCode::kDeadlineExceeded);
  EXPECT_EQ(offsets, std::vector<std::int32_t>(3, -5));
  ASSERT_EQ(dispatch_with(&memory, &ticket), EPD_OK) << epd_last_error();
  end(ticket);
  EXPECT_NE(offsets, std::vector<std::int32_t>(3, -5));
}

// Rows of y are counted by a dispatch, tokens by another field or the same dispatch.
TEST_F(ClientMemory, ACombineMustKnowHowManyRowsThereAre) {
  epd_memory_t memory = none();
  memory.y = x_.data();
  memory.out = x_.data();
  epd_ticket_t ticket = 0;
  ASSERT_EQ(dispatch_with(nullptr, &ticket), EPD_OK) << epd_last_error();
  end(ticket);
  EXPECT_EQ(combine_with(&memory, 2), EPD_INVALID_ARGUMENT);
  EXPECT_ERROR_HAS("num_tokens is 2; allowed: 0, or 3 as in the dispatch of handle");
  EXPECT_EQ(combine_with(nullptr, 3), EPD_INVALID_ARGUMENT);
  EXPECT_ERROR_HAS("num_tokens is 3; allowed: 0 without memory");
  EXPECT_EQ(combine_with(&memory, 3), EPD_OK) << epd_last_error();
  const auto call = daemon_.next_call();
  ASSERT_TRUE(call.has_value());
  daemon_.complete(*call);
}

// Rows were copied by the counts of an earlier dispatch.
TEST_F(ClientMemory, ACombineMustWaitForTheCountsOfItsDispatch) {
  epd_memory_t memory = none();
  memory.y = x_.data();
  memory.out = x_.data();
  epd_ticket_t ticket = 0;
  ASSERT_EQ(dispatch_with(nullptr, &ticket), EPD_OK) << epd_last_error();
  EXPECT_EQ(combine_with(&memory, 0, 1), EPD_WOULD_BLOCK);
  EXPECT_ERROR_HAS("the dispatch of handle 1 is in flight");
  end(ticket);
  EXPECT_EQ(combine_with(&memory, 0, 1), EPD_OK) << epd_last_error();
}

TEST_F(ClientMemory, ACombineOfADispatchThatFailedCopiesNothing) {
  epd_memory_t memory = none();
  memory.y = x_.data();
  epd_ticket_t ticket = 0;
  ASSERT_EQ(dispatch_with(nullptr, &ticket), EPD_OK) << epd_last_error();
  daemon_.end(*daemon_.next_call(), abi::CallEnding::kFailed);
  EXPECT_EQ(combine_with(&memory, 0, 1), EPD_WOULD_BLOCK);
  EXPECT_ERROR_HAS("the dispatch of handle 1 has failed");
}

// Nobody waits for the first: its outputs are copied before the next call may overwrite them.
TEST_F(ClientMemory, OutputsAreCopiedBeforeTheSlotIsUsedAgain) {
  std::vector<std::int32_t> offsets(3, -5);
  epd_memory_t memory = none();
  memory.rank_offsets = offsets.data();
  epd_ticket_t ticket = 0;
  ASSERT_EQ(dispatch_with(&memory, &ticket), EPD_OK) << epd_last_error();
  daemon_.complete(*daemon_.next_call());
  EXPECT_EQ(epd_noop(group_, 0, EPD_NO_STREAM, &ticket), EPD_OK) << epd_last_error();
  EXPECT_NE(offsets, std::vector<std::int32_t>(3, -5));
}

// As from a program that was compiled with another version of the struct.
TEST_F(ClientMemory, TheSizeRuleHoldsForWhateverIsGiven) {
  std::mt19937 random(7);
  int taken = 0;
  for (int i = 0; i < 3000; ++i) {
    std::size_t size = random() % 8 == 0 ? random() % 6000 : random() % (2 * sizeof(epd_memory_t));
    if (random() % 4 != 0) size -= size % sizeof(size);  // others end within a field
    // No more bytes than it says, so that a sanitizer sees who reads them.
    const std::size_t held = std::max(size, sizeof(std::size_t));
    const auto bytes = std::make_unique<unsigned char[]>(held);
    epd_memory_t memory = none();
    memory.x = x_.data();
    std::memset(bytes.get(), 0, held);
    std::memcpy(bytes.get(), &memory, std::min(held, sizeof(memory)));
    std::memcpy(bytes.get(), &size, sizeof(size));
    const bool unknown = size > sizeof(memory) && random() % 2 == 0;
    if (unknown) bytes[sizeof(memory) + random() % (size - sizeof(memory))] = 1;
    epd_ticket_t ticket = 0;
    const epd_status_t status = dispatch_with(reinterpret_cast<const epd_memory_t*>(bytes.get()), &ticket);
    if (size < sizeof(size) || size > 4096 || size % sizeof(size) != 0) {
      EXPECT_EQ(status, EPD_INVALID_ARGUMENT);
      EXPECT_ERROR_HAS("memory.size is " + std::to_string(size));
    } else if (unknown) {
      EXPECT_EQ(status, EPD_INVALID_ARGUMENT);
      EXPECT_ERROR_HAS("memory has a field at byte ");
    } else {
      ASSERT_EQ(status, EPD_OK) << epd_last_error();
      end(ticket);
      ++taken;
    }
    if (HasFailure()) return;
  }
  EXPECT_GT(taken, 500);
}

}  // namespace
}  // namespace epd::testing
