// A fake daemon with one client attached and, on demand, joined to a group.
#pragma once

#include "epd/epd.h"
#include "fake_daemon.h"

#include <gtest/gtest.h>

#include <chrono>
#include <string>
#include <thread>

namespace epd::testing {

inline epd_status_t attach_to(const FakeDaemon& daemon, epd_session_t** session,
                              std::int32_t timeout_ms = 10'000, epd_wait_by_t wait_by = EPD_WAIT_BY_MEMOP) {
  epd_attach_options_t options;
  epd_attach_options_init(&options);
  options.socket_path = daemon.socket_path().c_str();
  options.timeout_ms = timeout_ms;
  options.wait_by = wait_by;
  return epd_session_attach(&options, session);
}

inline epd_group_config_t small_config() {
  epd_group_config_t config;
  epd_group_config_init(&config);
  config.name = "g";
  config.rank = 1;
  config.num_ranks = 2;
  config.num_experts = 4;
  config.max_tokens = 8;
  config.hidden = 128;
  config.topk = 2;
  return config;
}

#define EXPECT_ERROR_HAS(piece) \
  EXPECT_NE(std::string(epd_last_error()).find(piece), std::string::npos) << epd_last_error()

inline void pause_ms(int ms) {
  std::this_thread::sleep_for(std::chrono::milliseconds(ms));
}

class ClientTest : public ::testing::Test {
 protected:
  explicit ClientTest(bool automatic = false) {
    FakeSettings settings;
    settings.automatic = automatic;
    daemon_.set(settings);
  }
  void SetUp() override {
    ASSERT_EQ(attach_to(daemon_, &session_), EPD_OK) << epd_last_error();
    const epd_group_config_t config = small_config();
    ASSERT_EQ(epd_group_join(session_, &config, &group_), EPD_OK) << epd_last_error();
  }
  void TearDown() override { detach(); }
  void detach() {
    epd_session_detach(session_);
    session_ = nullptr;
    group_ = nullptr;
  }

  epd_ticket_t dispatch(std::uint32_t slot, std::uint32_t num_tokens = 3, epd_handle_t* handle = nullptr) {
    epd_dispatch_args_t args;
    epd_dispatch_args_init(&args);
    args.slot = slot;
    args.num_tokens = num_tokens;
    epd_ticket_t ticket = 0;
    EXPECT_EQ(epd_dispatch(group_, &args, EPD_NO_STREAM, &ticket, handle), EPD_OK) << epd_last_error();
    return ticket;
  }
  epd_status_t combine(std::uint32_t slot, epd_handle_t handle, epd_ticket_t* ticket) {
    epd_combine_args_t args;
    epd_combine_args_init(&args);
    args.slot = slot;
    args.handle = handle;
    return epd_combine(group_, &args, EPD_NO_STREAM, ticket);
  }
  epd_status_t wait(epd_ticket_t ticket, epd_result_t* result = nullptr, std::int32_t timeout_ms = 20'000) {
    return epd_ticket_wait(group_, ticket, timeout_ms, result);
  }
  // For a scripted engine: lets it complete, and retires the ticket.
  void wait_completed(epd_ticket_t ticket) {
    const auto call = daemon_.next_call();
    ASSERT_TRUE(call.has_value());
    daemon_.complete(*call);
    ASSERT_EQ(wait(ticket), EPD_OK) << epd_last_error();
  }

  FakeDaemon daemon_;
  epd_session_t* session_ = nullptr;
  epd_group_t* group_ = nullptr;
};

// The scripted engine does only what the test says.
class ClientOps : public ClientTest {};
// The engine completes everything by itself, and sleeps between.
class ClientAuto : public ClientTest {
 protected:
  ClientAuto() : ClientTest(true) {}
};

}  // namespace epd::testing
