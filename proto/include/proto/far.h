// The far protocol: messages between engines of different nodes. One message of a transport is a header of 96
// bytes and a body. Any order: each message names its place, and completeness is a count. The bytes come from
// a network, so that nothing is used before it has been read by one of the functions below, which copy first.
// The owner of the group judges the ranks, epochs and tokens that a message names.
//
//   type      from → to                  body
//   greeting  engine → engine            FarGreeting
//   announce  rank → far gateway         FarAnnouncement, counts[records] of the ranks and experts there
//   rows      rank → far gateway         records: FarRowRecord
//   ask       owner → far gateway        records: FarAskRecord
//   sums      gateway → owner            records: FarSumRecord
//   done      rank → far gateway         none; `batches` is how many there are
//   credit    rank → rank                none. Without credits: nothing came after the message before
//   ping      engine → engine            none; `time_ns` is the sender's
//   pong      engine → engine            none; the ping's `time_ns`
//   refuse    engine → engine            FarRefusal: why a group's messages are not taken
//
// `to_rank` is the gateway of `from_rank` there, or the other way round. Credits ride on any message between
// ranks. `done` rides on a batch as kFarDone.
//
// Checksums are CRC-32C. That of the header is checked before the header is read (far/seal.h). FarCheck says
// what else is checked; both sides of a group must have the same, which greetings compare.
#pragma once

#include "proto/exchange.h"
#include "proto/status.h"

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <span>
#include <string_view>
#include <type_traits>

