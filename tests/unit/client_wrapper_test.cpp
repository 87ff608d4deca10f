// epd.hpp against the scripted daemon.
#include "epd/epd.hpp"

#include "client_fixture.h"

#include <future>

namespace epd::testing {
namespace {

class ClientWrapper : public ::testing::Test {
 protected:
  static epd::Config config() {
    epd::Config c;
    c.name = "w";
    c.num_ranks = 2;
    c.num_experts = 4;
    c.max_tokens = 8;
    c.hidden = 128;
    c.topk = 2;
    return c;
  }
  epd::Session attach() {
    epd::AttachOptions options;
    options.socket_path = daemon_.socket_path();
    return epd::Session(options);
  }
  void scripted() {
    FakeSettings settings;
    settings.automatic = false;
    daemon_.set(settings);
  }

  FakeDaemon daemon_;
};

TEST_F(ClientWrapper, RoundTrip) {
  epd::Group group;
  {
    epd::Session session = attach();
    EXPECT_STREQ(session.info().device, "host:3");
    group = session.join(config());
  }  // the group keeps the session
  const epd::Buffers b = group.buffers(0);
  EXPECT_EQ(b.x.size(), 8u * 128);
  EXPECT_EQ(b.recv_x.size(), 2u * 8 * 128);
  EXPECT_TRUE(b.recv_x8.empty() && b.recv_scales.empty() && b.topk_idx64.empty());
  b.y[2 * 8 * 128 - 1] = 1;
  epd::Dispatch d = group.dispatch(0, 5);
  const epd::Counts counts = d.ticket.counts(20'000);
  EXPECT_EQ(counts.num_recv_rows, 5u);
  EXPECT_EQ(counts.rank_offsets[2], 5);
  EXPECT_EQ(counts.expert_counts.size(), 2u);
  EXPECT_EQ(d.ticket.wait(20'000).num_recv_rows, 5u);
  EXPECT_FALSE(d.ticket.valid());
  EXPECT_THROW(d.ticket.wait(), epd::Error);
  group.combine(0, d.handle, true).wait(20'000);
  std::promise<epd_status_t> done;
  group.noop(1).on_complete([&done](const epd_result_t& r) { done.set_value(r.status); });
  EXPECT_EQ(done.get_future().get(), EPD_OK);
}

TEST_F(ClientWrapper, ErrorsCarryTheStatus) {
  epd::AttachOptions options;
  options.socket_path = "/nonexistent/epd.sock";
  try {
    const epd::Session session(options);
    FAIL() << "attached to nobody";
  } catch (const epd::Error& error) {
    EXPECT_EQ(error.status(), EPD_DAEMON_LOST);
    EXPECT_NE(std::string(error.what()).find("DAEMON_LOST: "), std::string::npos);
  }
  epd::Config bad = config();
  bad.hidden = 1;
  EXPECT_THROW(attach().join(bad), epd::Error);
}

TEST_F(ClientWrapper, WaitsThatGiveUpKeepTheTicket) {
  scripted();
  epd::Group group = attach().join(config());
  epd::Ticket ticket = group.noop(0);
  epd_result_t result = EPD_RESULT_INIT;
  EXPECT_FALSE(ticket.poll(result));
  EXPECT_THROW(ticket.wait(10), epd::Error);
  EXPECT_TRUE(ticket.valid() && ticket.pending());
  // The operation's own DEADLINE_EXCEEDED, by contrast, retires it.
  daemon_.complete(*daemon_.next_submission(), StatusCode::kDeadlineExceeded);
  EXPECT_EQ(ticket.try_wait(20'000, result), EPD_DEADLINE_EXCEEDED);
  EXPECT_FALSE(ticket.valid());
  epd::Dispatch d;
  EXPECT_EQ(group.try_dispatch({sizeof(epd_dispatch_args_t), 0, 1, 1, 0}, d), EPD_OK);
  epd::Dispatch blocked;
  EXPECT_EQ(group.try_dispatch({sizeof(epd_dispatch_args_t), 0, 1, 1, 0}, blocked), EPD_WOULD_BLOCK);
  EXPECT_FALSE(blocked.ticket.valid());
}  // d is dropped in flight

TEST_F(ClientWrapper, Moves) {
  epd::Group group = attach().join(config());
  epd::Ticket a = group.noop(0);
  epd::Ticket b = std::move(a);
  EXPECT_TRUE(b.valid());
  b = group.noop(1);  // the first is dropped
  EXPECT_EQ(b.wait(20'000).status, EPD_OK);
  EXPECT_EQ(group.resume(0).epoch, 1u);
}

}  // namespace
}  // namespace epd::testing
