// How a call is judged, and how it becomes an operation by the group's view.
#include "kernels/calls.h"

#include <gtest/gtest.h>
#include <algorithm>
#include <array>
#include <cstddef>
#include <iterator>
#include <memory>
#include <random>

namespace epd::kernels::cuda {
namespace {

using abi::Op;
using abi::Region;

std::uint8_t* address(std::uint64_t number) {
  return reinterpret_cast<std::uint8_t*>(number << 40);  // NOLINT
}

// The row formats of the groups below: bf16, a cast, e4m3 with its scales, bf16 again.
constexpr std::uint32_t kRowBytes[] = {256, 128, 127, 257};
constexpr std::uint32_t kFormatWithScales = 2;

class Calls : public testing::Test {
 protected:
  std::uint32_t below(std::uint32_t bound) { return static_cast<std::uint32_t>(random_() % bound); }

  // A group with all that groups may have.
  void draw_view() {
    shape_ = {1 + below(32),
              0,
              1 + below(512),
              128,
              1 + below(8),
              1 + below(16),
              abi::Payload::kBf16,
              {},
              {},
              below(2) != 0 ? abi::Layout::kExpert : abi::Layout::kCompact};
    shape_.num_experts = shape_.num_ranks * (1 + below(8));
    shape_.num_biases = 2;
    shape_.num_handles = below(5);
    shape_.max_recv_rows = 64;
    shape_.num_more_formats = 3;
    view_ = {};
    view_.group.shape.format.row_bytes = kRowBytes[0];
    for (std::uint32_t format = 1; format < abi::kMaxFormats; ++format) {
      RowFormat& more = view_.group.more_formats[format - 1];
      more.row_bytes = kRowBytes[format];
      more.cast = format == 1;
      more.scale_bytes = format == 1 || format == kFormatWithScales ? 4 : 0;
    }
    view_.group.rank = below(shape_.num_ranks);
    view_.group.exchange = abi::ExchangeArenaLayout(shape_);
    view_.group.exchange_arena = address(100 + view_.group.rank);
    for (std::uint32_t i = 0; i < abi::kNumRegions; ++i)
      view_.group.regions[i] = {address(1 + i), 128 * random_() % 4096};
    for (std::uint32_t r = 0; r < shape_.num_ranks; ++r) {
      PeerView& peer = view_.peers[r];
      peer.exchange = address(100 + r);
      peer.since = below(20);
      RegionPlace* const places[] = {
          &peer.recv_x,   &peer.recv_scales, &peer.recv_topk_idx, &peer.recv_topk_weights,
          &peer.recv_src, &peer.y,           &peer.y_weights};
      for (std::uint32_t i = 0; i < std::size(places); ++i)
        *places[i] = {address(200 + r * 8 + i), 128 * random_() % 4096};
    }
    limits_ = abi::op_limits(shape_);
    state_ = {};
    state_.enabled_epoch_taken = 1 + 2 * below(1000);
    state_.epoch = 1 + below(1000);
    state_.index = below(100000);
    ring_ = below(2) != 0 ? kByHost : kByStreams;
    state_.sequence[ring_] = static_cast<std::uint32_t>(random_());
    state_.results = static_cast<std::uint32_t>(random_());
    state_.journal = static_cast<std::uint32_t>(random_());
    state_.timeout_ms = 1 + below(1000);
  }
  // A lawful one, which comes next.
  abi::Call draw_call() {
    abi::Call call;
    call.number = state_.sequence[ring_];
    call.op = below(2) != 0 ? Op::kDispatch : Op::kCombine;
    call.slot = below(shape_.depth);
    call.flags = static_cast<std::uint32_t>(random_()) & abi::flags_of(call.op);
    if (ring_ == kByHost) call.flags &= ~std::uint32_t{abi::kFlagPlaces};
    if (abi::num_biases(call.flags) > 2) call.flags &= ~std::uint32_t{abi::kFlagBiases};
    call.route = call.slot;
    if (abi::makes_routing(call.op, call.flags)) call.num_tokens = below(shape_.max_tokens + 1);
    call.epoch = state_.epoch & 0xff;
    call.flagged = below(2) != 0;
    call.sms = below(200);
    call.timeout_ms = below(2) * 77;
    call.result = abi::result_of(below(abi::kResultPlaces), below(100));
    return call;
  }
  Judgement judge(const abi::Call& call) const { return judge_call(state_, limits_, ring_, abi::pack(call)); }

