// The supervisor's messages for the control plane, from the ABI's enumerators and from engines' pages.
#include "messages.h"
#include "far_statistics.h"

#include <gtest/gtest.h>
#include <memory>

namespace epd::supervisor {
namespace {

using membership::GroupPhase;

TEST(Messages, EveryEnumeratorHasItsOwn) {
  EXPECT_EQ(message_of(DeviceState::kStarting), v1::DEVICE_STATE_STARTING);
  EXPECT_EQ(message_of(DeviceState::kReady), v1::DEVICE_STATE_READY);
  EXPECT_EQ(message_of(DeviceState::kRestarting), v1::DEVICE_STATE_RESTARTING);
  EXPECT_EQ(message_of(DeviceState::kFailed), v1::DEVICE_STATE_FAILED);
  EXPECT_EQ(message_of(DeviceState::kStopped), v1::DEVICE_STATE_STOPPED);
  EXPECT_EQ(message_of(GroupPhase::kForming), v1::GROUP_STATE_FORMING);
  EXPECT_EQ(message_of(GroupPhase::kStarting), v1::GROUP_STATE_STARTING);
  EXPECT_EQ(message_of(GroupPhase::kActive), v1::GROUP_STATE_ACTIVE);
  EXPECT_EQ(message_of(GroupPhase::kBreaking), v1::GROUP_STATE_BREAKING);
  EXPECT_EQ(message_of(GroupPhase::kFailing), v1::GROUP_STATE_BREAKING);
  EXPECT_EQ(message_of(GroupPhase::kLost), v1::GROUP_STATE_LOST);
  EXPECT_EQ(message_of(GroupPhase::kRemoving), v1::GROUP_STATE_LOST);
}

abi::GroupShape shape() {
  abi::GroupShape shape{
      2, 256, 4096, 7168, 8, 4, abi::Payload::kFp8Cast, abi::IndexType::kInt64, abi::LossPolicy::kFailFast};
  shape.layout = abi::Layout::kPacked;
  shape.scale_format = abi::ScaleFormat::kUe8m0;
  shape.expert_alignment = 128;
  shape.num_biases = 2;
  shape.num_handles = 3;
  shape.max_recv_rows = 9000;
  shape.sum_ranks = 1;
  shape.scale_layout = abi::ScaleLayout::kColumnMajor;
  shape.range_format = abi::RangeFormat::kPacked64;
  shape.num_more_formats = 2;
  shape.more_formats[0] = {abi::Payload::kBf16, abi::ScaleFormat::kFloat32};
  shape.more_formats[1] = {abi::Payload::kFp8, abi::ScaleFormat::kUe8m0};
  return shape;
}

TEST(Messages, AShapeHasEveryField) {
  const v1::GroupShape message = message_of(shape());
  EXPECT_EQ(message.num_ranks(), 2u);
  EXPECT_EQ(message.num_experts(), 256u);
  EXPECT_EQ(message.max_tokens(), 4096u);
  EXPECT_EQ(message.hidden(), 7168u);
  EXPECT_EQ(message.topk(), 8u);
  EXPECT_EQ(message.depth(), 4u);
  EXPECT_EQ(message.payload(), v1::PAYLOAD_FP8_CAST);
  EXPECT_EQ(message.index_type(), v1::INDEX_TYPE_INT64);
  EXPECT_EQ(message.policy(), v1::LOSS_POLICY_FAIL_FAST);
  EXPECT_EQ(message.layout(), v1::LAYOUT_PACKED);
  EXPECT_EQ(message.scale_format(), v1::SCALE_FORMAT_UE8M0);
  EXPECT_EQ(message.expert_alignment(), 128u);
  EXPECT_EQ(message.num_biases(), 2u);
  EXPECT_EQ(message.num_handles(), 3u);
  EXPECT_EQ(message.max_recv_rows(), 9000u);
  EXPECT_EQ(message.sum_ranks(), 1u);
  EXPECT_EQ(message.scale_layout(), v1::SCALE_LAYOUT_COLUMN_MAJOR);
  EXPECT_EQ(message.range_format(), v1::RANGE_FORMAT_PACKED64);
  ASSERT_EQ(message.more_formats_size(), 2);
  EXPECT_EQ(message.more_formats(0).payload(), v1::PAYLOAD_BF16);
  EXPECT_EQ(message.more_formats(0).scale_format(), v1::SCALE_FORMAT_UNSPECIFIED) << "it has no scales";
  EXPECT_EQ(message.more_formats(1).payload(), v1::PAYLOAD_FP8);
  EXPECT_EQ(message.more_formats(1).scale_format(), v1::SCALE_FORMAT_UE8M0);
}

TEST(Messages, EveryEnumeratorOfAShapeHasItsOwn) {
  abi::GroupShape of = shape();
  const auto payload = [&](abi::Payload value) {
    of.payload = value;
    return message_of(of);
  };
  EXPECT_EQ(payload(abi::Payload::kBf16).payload(), v1::PAYLOAD_BF16);
  EXPECT_EQ(payload(abi::Payload::kBf16).scale_format(), v1::SCALE_FORMAT_UNSPECIFIED) << "it has no scales";
  EXPECT_EQ(payload(abi::Payload::kBf16).scale_layout(), v1::SCALE_LAYOUT_COLUMN_MAJOR)
      << "another format has scales";
  of.num_more_formats = 0;
  EXPECT_EQ(payload(abi::Payload::kBf16).scale_layout(), v1::SCALE_LAYOUT_UNSPECIFIED);
  EXPECT_EQ(payload(abi::Payload::kOpaque).payload(), v1::PAYLOAD_OPAQUE);
  EXPECT_EQ(payload(abi::Payload::kFp8).payload(), v1::PAYLOAD_FP8);
  const auto scales = [&](abi::ScaleFormat value) {
    of.scale_format = value;
    return message_of(of).scale_format();
  };
  EXPECT_EQ(scales(abi::ScaleFormat::kFloat32), v1::SCALE_FORMAT_FLOAT32);
  EXPECT_EQ(scales(abi::ScaleFormat::kFloat32Pow2), v1::SCALE_FORMAT_FLOAT32_POW2);
  const auto layout = [&](abi::Layout value) {
    of.layout = value;
    return message_of(of);
  };
  EXPECT_EQ(layout(abi::Layout::kCompact).layout(), v1::LAYOUT_COMPACT);
  EXPECT_EQ(layout(abi::Layout::kCompact).range_format(), v1::RANGE_FORMAT_UNSPECIFIED);
  EXPECT_EQ(layout(abi::Layout::kExpert).layout(), v1::LAYOUT_EXPERT);
  EXPECT_EQ(layout(abi::Layout::kExpert).max_recv_rows(), 9000u) << "per expert";
  of.index_type = abi::IndexType::kInt32;
  of.policy = abi::LossPolicy::kDegrade;
  EXPECT_EQ(message_of(of).index_type(), v1::INDEX_TYPE_INT32);
  EXPECT_EQ(message_of(of).policy(), v1::LOSS_POLICY_DEGRADE);
}

TEST(Messages, OptionsAreOrderedByKey) {
  const v1::GetConfigResponse config = message_of({{"limits.max_sessions", "64", "file", true},
                                                   {"devices.host", "2", "flag", false},
                                                   {"access.default", "allow", "default", true},
                                                   {"daemon.socket", "/s", "environment", false}});
  ASSERT_EQ(config.entries_size(), 4);
  EXPECT_EQ(config.entries(0).key(), "access.default");
  EXPECT_EQ(config.entries(0).origin(), v1::CONFIG_ORIGIN_DEFAULT);
  EXPECT_EQ(config.entries(1).key(), "daemon.socket");
  EXPECT_EQ(config.entries(1).origin(), v1::CONFIG_ORIGIN_ENVIRONMENT);
  EXPECT_EQ(config.entries(2).value(), "2");
  EXPECT_EQ(config.entries(2).origin(), v1::CONFIG_ORIGIN_FLAG);
  EXPECT_FALSE(config.entries(2).reloadable());
  EXPECT_EQ(config.entries(3).origin(), v1::CONFIG_ORIGIN_FILE);
  EXPECT_TRUE(config.entries(3).reloadable());
}

TEST(Messages, AHistogramTellsItsBucketsAndPercentiles) {
  const auto histogram = std::make_unique<abi::Histogram>();
  EXPECT_EQ(message_of(*histogram).DebugString(), "") << "nothing has been counted";
  histogram->buckets[abi::histogram_bucket(3)] = 1;
  histogram->buckets[abi::histogram_bucket(200)] = 2;
  const v1::Histogram message = message_of(*histogram);
  EXPECT_EQ(message.count(), 3u);
  EXPECT_GE(message.p50_us(), 192u);
  EXPECT_LE(message.p50_us(), 214u);
  ASSERT_EQ(message.buckets_size(), 2);
  EXPECT_EQ(message.buckets(0).from_us(), 3u);
  EXPECT_EQ(message.buckets(1).from_us(), 192u);
  EXPECT_EQ(message.buckets(1).count(), 2u);
}

constexpr std::uint64_t kUsNs = 1000;

void fill(abi::OpView& op, std::uint64_t ticket, std::uint64_t op_index) {
  op.session_id = 11;
  op.group_id = 9;
  op.op_index = op_index;
  op.submit_ns = 100 * kUsNs;
  op.op = abi::Op::kDispatch;
  op.rank = 1;
  op.slot = 2;
  op.num_tokens = 128;
  op.stage = static_cast<std::uint32_t>(abi::OpStage::kWaitReady);
  op.waiting_for = 3;
  op.epoch = 4;
  op.seen_ns = 102 * kUsNs;
  op.deadline_ns = 5000 * kUsNs;
  op.waiting_since_ns = 600 * kUsNs;
  op.stage_ns[1] = 103 * kUsNs;
  op.stage_ns[2] = 99 * kUsNs;
  op.ticket = ticket;
}

TEST(Messages, AnOperationHasEveryField) {
  const auto op = std::make_unique<abi::OpView>();
  v1::ListOperationsResponse list;
  add_operation(list, *op, "host:0", 1500 * kUsNs);
  EXPECT_EQ(list.operations_size(), 0) << "it is free";
  fill(*op, 500, 77);
  add_operation(list, *op, "host:0", 1500 * kUsNs);
  ASSERT_EQ(list.operations_size(), 1);
  const v1::Operation& operation = list.operations(0);
  EXPECT_EQ(operation.device(), "host:0");
  EXPECT_EQ(operation.session_id(), 11u);
  EXPECT_EQ(operation.group_id(), 9u);
  EXPECT_EQ(operation.ticket(), 500u);
  EXPECT_EQ(operation.op_index(), 77u);
  EXPECT_EQ(operation.op(), v1::OPERATION_KIND_DISPATCH);
  EXPECT_EQ(operation.stage(), v1::OPERATION_STAGE_WAIT_READY);
  EXPECT_EQ(operation.rank(), 1u);
  EXPECT_EQ(operation.slot(), 2u);
  EXPECT_EQ(operation.num_tokens(), 128u);
  EXPECT_EQ(operation.waiting_for(), 3);
  EXPECT_EQ(operation.age_us(), 1400u);
  EXPECT_EQ(operation.id(), "11:500");
  EXPECT_EQ(operation.epoch(), 4u);
  EXPECT_EQ(operation.waiting_us(), 900u);
  EXPECT_EQ(operation.deadline_in_us(), 3500);
  ASSERT_EQ(operation.stages_size(), 3);
  EXPECT_EQ(operation.stages(0).stage(), "seen");
  EXPECT_EQ(operation.stages(0).after_us(), 2u);
  EXPECT_EQ(operation.stages(1).stage(), "planning");
  EXPECT_EQ(operation.stages(1).after_us(), 3u);
  EXPECT_EQ(operation.stages(2).stage(), "wait_ready");
  EXPECT_EQ(operation.stages(2).after_us(), 0u) << "never negative";
  EXPECT_FALSE(operation.engine_stopped());
}

TEST(Messages, AnOperationOfAStoppedEngineWaitsForNobodyThatIsKnown) {
  v1::Operation operation;
  operation.set_stage(v1::OPERATION_STAGE_WAIT_READY);
  operation.set_waiting_for(3);
  operation.set_waiting_us(900);
  operation.set_far_wait("a credit for rows of rank 3 on node-b");
  mark_stopped(operation);
  EXPECT_TRUE(operation.engine_stopped());
  EXPECT_EQ(operation.stage(), v1::OPERATION_STAGE_WAIT_READY) << "as it was";
  EXPECT_EQ(operation.waiting_for(), -1);
  EXPECT_EQ(operation.waiting_us(), 0u);
  EXPECT_EQ(operation.far_wait(), "");
}

TEST(Messages, WhatAPageSaysOfKindAndStageIsNotBelieved) {
  const auto op = std::make_unique<abi::OpView>();
  fill(*op, 500, 77);
  v1::ListOperationsResponse list;
  for (const std::uint32_t value : {1u, 2u, 3u, 4u, 5u, 6u, 77u}) {
    op->op = static_cast<abi::Op>(value);
    op->stage = value;
    add_operation(list, *op, "host:0", 0);
  }
  ASSERT_EQ(list.operations_size(), 7);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(list.operations(i).op(), i + 1);
  for (int i = 3; i < 7; ++i) EXPECT_EQ(list.operations(i).op(), v1::OPERATION_KIND_UNSPECIFIED);
  for (int i = 0; i < 5; ++i) EXPECT_EQ(list.operations(i).stage(), i + 1);
  for (int i = 5; i < 7; ++i) EXPECT_EQ(list.operations(i).stage(), v1::OPERATION_STAGE_UNSPECIFIED);
}

TEST(Messages, OperationsAreOrderedByGroupAndNumber) {
  const auto op = std::make_unique<abi::OpView>();
  v1::ListOperationsResponse list;
  for (const std::uint64_t op_index : {9u, 7u, 8u}) {
    fill(*op, 500, op_index);
    add_operation(list, *op, "host:0", 0);
  }
  op->group_id = 1;
  add_operation(list, *op, "host:0", 0);
  sort(list);
  EXPECT_EQ(list.operations(0).group_id(), 1u);
  for (int i = 1; i < 4; ++i) EXPECT_EQ(list.operations(i).op_index(), 6u + static_cast<unsigned>(i));
}

void fill(abi::StatisticsRow& row, std::uint32_t rank) {
  row.session_id = 11 + rank;
  row.group_id = 9;
  row.rank = rank;
  for (const auto& [op, count] : {std::pair(1, 5), std::pair(2, 100), std::pair(3, 90)})
    row.operations[op] = static_cast<std::uint64_t>(count);
  row.ended[0] = 190;
  row.ended[static_cast<std::size_t>(StatusCode::kRankLost)] = 3;
  row.refused[static_cast<std::size_t>(StatusCode::kInvalidArgument)] = 2;
  row.bytes_dispatched = 1 << 20;
  row.bytes_combined = 1 << 10;
  row.ran.buckets[abi::histogram_bucket(100)] = 98;
  row.ran.buckets[abi::histogram_bucket(5000)] = 2;
  row.key = 1 + rank;
}

TEST(Messages, StatisticsOfAGroupAreTheSumOfItsRanks) {
  const auto page = std::make_unique<abi::EnginePage>();
  const auto other = std::make_unique<abi::EnginePage>();
  fill(page->sessions.rows[0], 1);
  fill(page->members.rows[0], 1);
  fill(other->sessions.rows[3], 0);
  fill(other->members.rows[3], 0);
  const std::string names[] = {"host:1", "host:0"};
  const v1::GetStatisticsResponse all = message_of({{names[0], *page}, {names[1], *other}});
  ASSERT_EQ(all.sessions_size(), 2);
  EXPECT_EQ(all.sessions(0).session_id(), 11u);
  EXPECT_EQ(all.sessions(0).device(), "host:0");
  EXPECT_EQ(all.sessions(1).session_id(), 12u);
  const v1::Statistics& one = all.sessions(0).statistics();
  EXPECT_EQ(one.noops(), 5u);
  EXPECT_EQ(one.dispatches(), 100u);
  EXPECT_EQ(one.combines(), 90u);
  EXPECT_EQ(one.completed(), 190u);
  ASSERT_EQ(one.failed_size(), 1);
  EXPECT_EQ(one.failed(0).status(), "RANK_LOST");
  ASSERT_EQ(one.refused_size(), 1);
  EXPECT_EQ(one.refused(0).status(), "INVALID_ARGUMENT");
  EXPECT_EQ(one.bytes_dispatched(), 1u << 20);
  EXPECT_EQ(one.bytes_combined(), 1u << 10);
  EXPECT_EQ(one.done().count(), 100u);
  EXPECT_NEAR(static_cast<double>(one.done().p50_us()), 100, 25);
  EXPECT_NEAR(static_cast<double>(one.done().p99_us()), 5000, 1250);
  ASSERT_EQ(all.ranks_size(), 2);
  EXPECT_EQ(all.ranks(0).rank(), 0u);
  EXPECT_EQ(all.ranks(1).rank(), 1u);
  EXPECT_EQ(all.ranks(1).device(), "host:1");
  ASSERT_EQ(all.groups_size(), 1);
  EXPECT_EQ(all.groups(0).group_id(), 9u);
  const v1::Statistics& sum = all.groups(0).statistics();
  EXPECT_EQ(sum.dispatches(), 200u);
  EXPECT_EQ(sum.done().count(), 200u);
  EXPECT_EQ(sum.failed(0).count(), 6u);
  EXPECT_EQ(sum.bytes_combined(), 2u << 10);
}

TEST(FarMessages, ATableBecomesEnginesInOrder) {
  const auto page = std::make_unique<abi::EnginePage>();
  abi::FarTable& table = page->far;
  table.carrier.store("UCX 1.13.1");
  table.interfaces.store("eth0");
  table.promised_bytes = 10;
  table.max_bytes = 20;
  const auto fill_row = [&](std::size_t at, std::uint32_t node, const char* name,
                            abi::FarState state) -> auto& {
    abi::FarRow& row = table.rows[at];
    row.key = at + 1;
    row.node = node;
    row.device_index = 3;
    row.state = static_cast<std::uint32_t>(state);
    row.node_name.store(name);
    return row;
  };
  fill_row(0, 2, "node-c", abi::FarState::kDown).reason.store("it is down");
  abi::FarRow& b = fill_row(7, 1, "node-b", abi::FarState::kConnected);
  b.round_trip_ns = 43'001;
  b.answered_ns = 3'700'000'000;
  b.counters.bytes_sent[static_cast<std::size_t>(abi::FarBatch::kAsks)] = 77;
  b.counters.dropped[4] = 5;
  b.counters.longest_stall_ns = 2'000;
  b.counters.longest_stall_rank = 6;
  table.rows[abi::kFarRows].key = 99;  // of all that found no row
  table.rows[abi::kFarRows].counters.bytes_received[0] = 8;

  v1::ListFarEnginesResponse list;
  v1::NetworkEngine& engine = *list.add_engines();
  engine.set_device("host:0");
  add_far_engines(list, engine, table, 5'000'000'000);
  sort(list);
  EXPECT_EQ(engine.carrier(), "UCX 1.13.1");
  EXPECT_EQ(engine.interfaces(), "eth0");
  EXPECT_EQ(engine.promised_bytes(), 10u);
  EXPECT_EQ(engine.max_bytes(), 20u);
  EXPECT_EQ(engine.unlisted_bytes_received(), 8u);
  ASSERT_EQ(list.far_engines_size(), 2);
  const v1::FarEngine& first = list.far_engines(0);
  EXPECT_EQ(first.node(), "node-b");
  EXPECT_EQ(first.far_device(), "host:3");
  EXPECT_EQ(first.state(), v1::FAR_ENGINE_STATE_CONNECTED);
  EXPECT_EQ(first.round_trip_us(), 44u);
  EXPECT_EQ(first.asks().bytes_sent(), 77u);
  EXPECT_EQ(first.rows().bytes_sent(), 0u);
  ASSERT_EQ(first.dropped_size(), 1);
  EXPECT_EQ(first.dropped(0).reason(), "broken");
  EXPECT_EQ(first.dropped(0).count(), 5u);
  EXPECT_EQ(first.longest_stall().us(), 2u);
  EXPECT_EQ(first.longest_stall().rank(), 6u);
  const v1::FarEngine& second = list.far_engines(1);
  EXPECT_EQ(second.node(), "node-c");
  EXPECT_EQ(second.state(), v1::FAR_ENGINE_STATE_DOWN);
  EXPECT_EQ(second.reason(), "it is down");
  EXPECT_FALSE(second.has_round_trip_us());
  EXPECT_FALSE(second.has_longest_stall());
}

TEST(Messages, FarEnginesThatAreConnectedToAreNamed) {
  const auto table = std::make_unique<abi::FarTable>();
  EXPECT_EQ(connecting_to(*table), "");
  const auto add = [&](std::size_t at, std::uint32_t node, std::uint32_t device, abi::FarState state) {
    abi::FarRow& row = table->rows[at];
    row.key = at + 1;
    row.node = node;
    row.device_index = device;
    row.state = static_cast<std::uint32_t>(state);
    row.node_name.store("node-" + std::to_string(node));
  };
  add(0, 1, 0, abi::FarState::kConnected);
  add(1, 2, 0, abi::FarState::kDown);
  add(2, 0, 0, abi::FarState::kConnecting);  // several share it
  EXPECT_EQ(connecting_to(*table), "");
  add(3, 2, 1, abi::FarState::kConnecting);
  EXPECT_EQ(connecting_to(*table), "host:1 of node-2");
  add(4, 3, 0, abi::FarState::kConnecting);
  add(5, 4, 2, abi::FarState::kConnecting);
  EXPECT_EQ(connecting_to(*table), "host:1 of node-2, host:0 of node-3, host:2 of node-4");
  add(abi::kFarRows, 5, 0, abi::FarState::kConnecting);
  EXPECT_EQ(connecting_to(*table), "host:1 of node-2, host:0 of node-3, host:2 of node-4 and 1 more");
  table->rows[3].key = 0;
  EXPECT_EQ(connecting_to(*table), "host:0 of node-3, host:2 of node-4, host:0 of node-5");
}

}  // namespace
}  // namespace epd::supervisor