namespace epd::abi {

inline constexpr std::uint32_t kFarMagic = 0x46445045;  // "EPDF"
inline constexpr std::uint8_t kFarVersion = 3;
inline constexpr std::uint16_t kFarNoRank = 0xffff;  // between engines
inline constexpr std::uint32_t kMaxFarBodyBytes = 16u << 20;
inline constexpr std::uint32_t kMaxFarBatches = 1u << 24;  // of an operation, at one gateway
inline constexpr std::size_t kFarNodeBytes = 64;
inline constexpr std::size_t kMaxFarAddressBytes = 1024;  // of an engine's transport
inline constexpr std::size_t kFarTextBytes = 256;

enum class FarType : std::uint8_t {
  kGreeting = 1,
  kAnnounce = 2,
  kRows = 3,
  kAsk = 4,
  kSums = 5,
  kDone = 6,
  kCredit = 7,
  kPing = 8,
  kPong = 9,
  kRefuse = 10,
};

// In plural, for people.
constexpr const char* far_type_name(FarType type) {
  constexpr const char* names[] = {"greetings", "announcements", "rows",  "asks",  "sums",
                                   "ends",      "credits",       "pings", "pongs", "refusals"};
  const auto index = static_cast<std::size_t>(type) - 1;
  return index < std::size(names) ? names[index] : "messages";
}

enum FarFlags : std::uint16_t {
  kFarDone = 1u << 0,  // rows, ask, sums: all batches have been handed out, `batches` is valid
};

// How receivers check that bodies are as they were sent (network.check). Headers and the bodies of greetings,
// announcements and refusals have checksums in any case.
enum class FarCheck : std::uint32_t {
  kHeaders = 1,  // rows, asks and sums are not checked
  kCrc = 2,      // each of their records ends with its checksum
  kMac = 3,      // every message of a group has a code that only who knows the epoch's key can make
};
inline constexpr const char* kFarCheckNames[] = {"headers", "crc", "mac"};

constexpr bool is_far_check(std::uint64_t value) {
  return value >= static_cast<std::uint64_t>(FarCheck::kHeaders) && value <= std::size(kFarCheckNames);
}
constexpr const char* far_check_name(FarCheck check) {
  const auto value = static_cast<std::uint32_t>(check);
  return is_far_check(value) ? kFarCheckNames[value - 1] : "unknown";
}
// 0: of no check.
constexpr std::uint32_t far_check_of(std::string_view name) {
  for (std::uint32_t i = 0; i < std::size(kFarCheckNames); ++i) {
    if (name == kFarCheckNames[i]) return i + 1;
  }
  return 0;
}

struct FarHeader {
  std::uint32_t magic;
  std::uint8_t version;
  FarType type;
  std::uint16_t flags;
  std::uint64_t token;      // SipHash of the two engines under the epoch's key
  std::uint64_t tag;        // op_tag; without an operation: far_epoch_tag; ping, pong: 0
  std::uint64_t group;      // ping, pong: 0
  std::uint16_t from_rank;  // kFarNoRank: between engines
  std::uint16_t to_rank;
  std::uint32_t batch;  // of this operation, from 0
  std::uint32_t records;
  std::uint32_t body_bytes;
  std::uint16_t row_credits;  // given back: batches of rows and asks
  std::uint16_t sum_credits;  // batches of sums
  std::uint32_t batches;      // of this operation: done, kFarDone
  std::uint64_t time_ns;      // ping, pong: the ping's; of a group: when its sender began the epoch, never 0
  std::uint64_t number;       // among those to that engine since then, from 1; greetings count by themselves
  std::uint8_t mac[16];       // kMac: of all bytes before and of the body; else 0
  std::uint32_t body_crc;     // of a batch: of its records' CRCs; 0: no body, or one that is not checked
  std::uint32_t header_crc;   // of all bytes before
};
static_assert(sizeof(FarHeader) == 96 && std::is_trivially_copyable_v<FarHeader>);
static_assert(std::has_unique_object_representations_v<FarHeader>, "no padding");

// The tag of a message about an epoch and not about one of its operations.
constexpr std::uint64_t far_epoch_tag(std::uint64_t epoch) {
  return epoch << kTagIndexBits;
}

// ---- bodies ------------------------------------------------------------------------------------

struct FarGreeting {
  std::uint64_t incarnation;   // of the sender's engine
  std::uint64_t shape_digest;  // of the group's shape and view: both sides must have the same
  std::uint64_t view_digest;
  std::uint64_t heard;  // 1: the receiver's greeting of this epoch has come, and none is asked for
  std::uint64_t check;  // FarCheck of the sender
  char node[kFarNodeBytes];
  char version[kFarNodeBytes];  // epd's and UCX's, for people
};

struct FarAnnouncement {
  OpAnnouncement operation;
  std::uint32_t num_tokens;  // that go there; combine: that are asked for
  std::uint32_t reserved;
};

struct FarRefusal {
  StatusCode status;
  char text[kFarTextBytes];
};

// Rows: the row, its scales, then choices[K], then the token, at a stride of far_row_bytes().
struct FarChoice {
  std::int32_t expert;     // -1: none
  std::uint32_t position;  // among the source's rows at that rank or expert
  float weight;
};
// Ask: the token and how many entries it has, then entries[K], at a stride of far_ask_bytes().
struct FarAsk {
  std::uint32_t token;
  std::uint32_t num_entries;
};
struct FarAskEntry {
  std::uint32_t target;  // rank or expert
  std::uint32_t position;
  std::uint32_t choices;  // bit k: the row carries choice k
  float weight;
};
// Sums: the sum or row, then weights[K] that come back, then this, at a stride of far_sum_bytes().
struct FarSum {
  std::uint32_t token;
  std::uint32_t domain;
};

inline constexpr std::uint64_t kFarRecordAlign = 16;
// A record ends with the CRC-32C of all its bytes before, those that fill it up included. Without kCrc: 0.
inline constexpr std::uint64_t kFarCrcBytes = sizeof(std::uint32_t);
// `row_bytes`: with scales.
constexpr std::uint64_t far_row_bytes(std::uint64_t row_bytes, std::uint32_t topk) {
  return align_up(row_bytes + topk * sizeof(FarChoice) + sizeof(std::uint32_t) + kFarCrcBytes,
                  kFarRecordAlign);
}
constexpr std::uint64_t far_ask_bytes(std::uint32_t topk) {
  return align_up(sizeof(FarAsk) + topk * sizeof(FarAskEntry) + kFarCrcBytes, kFarRecordAlign);
}
// `num_weights`: 0 or K.
constexpr std::uint64_t far_sum_bytes(std::uint64_t sum_bytes, std::uint32_t num_weights) {
  return align_up(sum_bytes + num_weights * sizeof(float) + sizeof(FarSum) + kFarCrcBytes, kFarRecordAlign);
}

// ---- reading -----------------------------------------------------------------------------------

enum class FarReason : std::uint32_t {
  kNone = 0,
  kHeaderBytes,  // not 96
  kMagic,
  kVersion,
  kType,
  kFlags,
  kGroup,
  kTag,
  kRanks,
  kBatch,
  kRecords,
  kBodyBytes,
  kCredits,
  kBatches,
  kTime,
  kNumber,
  kReserved,
  kText,  // not terminated, or with bytes after its end
  kStatus,
};
inline constexpr std::uint32_t kNumFarReasons = 19;

// The field that a reason is about; "none".
constexpr const char* far_reason_name(FarReason reason) {
  constexpr const char* names[kNumFarReasons] = {
      "none",    "header_bytes", "magic",   "version", "type", "flags",  "group",    "tag",  "ranks", "batch",
      "records", "bytes",        "credits", "batches", "time", "number", "reserved", "text", "status"};
  const auto index = static_cast<std::uint32_t>(reason);
  return index < kNumFarReasons ? names[index] : "unknown";
}

namespace detail {

// The fields that a type may have. All others are zero.
struct FarRule {
  bool ranks = false;      // from and to; and credits
  bool group = false;      // and an epoch in the tag
  bool operation = false;  // an index in the tag
  bool batch = false;      // records of an equal stride, kFarDone
  bool records = false;
  std::uint32_t least_body = 0;
  std::uint32_t most_body = 0;
};

constexpr FarRule far_rule(FarType type) {
  switch (type) {
    case FarType::kGreeting:
      return {false, true, false, false, false, sizeof(FarGreeting), sizeof(FarGreeting)};
    case FarType::kAnnounce:
      return {true, true, true, false, true, sizeof(FarAnnouncement), kMaxFarBodyBytes};
    case FarType::kRows:
    case FarType::kAsk:
    case FarType::kSums: return {true, true, true, true, true, 1, kMaxFarBodyBytes};
    case FarType::kDone: return {true, true, true, false, false, 0, 0};
    case FarType::kCredit: return {true, true, false, false, false, 0, 0};
    case FarType::kPing:
    case FarType::kPong: return {false, false, false, false, false, 0, 0};
    case FarType::kRefuse: return {false, true, false, false, false, sizeof(FarRefusal), sizeof(FarRefusal)};
  }
  return {};
}

constexpr FarReason check_far_place(const FarHeader& h, const FarRule& rule) {
  if ((h.group != 0) != rule.group) return FarReason::kGroup;
  const std::uint64_t epoch = epoch_of_tag(h.tag);
  const bool index = h.tag != far_epoch_tag(epoch);
  if ((epoch != 0) != rule.group || index != rule.operation || epoch > kLastEpoch) return FarReason::kTag;
  const bool ranks = h.from_rank < kMaxRanks && h.to_rank < kMaxRanks && h.from_rank != h.to_rank;
  const bool none = h.from_rank == kFarNoRank && h.to_rank == kFarNoRank;
  if (rule.ranks ? !ranks : !none) return FarReason::kRanks;
  return FarReason::kNone;
}

constexpr FarReason check_far_counts(const FarHeader& h, const FarRule& rule) {
  const bool done = h.type == FarType::kDone || (h.flags & kFarDone) != 0;
  if (rule.batch ? h.batch >= kMaxFarBatches : h.batch != 0) return FarReason::kBatch;
  if (done ? h.batches > kMaxFarBatches : h.batches != 0) return FarReason::kBatches;
  if ((h.flags & kFarDone) != 0 && h.batches <= h.batch) return FarReason::kBatches;
  if (!rule.records && h.records != 0) return FarReason::kRecords;
  if (rule.batch && (h.records == 0 || h.body_bytes % h.records != 0)) return FarReason::kRecords;
  if (h.type == FarType::kAnnounce && h.body_bytes != sizeof(FarAnnouncement) + std::uint64_t{4} * h.records)
    return FarReason::kRecords;
  const bool credits = h.row_credits != 0 || h.sum_credits != 0;
  if (!rule.ranks && credits) return FarReason::kCredits;
  if (rule.group && h.time_ns == 0) return FarReason::kTime;
  if ((h.number != 0) != rule.group) return FarReason::kNumber;
  return FarReason::kNone;
}

// Terminated, and zero from there: nothing rides after a text.
template <std::size_t N>
constexpr bool is_far_text(const char (&text)[N]) {
  std::size_t n = 0;
  while (n < N && text[n] != '\0') ++n;
  if (n == N) return false;
  while (n < N && text[n] == '\0') ++n;
  return n == N;
}

template <typename T>
FarReason copy_far_body(std::span<const std::byte> body, T& out) {
  if (body.size() < sizeof(T)) return FarReason::kBodyBytes;
  std::memcpy(&out, body.data(), sizeof(T));
  return FarReason::kNone;
}

}  // namespace detail

// The header of a message whose body has so many bytes; `out` is complete whatever the reason, unless it is
// kHeaderBytes. After kNone: each field is one that its type may have, and the body has body_bytes.
inline FarReason read_far_header(std::span<const std::byte> header, std::uint64_t body_bytes,
                                 FarHeader& out) {
  if (header.size() != sizeof(FarHeader)) return FarReason::kHeaderBytes;
  std::memcpy(&out, header.data(), sizeof(out));
  if (out.magic != kFarMagic) return FarReason::kMagic;
  if (out.version != kFarVersion) return FarReason::kVersion;
  if (out.type < FarType::kGreeting || out.type > FarType::kRefuse) return FarReason::kType;
  const detail::FarRule rule = detail::far_rule(out.type);
  if ((out.flags & ~(rule.batch ? std::uint32_t{kFarDone} : 0u)) != 0) return FarReason::kFlags;
  if (FarReason reason = detail::check_far_place(out, rule); reason != FarReason::kNone) return reason;
  if (out.body_bytes != body_bytes || body_bytes < rule.least_body || body_bytes > rule.most_body)
    return FarReason::kBodyBytes;
  return detail::check_far_counts(out, rule);
}

// Rows, ask, sums: `stride` as far_row_bytes() and the others say for the group.
constexpr FarReason check_far_records(const FarHeader& header, std::uint64_t stride) {
  return header.records * stride == header.body_bytes ? FarReason::kNone : FarReason::kRecords;
}

inline FarReason read_far_greeting(std::span<const std::byte> body, FarGreeting& out) {
  if (FarReason reason = detail::copy_far_body(body, out); reason != FarReason::kNone) return reason;
  if (out.heard > 1 || !is_far_check(out.check)) return FarReason::kReserved;
  return detail::is_far_text(out.node) && detail::is_far_text(out.version) ? FarReason::kNone
                                                                           : FarReason::kText;
}

// The counts follow it.
inline FarReason read_far_announcement(std::span<const std::byte> body, FarAnnouncement& out) {
  if (FarReason reason = detail::copy_far_body(body, out); reason != FarReason::kNone) return reason;
  return out.reserved == 0 ? FarReason::kNone : FarReason::kReserved;
}

inline FarReason read_far_refusal(std::span<const std::byte> body, FarRefusal& out) {
  std::int32_t status = 0;
  if (body.size() < sizeof(out)) return FarReason::kBodyBytes;
  std::memcpy(&status, body.data() + offsetof(FarRefusal, status), sizeof(status));
  if (status <= 0 || status >= kNumStatusCodes) return FarReason::kStatus;
  std::memcpy(&out, body.data(), sizeof(out));
  return detail::is_far_text(out.text) ? FarReason::kNone : FarReason::kText;
}

}  // namespace epd::abi