  std::mt19937_64 random_{testing::UnitTest::GetInstance()->random_seed() + 1u};
  abi::GroupShape shape_{};
  DeviceView view_;
  CallState state_{};
  CallRing ring_ = kByStreams;
  abi::OpLimits limits_;
};

void expect_at(const void* pointer, const RegionPlace& place, std::uint32_t slot, bool there = true) {
  EXPECT_EQ(pointer, there ? place.base + place.stride * slot : nullptr);
}

TEST_F(Calls, BecomeOperationsByTheGroupsView) {
  for (int i = 0; i < 300; ++i) {
    draw_view();
    const abi::Call call = draw_call();
    ASSERT_EQ(judge(call).verdict, Verdict::kRun);
    const RouteState route{abi::op_tag(1 + below(20), below(1000)), below(512), below(2)};
    const TakenCall taken = take(state_, limits_.depth, ring_, call, route);
    const kernels::Operation op = compose(view_.group, taken);
    const GroupView& own = view_.group;
    const bool dispatch = call.op == Op::kDispatch;
    const bool makes = abi::makes_routing(call.op, call.flags);
    EXPECT_EQ(op.tag, abi::op_tag(state_.epoch, state_.index));
    EXPECT_EQ(op.announcement.tag, op.tag);
    EXPECT_EQ(op.announcement.op, static_cast<std::uint32_t>(call.op));
    EXPECT_EQ(op.announcement.slot, call.slot);
    const std::uint32_t format = abi::format_of(call.flags);
    EXPECT_EQ(op.announcement.format, format);
    EXPECT_EQ(op.shape.format.row_bytes, kRowBytes[format]);
    EXPECT_EQ(op.announcement.routing, makes ? 0 : route.tag);
    EXPECT_EQ(op.num_tokens, makes ? call.num_tokens : route.num_tokens);
    EXPECT_EQ(op.announcement.num_tokens, op.num_tokens);
    EXPECT_EQ(op.cached, dispatch && !makes);
    EXPECT_EQ(op.mark_unused, (call.flags & abi::kFlagMarkUnused) != 0);
    EXPECT_EQ(op.zero_padding, (call.flags & abi::kFlagZeroPadding) != 0);
    EXPECT_EQ(op.sum_weights, (call.flags & abi::kFlagSumWeights) != 0);
    const auto region = [&](Region r) -> const RegionPlace& { return own.region(r); };
    const bool weights = (call.flags & abi::kFlagWeights) != 0;
    const bool returns = (call.flags & abi::kFlagReturnWeights) != 0;
    expect_at(op.x, region(Region::kX), call.slot, dispatch);
    expect_at(op.x_scales, region(Region::kXScales), call.slot, dispatch && format == kFormatWithScales);
    expect_at(op.topk_idx, region(Region::kTopkIdx), call.slot, dispatch);
    expect_at(op.topk_weights, region(Region::kTopkWeights), call.slot, weights);
    expect_at(op.counts.rank_offsets, region(Region::kRankOffsets), call.slot, dispatch);
    expect_at(op.counts.expert_counts, region(Region::kExpertCounts), call.slot, dispatch);
    expect_at(op.counts.expert_offsets, region(Region::kExpertOffsets), call.slot, dispatch);
    expect_at(op.counts.source_ranges, region(Region::kSourceRanges), call.slot, dispatch);
    expect_at(op.bias[0], region(Region::kBias0), call.slot, !dispatch && abi::num_biases(call.flags) > 0);
    expect_at(op.bias[1], region(Region::kBias1), call.slot, !dispatch && abi::num_biases(call.flags) > 1);
    expect_at(op.out, region(Region::kOut), call.slot, !dispatch);
    expect_at(op.out_weights, region(Region::kOutWeights), call.slot, returns);
    // The half of the record that is not in use is written.
    const abi::ExchangeArenaLayout& layout = own.exchange;
    const std::uint32_t half = makes ? 1 - route.half : route.half;
    const std::uint8_t* const record =
        own.exchange_arena + layout.routing_of(call.route) + layout.half_bytes * half;
    EXPECT_EQ(static_cast<void*>(op.routing.topk), record + layout.topk);
    EXPECT_EQ(static_cast<void*>(op.routing.rows), record + layout.rows);
    EXPECT_EQ(static_cast<void*>(op.routing.placement), record + layout.placement);
    EXPECT_EQ(static_cast<void*>(op.routing.head), makes ? record : nullptr);
    EXPECT_EQ(static_cast<const void*>(op.routing.record), makes ? nullptr : record);
    EXPECT_EQ(op.routing.handle, state_.index + 1);
    EXPECT_EQ(op.routing.epoch, state_.epoch);
    const RouteState made = made_route(taken);
    EXPECT_EQ(made.tag, op.tag);
    EXPECT_EQ(made.half, half);
    for (std::uint32_t r = 0; r < shape_.num_ranks; ++r) {
      const PeerView& from = view_.peers[r];
      Peer peer;
      compose_peer(peer, layout, from, taken);
      const std::uint8_t* const block = from.exchange + layout.block(state_.index, shape_.depth);
      EXPECT_EQ(static_cast<void*>(peer.ready), block + layout.ready);
      EXPECT_EQ(static_cast<void*>(peer.arrived), block + layout.arrived);
      EXPECT_EQ(static_cast<void*>(peer.announcement), block + layout.announcement);
      EXPECT_EQ(static_cast<void*>(peer.rank_counts), block + layout.rank_counts);
      EXPECT_EQ(static_cast<void*>(peer.expert_counts), block + layout.expert_counts);
      EXPECT_EQ(peer.inbox,
                layout.inbox_bytes == 0 ? nullptr : from.exchange + layout.inbox(state_.index, shape_.depth));
      expect_at(peer.target.recv_x, from.recv_x, call.slot, dispatch);
      expect_at(peer.target.recv_scales, from.recv_scales, call.slot, dispatch);
      expect_at(peer.target.recv_topk_idx, from.recv_topk_idx, call.slot, dispatch);
      expect_at(peer.target.recv_topk_weights, from.recv_topk_weights, call.slot, dispatch);
      expect_at(peer.target.recv_src, from.recv_src, call.slot, dispatch);
      const bool has_rows = !dispatch && from.since <= abi::epoch_of_tag(route.tag);
      expect_at(peer.source.y, from.y, call.slot, has_rows);
      expect_at(peer.source.y_weights, from.y_weights, call.slot, has_rows && returns);
    }
    Peer absent;
    compose_peer(absent, layout, PeerView{}, taken);
    EXPECT_EQ(absent.ready, nullptr);
  }
}

TEST_F(Calls, TellWhereTheyEnd) {
  for (int i = 0; i < 100; ++i) {
    draw_view();
    const abi::Call call = draw_call();
    const TakenCall taken = take(state_, limits_.depth, ring_, call, {});
    abi::CallWords words{};
    const auto host = std::make_unique<CallHost>();
    CallArguments own;
    own.words = &words;
    own.state = &state_;
    own.host = host.get();
    const auto results = std::make_unique<abi::Results>();
    own.results = results.get();
    own.counts_stride = static_cast<std::uint32_t>(abi::ResultsLayout(shape_).counts_stride);
    Operation op;
    compose_ends(op, own, taken);
    const bool of_stream = ring_ == kByStreams;
    EXPECT_EQ(op.signal.done, of_stream ? &words.done : nullptr);
    EXPECT_EQ(op.signal.failed, &words.failed);
    EXPECT_EQ(op.signal.value, call.number + 1);
    const bool flagged = call.flagged && of_stream;
    EXPECT_EQ(op.signal.flag, flagged ? &words.flags[abi::flag_of(call.op, call.slot)] : nullptr);
    EXPECT_EQ(op.out_result.to, &results->places[abi::place_of(call.result)]);
    EXPECT_EQ(op.out_result.number, state_.results + 1);
    const std::uint64_t counts = abi::ResultsLayout(shape_).counts + own.counts_stride * call.slot;
    EXPECT_EQ(reinterpret_cast<std::byte*>(op.counts.host_words),
              call.op == Op::kDispatch ? reinterpret_cast<std::byte*>(results.get()) + counts : nullptr);
    const bool tells = call.op == Op::kDispatch && (call.flags & abi::kFlagDefer) != 0;
    EXPECT_EQ(op.counts.host_sent, tells ? &results->sent[call.slot] : nullptr);
    EXPECT_EQ(op.counts.mark, call.result + 1);
    EXPECT_EQ(op.abort, &state_.abort);
    EXPECT_EQ(op.timeout_ns, (call.timeout_ms != 0 ? call.timeout_ms : state_.timeout_ms) * 1'000'000ull);
    EXPECT_EQ(op.result, &host->journal[state_.journal % kJournalEntries].result);
  }
}

TEST(Blocks, FollowTheIndexBeyond32Bits) {
  for (std::uint32_t depth = 1; depth <= 16; ++depth) {
    for (const std::uint64_t index :
         {0ull, 17ull, 0xffffffffull, 1ull << 32, (1ull << 32) + 5, (1ull << 40) + 3})
      EXPECT_EQ(block_of(index, depth), index % depth) << index;
  }
}

// Bytes of a kernel's Operation, of its Shape (4), its Signal (4), its WorkDivision (12), its CountOutputs
// (4) and its ResultOut (4) that are of no field.
constexpr std::size_t kPadding =
    (offsetof(kernels::Operation, division) - sizeof(Shape)) +
    (offsetof(kernels::Operation, routing) - offsetof(kernels::Operation, sum_weights) - 1) +
    (sizeof(Operation) - offsetof(kernels::Operation, memories) - sizeof(Operation::memories) -
     sizeof(Operation::peers)) +
    4 + 4 + 12 + 4 + 4;

// As kernels do, whose memory holds whatever was there.
TEST_F(Calls, LeaveNothingOfWhatWasThere) {
  for (int i = 0; i < 100; ++i) {
    draw_view();
    const TakenCall taken = take(state_, limits_.depth, ring_, draw_call(), {});
    abi::CallWords words{};
    const auto host = std::make_unique<CallHost>();
    CallArguments own;
    own.words = &words;
    own.state = &state_;
    own.host = host.get();
    const WorkDivision division;
    std::array<std::uint8_t, sizeof(Operation)> seen[2];
    for (const int poison : {0x00, 0xff}) {
      alignas(Operation) std::array<std::uint8_t, sizeof(Operation)> memory;
      memory.fill(static_cast<std::uint8_t>(poison));
      Operation& op = *reinterpret_cast<Operation*>(memory.data());  // NOLINT
      op.shape = view_.group.shape;
      op.inbox = view_.group.inbox;
      compose_constants(op, view_.group, taken);
      for (std::uint32_t r = 0; r < kMaxRanks; ++r)
        compose_peer(op.peers[r], view_.group.exchange, view_.peers[r], taken);
      for (std::uint32_t region = 0; region < abi::kNumRegions; ++region)
        compose_region(op, view_.group, region, taken);
      compose_announcement(op, taken);
      compose_routing(op, view_.group, taken);
      compose_ends(op, own, taken);
      op.division = division;
      seen[poison & 1] = memory;
    }
    std::size_t differ = 0;
    for (std::size_t byte = 0; byte < sizeof(Operation); ++byte)
      differ += seen[0][byte] != seen[1][byte] ? 1 : 0;
    EXPECT_EQ(differ, kPadding) << "bytes that were not written";
  }
}

TEST_F(Calls, HaveTheSmsOfTheirGroupAndOfTheKernel) {
  for (const std::uint32_t group : {0u, 3u, 64u, 500u}) {
    for (const std::uint32_t own : {0u, 1u, 5u, 64u, 9999u}) {
      draw_view();
      state_.sms = group;
      abi::Call call = draw_call();
      call.sms = own;
      const TakenCall taken = take(state_, limits_.depth, ring_, call, {});
      std::uint32_t wanted = 100;
      if (own != 0) wanted = std::min(wanted, own);
      if (group != 0) wanted = std::min(wanted, group);
      EXPECT_EQ(ctas_of(taken, 100), wanted) << own << " of " << group;
      EXPECT_EQ(division_index(taken, 132, wanted), division_kind(call.op, call.flags) * 132 + wanted - 1);
    }
  }
}

TEST_F(Calls, AreWaitedForUntilAllTheirWordsAreThere) {
  for (int i = 0; i < 100; ++i) {
    draw_view();
    const abi::Call call = draw_call();
    abi::PackedCall packed = abi::pack(call);
    packed.words[1 + below(3)] -= std::uint64_t{abi::kCallSlots} << 32;  // of the ring's last round
    EXPECT_EQ(judge_call(state_, limits_, ring_, packed).verdict, Verdict::kWait);
    state_.sequence[ring_] = call.number + 1;
    EXPECT_EQ(judge(call).verdict, Verdict::kWait) << "it has been taken";
  }
}

TEST_F(Calls, OfAnotherEpochOrTurnAreDiscarded) {
  draw_view();
  abi::Call call = draw_call();
  call.epoch ^= 1;
  EXPECT_EQ(judge(call).verdict, Verdict::kDiscard);
  call.epoch ^= 1;
  state_.failed = 1;
  EXPECT_EQ(judge(call).verdict, Verdict::kDiscard);
  state_.failed = 0;
  ++state_.enabled_epoch_taken;
  EXPECT_EQ(judge(call).verdict, Verdict::kDiscard);
}

TEST_F(Calls, ThatNoLibraryMakesAreRefused) {
  for (int i = 0; i < 500; ++i) {
    draw_view();
    abi::Call call = draw_call();
    OpError error = OpError::kBadCall;
    switch (below(10)) {
      case 0: call.op = Op::kNone; break;
      case 1: call.slot = shape_.depth; break;
      case 2: call.flags |= 1u << 8; break;
      case 3: call.flags |= 1u << (13 + below(3)); break;
      case 4: call.num_tokens = shape_.max_tokens + 1; break;
      case 5:
        call.route = shape_.num_routes() + below((1u << abi::kCallRouteBits) - shape_.num_routes());
        break;
      case 6: call.result = abi::result_of(abi::kResultPlaces + below(1000), 0); break;
      case 7:
        ring_ = kByHost;
        call.number = state_.sequence[ring_];
        call.flags |= abi::kFlagPlaces;
        break;
      case 8:
        limits_.num_formats = 1 + below(abi::kMaxMoreFormats);
        call.flags = (call.flags & ~std::uint32_t{abi::kFlagFormat}) | limits_.num_formats
                                                                           << abi::kFormatShift;
        break;
      default: call.number += 1 + below(1000); error = OpError::kLostCall;
    }
    if (call.slot == abi::kMaxDepth) continue;  // which a call cannot state
    const Judgement judgement = judge(call);
    EXPECT_EQ(judgement.verdict, Verdict::kRefuse);
    EXPECT_EQ(judgement.error, error);
  }
}

TEST_F(Calls, TakeTheirRowsFromMappedMemoryAsFarAsTheyAreThere) {
  MemoryTable table;
  for (int i = 0; i < 2000; ++i) {
    draw_view();
    const bool dispatch = below(2) != 0;
    Operation op;
    op.shape.num_ranks = 1 + below(kMaxRanks);
    op.shape.hidden = 128;
    op.shape.recv_rows = 1 + below(100);
    op.shape.format.x_bytes = 256;
    op.shape.format.row_bytes = 128 * (1 + below(2));
    op.rank = below(op.shape.num_ranks);
    op.num_tokens = below(50);
    op.memories = &table.of[0][0];
    op.shape.per_expert = below(2) != 0;
    abi::RoutingRecord record{};
    record.num_recv_rows = below(static_cast<std::uint32_t>(op.shape.recv_rows) + 1);
    op.routing.record = &record;
    std::uint8_t* const x = dispatch ? address(1) : nullptr;
    op.x = x;
    op.out = reinterpret_cast<std::uint16_t*>(dispatch ? nullptr : address(2));
    Peer& own = op.peers[op.rank];
    own.target.recv_x = dispatch ? address(3) : nullptr;
    own.source.y = reinterpret_cast<const std::uint16_t*>(dispatch ? nullptr : address(4));
    const Peer before = own;
    const std::uint32_t number = below(abi::kMaxMapped);
    const std::uint32_t generation = 1 + below(3);
    for (auto& of_rank : table.of) {
      for (auto& memory : of_rank) memory = {};
    }
    table.of[op.rank][number] =
        abi::MappedMemory::of(reinterpret_cast<std::uintptr_t>(address(9)), 1 + below(40'000), generation);
    const std::uint64_t offset = below(3) == 0 ? random_() >> 24 : below(40'000);
    const std::uint32_t named = below(9) == 0 ? below(abi::kMaxMemoryGeneration) : generation;
    const abi::RowPlace place = below(9) == 0 ? random_()
                                : below(9) == 0
                                    ? abi::row_place(below(abi::kMaxMapped + 2), named, offset)
                                    : abi::row_place(number, named, offset / 16 * (below(5) != 0 ? 16 : 8));
    const auto where = [&](std::uint64_t needed) -> std::uint8_t* {
      const std::uint64_t at = place & abi::kMaxPlaceOffset;
      const bool there = place >> 40 == (std::uint64_t{number + 1} << 16 | generation) && at % 16 == 0 &&
                         at <= table.of[op.rank][number].bytes &&
                         needed <= table.of[op.rank][number].bytes - at;
      return there ? address(9) + at : nullptr;
    };
    EXPECT_EQ(is_mapped(table.of[op.rank], place),
              place >> 40 == (std::uint64_t{number + 1} << 16 | generation));
    const std::uint64_t tokens = op.num_tokens * std::uint64_t{256};
    const std::uint64_t rows = dispatch              ? op.shape.recv_rows * op.shape.format.row_bytes
                               : op.shape.per_expert ? op.shape.recv_rows * std::uint64_t{256}
                                                     : record.num_recv_rows * std::uint64_t{256};
    const bool in = below(2) != 0;
    take_own_places(op, in ? abi::RowPlaces{place, 0} : abi::RowPlaces{0, place});
    const bool of_tokens = dispatch == in;  // x, out
    const std::uint8_t* const found = where(of_tokens ? tokens : rows);
    const void* const now = of_tokens  ? (dispatch ? op.x : op.out)
                            : dispatch ? own.target.recv_x
                                       : own.source.y;
    const void* const region = of_tokens ? (dispatch ? x : address(2)) : address(dispatch ? 3 : 4);
    EXPECT_EQ(now, found != nullptr ? found : region);
    EXPECT_EQ(op.announcement.place, found != nullptr && !of_tokens ? place : 0);
    if (of_tokens || op.announcement.place == 0) continue;
    Peer seen = before;  // as a peer sees it
    take_place(op, op.rank, place, seen);
    EXPECT_EQ(seen.target.recv_x, own.target.recv_x);
    EXPECT_EQ(seen.source.y, own.source.y);
    Peer inactive;
    take_place(op, op.rank, place, inactive);
    EXPECT_EQ(inactive.target.recv_x, nullptr);
    EXPECT_EQ(inactive.source.y, nullptr);
  }
}

TEST_F(Calls, NeedARoutingThatStillServes) {
  draw_view();
  state_.changed_epoch = 5;
  abi::Call call;
  const auto judged = [&](std::uint64_t tag) { return judge_routing(state_, call, {tag, 1, 0}); };
  call.op = Op::kDispatch;
  EXPECT_EQ(judged(0).verdict, Verdict::kRun) << "it makes one";
  for (const Op op : {Op::kDispatch, Op::kCombine}) {
    call.op = op;
    call.flags = op == Op::kDispatch ? std::uint32_t{abi::kFlagCached} : 0u;
    EXPECT_EQ(judged(0).error, OpError::kNoRouting);
    EXPECT_EQ(judged(abi::op_tag(5, 9)).verdict, Verdict::kRun);
    const Judgement old = judged(abi::op_tag(4, 9));
    EXPECT_EQ(old.verdict, op == Op::kCombine ? Verdict::kRun : Verdict::kRefuse);
    EXPECT_EQ(old.error, op == Op::kCombine ? OpError::kNone : OpError::kOldRouting);
  }
}

}  // namespace
}  // namespace epd::kernels::cuda
