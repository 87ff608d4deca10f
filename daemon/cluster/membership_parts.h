// Fields of what several messages have in common, and their limits.
#pragma once

#include "epd/v1/membership.pb.h"
#include "membership/actions.h"
#include "membership/events.h"
#include "membership_fields.h"
#include "proto/shape_rules.h"

#include <limits>
#include <string>

namespace epd::cluster {

namespace wire = v1::membership;

constexpr std::uint64_t kAny = std::numeric_limits<std::uint64_t>::max();
constexpr std::uint64_t kAnyWord = std::numeric_limits<std::uint32_t>::max();
constexpr std::uint64_t kMostNode = std::uint64_t{1} << 30;
constexpr std::uint64_t kMaxDevices = 1024;  // of a node
constexpr std::uint64_t kMostRank = abi::kMaxRanks - 1;
constexpr std::uint64_t kMostCode = kNumStatusCodes - 1;
constexpr std::size_t kMaxWireText = 1024;
constexpr std::size_t kMaxNameText = 253;    // of a node
constexpr std::size_t kMaxBoards = 65'536;   // ranks on one device
constexpr std::size_t kMaxReports = 65'536;  // groups of one node

template <typename Io>
void carry(Io& io, wire::EngineId& m, membership::EngineId& v) {
  EPD_NUMBER(node, v.node, kMostNode);
  EPD_NUMBER(device, v.device, kMaxDevices - 1);
}

template <typename Io>
void carry(Io& io, wire::SessionId& m, membership::SessionId& v) {
  EPD_NUMBER(node, v.node, kMostNode);
  EPD_NUMBER(number, v.number, kAny);
}

template <typename Io>
void carry(Io& io, wire::RequestId& m, membership::RequestId& v) {
  EPD_PART(session, v.session);
  EPD_NUMBER(number, v.number, kAnyWord);
}

template <typename Io>
void carry(Io& io, wire::Status& m, Status& v) {
  StatusCode code = v.code();
  std::string text = v.message();
  EPD_NUMBER(code, code, kMostCode);
  EPD_TEXT(text, text, kMaxWireText);
  v = Status(code, std::move(text));
}

template <typename Io>
void carry(Io& io, wire::RowFormat& m, abi::RowFormat& v) {
  EPD_NUMBER(payload, v.payload, kAnyWord);
  EPD_NUMBER(scale_format, v.scale_format, kAnyWord);
}

// Each field as it is: a client's shape is the registry's to judge.
template <typename Io>
void carry_unjudged(Io& io, wire::GroupShape& m, abi::GroupShape& v) {
  // [fields.py: GroupShape]
  EPD_NUMBER(num_ranks, v.num_ranks, kAnyWord);
  EPD_NUMBER(num_experts, v.num_experts, kAnyWord);
  EPD_NUMBER(max_tokens, v.max_tokens, kAnyWord);
  EPD_NUMBER(hidden, v.hidden, kAnyWord);
  EPD_NUMBER(topk, v.topk, kAnyWord);
  EPD_NUMBER(depth, v.depth, kAnyWord);
  EPD_NUMBER(payload, v.payload, kAnyWord);
  EPD_NUMBER(index_type, v.index_type, kAnyWord);
  EPD_NUMBER(policy, v.policy, kAnyWord);
  EPD_NUMBER(layout, v.layout, kAnyWord);
  EPD_NUMBER(scale_format, v.scale_format, kAnyWord);
  EPD_NUMBER(expert_alignment, v.expert_alignment, kAnyWord);
  EPD_NUMBER(opaque_bytes, v.opaque_bytes, kAnyWord);
  EPD_NUMBER(num_biases, v.num_biases, kAnyWord);
  EPD_NUMBER(num_handles, v.num_handles, kAnyWord);
  EPD_NUMBER(max_recv_rows, v.max_recv_rows, kAnyWord);
  EPD_NUMBER(sum_ranks, v.sum_ranks, kAnyWord);
  EPD_NUMBER(span, v.span, kAnyWord);
  EPD_NUMBER(scale_layout, v.scale_layout, kAnyWord);
  EPD_NUMBER(range_format, v.range_format, kAnyWord);
  EPD_NUMBER(num_more_formats, v.num_more_formats, kAnyWord);
  EPD_PART(more_format_1, v.more_formats[0]);
  EPD_PART(more_format_2, v.more_formats[1]);
  EPD_PART(more_format_3, v.more_formats[2]);
  EPD_NUMBER(shared_regions, v.shared_regions, kAnyWord);
  // [end]
}

template <typename Io>
void carry(Io& io, wire::GroupShape& m, abi::GroupShape& v) {
  carry_unjudged(io, m, v);
  io.judge([&v] { return abi::check_shape(v); });
}

template <typename Io>
void carry(Io& io, wire::GroupLabel& m, membership::GroupLabel& v) {
  EPD_NUMBER(id, v.id, kAny);
  EPD_NUMBER(uid, v.uid, kAnyWord);
  EPD_TEXT(name, v.name, abi::kMaxGroupName);
}

template <typename Io>
void carry(Io& io, wire::EpochKey& m, membership::EpochKey& v) {
  EPD_NUMBER(high, v.high, kAny);
  EPD_NUMBER(low, v.low, kAny);
}

template <typename Io>
void carry(Io& io, wire::RankDescription& m, membership::RankDescription& v) {
  EPD_NUMBER(rank, v.rank, kMostRank);
  EPD_PART(engine, v.engine);
  EPD_NUMBER(active_since, v.active_since, abi::kLastEpoch);
}

template <typename Io>
void carry(Io& io, wire::MemberDescription& m, membership::MemberDescription& v) {
  EPD_NUMBER(rank, v.rank, kMostRank);
  EPD_PART(session, v.session);
  EPD_NUMBER(member, v.member, kAnyWord);
  EPD_NUMBER(first_index, v.first_index, kAny);
}

template <typename Io>
void carry(Io& io, wire::FarEngine& m, membership::FarEngine& v) {
  EPD_PART(engine, v.engine);
  EPD_TEXT(node, v.node, kMaxNameText);
  EPD_BYTES(address, v.address, abi::kMaxFarAddressBytes);
}

template <typename Io>
void carry(Io& io, wire::GroupSettings& m, abi::GroupSettings& v) {
  EPD_NUMBER(group_id, v.group_id, kAny);
  EPD_NUMBER(sms, v.sms, kAnyWord);
  EPD_INTEGER(priority, v.priority, abi::kMinPriority, abi::kMaxPriority);
}

// All ranks, each at its place; members are some of them.
inline std::string check_ranks(const membership::GroupDescription& group) {
  const std::string allowed =
      "; allowed: num_ranks, which is " + std::to_string(group.shape.num_ranks) + ", in their order";
  if (group.ranks.size() != group.shape.num_ranks)
    return "ranks is a list of " + std::to_string(group.ranks.size()) + allowed;
  for (std::size_t i = 0; i < group.ranks.size(); ++i) {
    if (group.ranks[i].rank != i)
      return "ranks.rank is " + std::to_string(group.ranks[i].rank) + " at place " + std::to_string(i) +
             allowed;
  }
  for (const membership::MemberDescription& member : group.members) {
    if (member.rank >= group.ranks.size())
      return "members.rank is " + std::to_string(member.rank) + "; allowed: below num_ranks, which is " +
             std::to_string(group.ranks.size());
  }
  return "";
}

template <typename Io>
void carry(Io& io, wire::GroupDescription& m, membership::GroupDescription& v) {
  EPD_PART(label, v.label);
  EPD_PART(shape, v.shape);
  EPD_NUMBER(epoch, v.epoch, abi::kLastEpoch);
  EPD_NUMBER(resume_index, v.resume_index, kAny);
  EPD_NUMBER(view, v.view, kAny);
  EPD_PART(epoch_key, v.epoch_key);
  EPD_LIST(ranks, v.ranks, abi::kMaxRanks);
  EPD_LIST(members, v.members, abi::kMaxRanks);
  EPD_PART(settings, v.settings);
  EPD_LIST(far_engines, v.far_engines, abi::kMaxRanks);
  io.judge([&v] { return check_ranks(v); });
}

template <typename Io>
void carry(Io& io, wire::Break& m, abi::Break& v) {
  EPD_NUMBER(group_id, v.group_id, kAny);
  EPD_NUMBER(epoch, v.epoch, abi::kLastEpoch);
  EPD_NUMBER(fail_from, v.fail_from, kAny);
  EPD_NUMBER(fatal, v.fatal, 1);
  EPD_NUMBER(cause, v.cause, kMostCode);
  EPD_INTEGER(failed_rank, v.failed_rank, -1, kMostRank);
  EPD_CHARS(text, v.text);
}

template <typename Io>
void carry(Io& io, wire::MemberRef& m, abi::MemberRef& v) {
  EPD_NUMBER(group_id, v.group_id, kAny);
  EPD_NUMBER(rank, v.rank, kMostRank);
  EPD_NUMBER(next_submit, v.next_submit, kAny);
}

// Events and actions that say nothing but which group of which engine.
template <typename Io, typename Wire>
void carry_group(Io& io, Wire& m, membership::EngineId& engine, std::uint64_t& group_id) {
  EPD_PART(engine, engine);
  EPD_NUMBER(group_id, group_id, kAny);
}

}  // namespace epd::cluster
