// epd.hpp against the scripted daemon.
#include "epd/epd.hpp"

#include "client_fixture.h"

#include <chrono>
#include <future>
#include <vector>

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
  EXPECT_EQ(b.x.as<std::uint16_t>().size(), 8u * 128);
  EXPECT_EQ(b.recv_x.bytes(), 2u * 8 * 128 * 2);
  EXPECT_TRUE(b.recv_scales.empty() && b.recv_scales.data() == nullptr && b.bias[0].empty());
  b.y[2 * 8 * 128 - 1] = 1;
  epd::Dispatch d = group.dispatch(0, 5, EPD_NO_STREAM);
  const epd::Counts counts = d.ticket.counts(20'000);
  EXPECT_EQ(counts.num_recv_rows, 5u);
  EXPECT_EQ(counts.rank_offsets[2], 5);
  EXPECT_EQ(counts.expert_counts.size(), 2u);
  const epd_result_t result = d.ticket.wait(20'000);
  EXPECT_EQ(result.num_recv_rows, 5u);
  EXPECT_EQ(result.runs, 1u);
  EXPECT_FALSE(d.ticket.valid());
  EXPECT_THROW(d.ticket.wait(), epd::Error);
  epd::CombineOptions weighted;
  weighted.weighted = true;
  group.combine(0, d.handle, EPD_NO_STREAM, weighted).wait(20'000);
  std::promise<epd_status_t> done;
  group.noop(1, EPD_NO_STREAM).on_complete([&done](const epd_result_t& r) { done.set_value(r.status); });
  EXPECT_EQ(done.get_future().get(), EPD_OK);
}

TEST_F(ClientWrapper, OperationsTakeMemoryOfTheCallers) {
  epd::Group group = attach().join(config());
  const std::vector<std::uint16_t> x(5 * 128, 0x3f80);
  std::vector<std::uint16_t> out(5 * 128, 1);
  epd::Memory memory;
  memory.x = x.data();
  memory.out = out.data();
  epd::DispatchOptions from;
  from.memory = &memory;
  epd::Dispatch d = group.dispatch(0, 5, EPD_NO_STREAM, from);
  d.ticket.wait(20'000);
  EXPECT_EQ(group.buffers(0).x.as<std::uint16_t>()[5 * 128 - 1], 0x3f80);
  group.buffers(0).out[5 * 128 - 1] = 7;
  epd::CombineOptions to;
  to.memory = &memory;
  to.num_tokens = 5;
  group.combine(0, d.handle, EPD_NO_STREAM, to).wait(20'000);
  EXPECT_EQ(out.back(), 7);
  to.num_tokens = 4;
  EXPECT_THROW(group.combine(0, d.handle, EPD_NO_STREAM, to), epd::Error);
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
  epd::Ticket ticket = group.noop(0, EPD_NO_STREAM);
  epd_result_t result;
  epd_result_init(&result);
  EXPECT_FALSE(ticket.poll(result));
  EXPECT_THROW(ticket.wait(10), epd::Error);
  EXPECT_TRUE(ticket.valid() && ticket.pending());
  // The operation's own DEADLINE_EXCEEDED, by contrast, retires it.
  daemon_.complete(*daemon_.next_call(), StatusCode::kDeadlineExceeded);
  EXPECT_EQ(ticket.try_wait(20'000, result), EPD_DEADLINE_EXCEEDED);
  EXPECT_FALSE(ticket.valid());
  group.resume(EPD_NO_WAIT);
  epd::Dispatch d;
  epd_dispatch_args_t args;
  epd_dispatch_args_init(&args);
  args.num_tokens = 1;
  EXPECT_EQ(group.try_dispatch(args, EPD_NO_STREAM, d), EPD_OK);
  epd::Dispatch blocked;
  EXPECT_EQ(group.try_dispatch(args, EPD_NO_STREAM, blocked), EPD_WOULD_BLOCK);
  EXPECT_FALSE(blocked.ticket.valid());
}  // d is dropped in flight

TEST_F(ClientWrapper, AdvanceGoesOnAfterABreak) {
  scripted();
  epd::Group group = attach().join(config());
  epd::Ticket ticket;
  EXPECT_EQ(group.advance(ticket).resume_op, 0u) << "where the group is";
  ticket = group.dispatch(0, 1, EPD_NO_STREAM).ticket;
  EXPECT_THROW(group.advance(ticket, EPD_NO_WAIT), epd::Error);
  EXPECT_TRUE(ticket.valid());
  daemon_.complete(*daemon_.next_call(), StatusCode::kEngineRestarted);
  epd_result_t result;
  epd_resume_info_t at = group.advance(ticket, 20'000, &result);
  EXPECT_FALSE(ticket.valid());
  EXPECT_EQ(result.status, EPD_ENGINE_RESTARTED);
  EXPECT_EQ(at.epoch, 2u);
  EXPECT_EQ(at.resume_op, 0u);
  ticket = group.dispatch(0, 1, EPD_NO_STREAM).ticket;
  daemon_.complete(*daemon_.next_call());
  EXPECT_EQ(group.advance(ticket, 20'000).resume_op, 1u);
  daemon_.write_board(abi::GroupState::kLost, 2, 0, StatusCode::kRankLost, "rank 0 died");
  try {
    group.advance(ticket);
    FAIL() << "the group has ended";
  } catch (const epd::Error& error) {
    EXPECT_TRUE(error.is_break()) << error.what();
  }
}

TEST_F(ClientWrapper, Moves) {
  epd::Group group = attach().join(config());
  epd::Ticket a = group.noop(0, EPD_NO_STREAM);
  epd::Ticket b = std::move(a);
  EXPECT_TRUE(b.valid());
  b = group.noop(1, EPD_NO_STREAM);  // the first is dropped
  EXPECT_EQ(b.wait(20'000).status, EPD_OK);
  EXPECT_EQ(group.resume(EPD_NO_WAIT).epoch, 1u);
}

// The arena's own sizes say whether the spans are right.
TEST_F(ClientWrapper, SpansCoverTheRegionsOfEveryMode) {
  epd::Session session = attach();
  std::size_t member = 0;
  const auto bytes = [&](abi::Region region) {
    return abi::region_bytes(daemon_.member(member).shape, region);
  };
  const auto expect = [](epd::Region region, std::uint64_t wanted) {
    EXPECT_EQ(region.bytes(), wanted);
    EXPECT_EQ(region.as<std::int32_t>().size() * sizeof(std::int32_t), wanted);
    EXPECT_EQ(region.data() == nullptr, wanted == 0);
  };
  const auto expect_span = [](auto span, std::uint64_t wanted) {
    EXPECT_EQ(span.size() * sizeof(span[0]), wanted);
  };
  for (const epd_layout_t layout : {EPD_LAYOUT_COMPACT, EPD_LAYOUT_PACKED, EPD_LAYOUT_EXPERT}) {
    for (int payload = EPD_PAYLOAD_BF16; payload <= EPD_PAYLOAD_OPAQUE; ++payload) {
      epd::Config c = config();
      c.layout = layout;
      c.payload = static_cast<epd_payload_t>(payload);
      c.opaque_bytes = payload == EPD_PAYLOAD_OPAQUE ? 80 : 0;
      c.scale_format = payload == EPD_PAYLOAD_FP8 ? EPD_SCALE_FORMAT_UE8M0 : EPD_SCALE_FORMAT_FLOAT32;
      c.hidden = 640;
      if (payload == EPD_PAYLOAD_FP8_CAST)
        c.more_formats = {{EPD_PAYLOAD_BF16, EPD_SCALE_FORMAT_FLOAT32},
                          {EPD_PAYLOAD_FP8, EPD_SCALE_FORMAT_UE8M0}};
      const bool scales = payload == EPD_PAYLOAD_FP8 || payload == EPD_PAYLOAD_FP8_CAST;
      c.scale_layout = scales ? EPD_SCALE_LAYOUT_COLUMN_MAJOR : EPD_SCALE_LAYOUT_ROW_MAJOR;
      c.range_format = layout == EPD_LAYOUT_COMPACT ? EPD_RANGE_FORMAT_ROWS : EPD_RANGE_FORMAT_PACKED64;
      c.expert_alignment = 16;
      c.num_biases = payload % 3;
      c.max_recv_rows = payload % 2 == 0 ? 0 : 5;
      c.sum_ranks = payload % 2;
      c.index_type = payload < 2 ? EPD_INDEX_TYPE_INT32 : EPD_INDEX_TYPE_INT64;
      const epd::Group group = session.join(c);
      EXPECT_EQ(group.sum_ranks(), payload % 2 == 0 ? c.num_ranks : 1u);
      EXPECT_EQ(group.active_mask().size(), c.num_ranks);
      EXPECT_EQ(group.waits().ready_ns, std::vector<std::int64_t>(c.num_ranks, 0));
      EXPECT_EQ(group.waits().arrived_ns, std::vector<std::int64_t>(c.num_ranks, 0));
      const epd::Buffers b = group.buffers(1);
      EXPECT_EQ(daemon_.member(member).shape.scale_columns(), scales);
      EXPECT_EQ(daemon_.member(member).shape.num_formats(), 1 + c.more_formats.size());
      EXPECT_EQ(daemon_.member(member).shape.range_format == abi::RangeFormat::kPacked64,
                layout != EPD_LAYOUT_COMPACT);
      expect(b.x, bytes(abi::Region::kX));
      expect(b.x_scales, bytes(abi::Region::kXScales));
      expect(b.topk_idx, bytes(abi::Region::kTopkIdx));
      expect_span(b.topk_weights, bytes(abi::Region::kTopkWeights));
      expect(b.recv_x, bytes(abi::Region::kRecvX));
      expect(b.recv_scales, bytes(abi::Region::kRecvScales));
      expect(b.recv_topk_idx, bytes(abi::Region::kRecvTopkIdx));
      expect_span(b.recv_topk_weights, bytes(abi::Region::kRecvTopkWeights));
      expect_span(b.recv_src, bytes(abi::Region::kRecvSrc));
      expect_span(b.rank_offsets, bytes(abi::Region::kRankOffsets));
      expect_span(b.expert_counts, bytes(abi::Region::kExpertCounts));
      expect_span(b.expert_offsets, bytes(abi::Region::kExpertOffsets));
      expect_span(b.source_ranges, bytes(abi::Region::kSourceRanges));
      expect_span(b.y, bytes(abi::Region::kY));
      expect_span(b.y_weights, bytes(abi::Region::kYWeights));
      expect_span(b.bias[0], bytes(abi::Region::kBias0));
      expect_span(b.bias[1], bytes(abi::Region::kBias1));
      expect_span(b.out, bytes(abi::Region::kOut));
      expect_span(b.out_weights, bytes(abi::Region::kOutWeights));
      ++member;
    }
  }
}

TEST_F(ClientWrapper, KeptHandlesAreGivenBack) {
  epd::Config c = config();
  c.num_handles = 1;
  epd::Group group = attach().join(c);
  epd::DispatchOptions keep;
  keep.keep_handle = true;
  for (int i = 0; i < 3; ++i) {
    epd::KeptHandle kept;
    {
      epd::Dispatch d = group.dispatch(0, 2, EPD_NO_STREAM, keep);
      kept = std::move(d.kept);
      EXPECT_EQ(kept.get(), d.handle);
      EXPECT_THROW(group.dispatch(1, 2, EPD_NO_STREAM, keep), epd::Error) << "there is only one";
      d.ticket.wait(20'000);
    }
    epd::DispatchOptions again;
    again.handle = kept.get();
    again.defer_receive = true;
    epd::Dispatch cached = group.dispatch(1, 0, EPD_NO_STREAM, again);
    EXPECT_FALSE(cached.kept.valid());
    cached.ticket.wait_sent(20'000);
    EXPECT_EQ(cached.ticket.wait(20'000).runs, 1u);
    group.combine(1, kept.get(), EPD_NO_STREAM);
  }  // given back, though nobody waited for the last user
}

// As with an engine that is stopped.
TEST_F(ClientWrapper, AKeptHandleThatStaysInUseIsNotWaitedForForEver) {
  scripted();
  epd::Config c = config();
  c.num_handles = 1;
  epd::Group group = attach().join(c);
  epd::DispatchOptions keep;
  keep.keep_handle = true;
  epd::Dispatch d = group.dispatch(0, 2, EPD_NO_STREAM, keep);
  EXPECT_FALSE(d.kept.release(std::chrono::milliseconds(20)));
  EXPECT_TRUE(d.kept.valid()) << "it may be tried again";
  daemon_.complete(*daemon_.next_call());
  d.ticket.wait(20'000);
  EXPECT_TRUE(d.kept.release());
  EXPECT_FALSE(d.kept.valid());
}

}  // namespace
}  // namespace epd::testing
