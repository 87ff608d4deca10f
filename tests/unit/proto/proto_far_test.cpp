// The far protocol: each type's lawful header, and each field that can be wrong, by its reason.
#include "proto/far.h"

#include <gtest/gtest.h>
#include <cstring>
#include <functional>
#include <set>
#include <string>
#include <vector>

namespace epd::abi {
namespace {

std::span<const std::byte> bytes_of(const auto& value) {
  return std::as_bytes(std::span(&value, 1));
}

FarHeader header_of(FarType type) {
  FarHeader h{};
  h.magic = kFarMagic;
  h.version = kFarVersion;
  h.type = type;
  h.token = 0x0123456789abcdef;
  h.from_rank = h.to_rank = kFarNoRank;
  if (type == FarType::kPing || type == FarType::kPong) {
    h.time_ns = 99;
    return h;
  }
  h.group = 5;
  h.time_ns = 50;
  h.number = 8;
  h.tag = far_epoch_tag(3);
  if (type == FarType::kGreeting) h.body_bytes = sizeof(FarGreeting);
  if (type == FarType::kRefuse) h.body_bytes = sizeof(FarRefusal);
  if (type == FarType::kGreeting || type == FarType::kRefuse) return h;
  h.from_rank = 7;
  h.to_rank = 2;
  h.row_credits = 1;
  if (type == FarType::kCredit) return h;
  h.tag = op_tag(3, 11);
  switch (type) {
    case FarType::kAnnounce:
      h.records = 12;
      h.body_bytes = sizeof(FarAnnouncement) + 12 * sizeof(std::uint32_t);
      break;
    case FarType::kDone: h.batches = 4; break;
    default:
      h.batch = 2;
      h.records = 10;
      h.body_bytes = 10 * 160;
  }
  return h;
}

FarReason read(const FarHeader& h) {
  FarHeader out{};
  return read_far_header(bytes_of(h), h.body_bytes, out);
}

constexpr FarType kTypes[] = {FarType::kGreeting, FarType::kAnnounce, FarType::kRows,   FarType::kAsk,
                              FarType::kSums,     FarType::kDone,     FarType::kCredit, FarType::kPing,
                              FarType::kPong,     FarType::kRefuse};

TEST(Far, EveryTypeIsReadAsItWasWritten) {
  for (FarType type : kTypes) {
    const FarHeader h = header_of(type);
    FarHeader out{};
    EXPECT_EQ(read_far_header(bytes_of(h), h.body_bytes, out), FarReason::kNone) << static_cast<int>(type);
    EXPECT_EQ(std::memcmp(&out, &h, sizeof(h)), 0);
  }
}

TEST(Far, WhatIsWrongIsNamed) {
  struct Wrong {
    FarType type;
    FarReason reason;
    std::function<void(FarHeader&)> change;
  };
  const Wrong wrongs[] = {
      {FarType::kRows, FarReason::kMagic, [](FarHeader& h) { h.magic ^= 1; }},
      {FarType::kRows, FarReason::kVersion, [](FarHeader& h) { ++h.version; }},
      {FarType::kRows, FarReason::kType, [](FarHeader& h) { h.type = FarType{0}; }},
      {FarType::kRows, FarReason::kType, [](FarHeader& h) { h.type = FarType{11}; }},
      {FarType::kRows, FarReason::kFlags, [](FarHeader& h) { h.flags = 2; }},
      {FarType::kDone, FarReason::kFlags, [](FarHeader& h) { h.flags = kFarDone; }},
      {FarType::kRows, FarReason::kGroup, [](FarHeader& h) { h.group = 0; }},
      {FarType::kPing, FarReason::kGroup, [](FarHeader& h) { h.group = 1; }},
      {FarType::kRows, FarReason::kTag, [](FarHeader& h) { h.tag = far_epoch_tag(3); }},
      {FarType::kRows, FarReason::kTag, [](FarHeader& h) { h.tag = op_tag(0, 11); }},
      {FarType::kRows, FarReason::kTag, [](FarHeader& h) { h.tag = op_tag(kLastEpoch + 1, 11); }},
      {FarType::kCredit, FarReason::kTag, [](FarHeader& h) { h.tag = op_tag(3, 11); }},
      {FarType::kPing, FarReason::kTag, [](FarHeader& h) { h.tag = 1; }},
      {FarType::kRows, FarReason::kRanks, [](FarHeader& h) { h.from_rank = kMaxRanks; }},
      {FarType::kRows, FarReason::kRanks, [](FarHeader& h) { h.to_rank = kFarNoRank; }},
      {FarType::kRows, FarReason::kRanks, [](FarHeader& h) { h.to_rank = h.from_rank; }},
      {FarType::kGreeting, FarReason::kRanks, [](FarHeader& h) { h.from_rank = 0; }},
      {FarType::kRows, FarReason::kBatch, [](FarHeader& h) { h.batch = kMaxFarBatches; }},
      {FarType::kDone, FarReason::kBatch, [](FarHeader& h) { h.batch = 1; }},
      {FarType::kRows, FarReason::kBatches, [](FarHeader& h) { h.batches = 3; }},
      {FarType::kRows, FarReason::kBatches, [](FarHeader& h) { h.flags = kFarDone, h.batches = 2; }},
      {FarType::kDone, FarReason::kBatches, [](FarHeader& h) { h.batches = kMaxFarBatches + 1; }},
      {FarType::kRows, FarReason::kRecords, [](FarHeader& h) { h.records = 0; }},
      {FarType::kRows, FarReason::kRecords, [](FarHeader& h) { h.records = 3; }},
      {FarType::kAnnounce, FarReason::kRecords, [](FarHeader& h) { ++h.records; }},
      {FarType::kAnnounce, FarReason::kRecords, [](FarHeader& h) { h.records += 1u << 30; }},
      {FarType::kDone, FarReason::kRecords, [](FarHeader& h) { h.records = 1; }},
      {FarType::kRows, FarReason::kBodyBytes, [](FarHeader& h) { h.body_bytes = kMaxFarBodyBytes + 10; }},
      {FarType::kDone, FarReason::kBodyBytes, [](FarHeader& h) { h.body_bytes = 1; }},
      {FarType::kGreeting, FarReason::kBodyBytes, [](FarHeader& h) { --h.body_bytes; }},
      {FarType::kPing, FarReason::kCredits, [](FarHeader& h) { h.sum_credits = 1; }},
      {FarType::kRows, FarReason::kTime, [](FarHeader& h) { h.time_ns = 0; }},
      {FarType::kRows, FarReason::kNumber, [](FarHeader& h) { h.number = 0; }},
      {FarType::kPing, FarReason::kNumber, [](FarHeader& h) { h.number = 1; }},
  };
  for (const Wrong& wrong : wrongs) {
    FarHeader h = header_of(wrong.type);
    wrong.change(h);
    EXPECT_STREQ(far_reason_name(read(h)), far_reason_name(wrong.reason))
        << "type " << static_cast<int>(wrong.type);
  }
}

TEST(Far, TheHeaderHas96BytesAndTheBodyThoseItSays) {
  const FarHeader h = header_of(FarType::kRows);
  FarHeader out{};
  const std::vector<std::byte> longer(sizeof(h) + 1);
  for (std::size_t bytes : {std::size_t{0}, sizeof(h) - 1, sizeof(h) + 1})
    EXPECT_EQ(read_far_header(std::span(longer).first(bytes), 0, out), FarReason::kHeaderBytes);
  EXPECT_EQ(read_far_header(bytes_of(h), h.body_bytes - 1, out), FarReason::kBodyBytes);
  EXPECT_EQ(read_far_header(bytes_of(h), h.body_bytes + (std::uint64_t{1} << 32), out),
            FarReason::kBodyBytes);
}

TEST(Far, RecordsHaveTheStrideOfTheGroup) {
  FarHeader h = header_of(FarType::kRows);
  EXPECT_EQ(check_far_records(h, 160), FarReason::kNone);
  EXPECT_EQ(check_far_records(h, 176), FarReason::kRecords);
  // Records of any group are aligned, and have space for all parts.
  EXPECT_EQ(far_row_bytes(7168 + 224, 8), 7168u + 224 + 8 * 12 + 4 + 12);
  EXPECT_EQ(far_ask_bytes(8), 8u + 128 + 8);
  EXPECT_EQ(far_sum_bytes(14336, 0), 14336u + 8 + 8);
  EXPECT_EQ(far_row_bytes(kMaxOpaqueBytes, kMaxTopk) % kFarRecordAlign, 0u);
  EXPECT_LE(far_row_bytes(kMaxOpaqueBytes, kMaxTopk), kMaxFarBodyBytes);
}

TEST(Far, BodiesAreReadOrTheirReasonIs) {
  FarGreeting greeting{};
  greeting.incarnation = 3;
  greeting.check = 2;
  std::strcpy(greeting.node, "node-a");
  FarGreeting greeting_out{};
  EXPECT_EQ(read_far_greeting(bytes_of(greeting), greeting_out), FarReason::kNone);
  EXPECT_STREQ(greeting_out.node, "node-a");
  EXPECT_EQ(read_far_greeting(bytes_of(greeting).first(sizeof(greeting) - 1), greeting_out),
            FarReason::kBodyBytes);
  greeting.heard = 1;
  EXPECT_EQ(read_far_greeting(bytes_of(greeting), greeting_out), FarReason::kNone);
  greeting.heard = 2;
  EXPECT_EQ(read_far_greeting(bytes_of(greeting), greeting_out), FarReason::kReserved);
  greeting.heard = 0;
  for (const std::uint64_t check : {std::size_t{0}, std::size(kFarCheckNames) + 1, std::size_t{1} << 32}) {
    greeting.check = check;
    EXPECT_EQ(read_far_greeting(bytes_of(greeting), greeting_out), FarReason::kReserved);
  }
  greeting.check = 1;
  greeting.node[20] = 'x';
  EXPECT_EQ(read_far_greeting(bytes_of(greeting), greeting_out), FarReason::kText);
  std::memset(greeting.node, 'x', sizeof(greeting.node));
  EXPECT_EQ(read_far_greeting(bytes_of(greeting), greeting_out), FarReason::kText);

  FarAnnouncement announcement{};
  announcement.num_tokens = 9;
  FarAnnouncement announcement_out{};
  EXPECT_EQ(read_far_announcement(bytes_of(announcement), announcement_out), FarReason::kNone);
  EXPECT_EQ(announcement_out.num_tokens, 9u);
  EXPECT_EQ(read_far_announcement({}, announcement_out), FarReason::kBodyBytes);
  announcement.reserved = 1;
  EXPECT_EQ(read_far_announcement(bytes_of(announcement), announcement_out), FarReason::kReserved);

  FarRefusal refusal{};
  refusal.status = StatusCode::kVersionMismatch;
  std::strcpy(refusal.text, "UCX 1.13 and 1.22");
  FarRefusal refusal_out{};
  EXPECT_EQ(read_far_refusal(bytes_of(refusal), refusal_out), FarReason::kNone);
  EXPECT_EQ(refusal_out.status, StatusCode::kVersionMismatch);
  for (std::int32_t status : {0, -1, kNumStatusCodes}) {
    std::memcpy(&refusal, &status, sizeof(status));
    EXPECT_EQ(read_far_refusal(bytes_of(refusal), refusal_out), FarReason::kStatus);
  }
  EXPECT_EQ(read_far_refusal({}, refusal_out), FarReason::kBodyBytes);
}

TEST(Far, EveryReasonHasAName) {
  std::set<std::string> names;
  for (std::uint32_t i = 0; i < kNumFarReasons; ++i) names.insert(far_reason_name(static_cast<FarReason>(i)));
  EXPECT_EQ(names.size(), kNumFarReasons);
  EXPECT_STREQ(far_reason_name(static_cast<FarReason>(kNumFarReasons)), "unknown");
  EXPECT_EQ(names.count("unknown"), 0u);
}

}  // namespace
}  // namespace epd::abi
