#include "group.h"

#include "deadline.h"
#include "proto/group_bytes.h"
#include "proto/shape_rules.h"
#include "struct_size.h"

#include <cstring>
#include <string_view>

namespace epd::client {
namespace {

template <typename Ours, typename Theirs>
constexpr bool same(Ours ours, Theirs theirs) {
  return static_cast<int>(ours) == static_cast<int>(theirs);
}
static_assert(same(abi::Payload::kBf16, EPD_PAYLOAD_BF16));
static_assert(same(abi::Payload::kFp8Cast, EPD_PAYLOAD_FP8_CAST));
static_assert(same(abi::Payload::kFp8, EPD_PAYLOAD_FP8));
static_assert(same(abi::Payload::kOpaque, EPD_PAYLOAD_OPAQUE));
static_assert(same(abi::ScaleFormat::kFloat32, EPD_SCALE_FORMAT_FLOAT32));
static_assert(same(abi::ScaleFormat::kFloat32Pow2, EPD_SCALE_FORMAT_FLOAT32_POW2));
static_assert(same(abi::ScaleFormat::kUe8m0, EPD_SCALE_FORMAT_UE8M0));
static_assert(same(abi::Layout::kCompact, EPD_LAYOUT_COMPACT));
static_assert(same(abi::Layout::kPacked, EPD_LAYOUT_PACKED));
static_assert(same(abi::Layout::kExpert, EPD_LAYOUT_EXPERT));
static_assert(same(abi::IndexType::kInt32, EPD_INDEX_TYPE_INT32));
static_assert(same(abi::IndexType::kInt64, EPD_INDEX_TYPE_INT64));
static_assert(same(abi::LossPolicy::kFailFast, EPD_POLICY_FAIL_FAST));
static_assert(same(abi::LossPolicy::kDegrade, EPD_POLICY_DEGRADE));
static_assert(same(abi::LossPolicy::kDegradeLate, EPD_POLICY_DEGRADE_LATE));
static_assert(same(abi::Span::kNode, EPD_SPAN_NODE));
static_assert(same(abi::Span::kCluster, EPD_SPAN_CLUSTER));
static_assert(same(abi::Region::kX, EPD_REGION_X) && same(abi::Region::kXScales, EPD_REGION_X_SCALES) &&
              same(abi::Region::kTopkIdx, EPD_REGION_TOPK_IDX) &&
              same(abi::Region::kTopkWeights, EPD_REGION_TOPK_WEIGHTS) &&
              same(abi::Region::kRecvX, EPD_REGION_RECV_X) &&
              same(abi::Region::kRecvScales, EPD_REGION_RECV_SCALES) &&
              same(abi::Region::kRecvTopkIdx, EPD_REGION_RECV_TOPK_IDX) &&
              same(abi::Region::kRecvTopkWeights, EPD_REGION_RECV_TOPK_WEIGHTS) &&
              same(abi::Region::kRecvSrc, EPD_REGION_RECV_SRC) &&
              same(abi::Region::kRankOffsets, EPD_REGION_RANK_OFFSETS) &&
              same(abi::Region::kExpertCounts, EPD_REGION_EXPERT_COUNTS) &&
              same(abi::Region::kExpertOffsets, EPD_REGION_EXPERT_OFFSETS) &&
              same(abi::Region::kSourceRanges, EPD_REGION_SOURCE_RANGES) &&
              same(abi::Region::kY, EPD_REGION_Y) && same(abi::Region::kYWeights, EPD_REGION_Y_WEIGHTS) &&
              same(abi::Region::kBias0, EPD_REGION_BIAS_0) && same(abi::Region::kBias1, EPD_REGION_BIAS_1) &&
              same(abi::Region::kOut, EPD_REGION_OUT) &&
              same(abi::Region::kOutWeights, EPD_REGION_OUT_WEIGHTS));

// Our enums can hold any number. shape_rules.h checks it.
template <typename To, typename From>
To as(const From& value) {
  return static_cast<To>(number_in(value));
}

bool good_name(std::string_view name) {
  constexpr std::string_view kAllowed = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-";
  return !name.empty() && name.size() <= abi::kMaxGroupName &&
         name.find_first_not_of(kAllowed) == std::string_view::npos;
}

abi::GroupShape make_shape(const epd_group_config_t& c) {
  abi::GroupShape s{};
  // [fields.py: make_shape]
  s.num_ranks = c.num_ranks;
  s.num_experts = c.num_experts;
  s.max_tokens = c.max_tokens;
  s.hidden = c.hidden;
  s.topk = c.topk;
  s.depth = c.depth != 0 ? c.depth : abi::kDefaultDepth;
  s.payload = as<abi::Payload>(c.payload);
  s.index_type = as<abi::IndexType>(c.index_type);
  s.policy = as<abi::LossPolicy>(c.policy);
  s.layout = as<abi::Layout>(c.layout);
  s.scale_format = as<abi::ScaleFormat>(c.scale_format);
  s.expert_alignment = c.expert_alignment != 0 ? c.expert_alignment : 1;
  s.opaque_bytes = c.opaque_bytes;
  s.num_biases = c.num_biases;
  s.num_handles = c.num_handles;
  s.max_recv_rows = c.max_recv_rows;
  s.sum_ranks = c.sum_ranks;
  s.span = as<abi::Span>(c.span);
  s.scale_layout = as<abi::ScaleLayout>(c.scale_layout);
  s.range_format = as<abi::RangeFormat>(c.range_format);
  s.shared_regions = c.shared_regions;
  // [end]
  return s;
}

Status read_more_formats(const epd_group_config_t& c, abi::GroupShape& shape) {
  static_assert(EPD_MAX_MORE_FORMATS == abi::kMaxMoreFormats);
  if (c.num_more_formats > abi::kMaxMoreFormats)
    return bad_value("num_more_formats", c.num_more_formats, "0 .. " + std::to_string(abi::kMaxMoreFormats));
  if (c.num_more_formats != 0 && c.more_formats == nullptr)
    return invalid_argument("more_formats is NULL and num_more_formats " +
                            std::to_string(c.num_more_formats));
  shape.num_more_formats = c.num_more_formats;
  for (std::uint32_t i = 0; i < c.num_more_formats; ++i) {
    shape.more_formats[i] = {as<abi::Payload>(c.more_formats[i].payload),
                             as<abi::ScaleFormat>(c.more_formats[i].scale_format)};
  }
  return {};
}

}  // namespace

Status read_shape(const epd_group_config_t& c, abi::GroupShape& shape) {
  shape = make_shape(c);
  Status status = read_more_formats(c, shape);
  if (!status.ok()) return status;
  std::string wrong = abi::check_shape(shape);
  return wrong.empty() ? Status() : invalid_argument(std::move(wrong));
}

Status read_region(const epd_region_t& given, std::uint32_t& region) {
  region = number_in(given);
  if (region < abi::kNumRegions) return {};
  return bad_value("region", region, "0 .. " + std::to_string(abi::kNumRegions - 1));
}

Status read_bytes(const epd_group_config_t& c, const epd_device_kind_t& kind, epd_group_bytes_t& bytes) {
  abi::GroupShape shape{};
  Status status = read_shape(c, shape);
  if (!status.ok()) return status;
  const std::uint32_t number = number_in(kind);
  if (number > EPD_DEVICE_KIND_CUDA)
    return bad_value("kind", number, "0 (EPD_DEVICE_KIND_HOST) or 1 (EPD_DEVICE_KIND_CUDA)");
  const abi::GroupBytes needed(shape, kind == EPD_DEVICE_KIND_HOST);
  bytes.user_arena = needed.user_arena;
  bytes.exchange_arena = needed.exchange_arena;
  bytes.routing_records = needed.routing_records;
  bytes.inboxes = needed.inboxes;
  bytes.board = needed.board;
  bytes.results = needed.results;
  bytes.rank = needed.rank;
  bytes.group = needed.group;
  bytes.routing_quota = needed.routing_quota;
  return {};
}

Status make_join(const epd_group_config_t& c, abi::Join& join) {
  if (c.name == nullptr || !good_name(c.name)) {
    return invalid_argument("name is " + (c.name != nullptr ? "\"" + std::string(c.name) + "\"" : "NULL") +
                            "; allowed: 1 .. 63 characters of [A-Za-z0-9._-]");
  }
  Status status = read_shape(c, join.shape);
  if (!status.ok()) return status;
  if (c.rank < EPD_ANY_RANK || c.rank >= static_cast<std::int32_t>(c.num_ranks)) {
    return bad_value("rank", c.rank, "0 .. " + std::to_string(c.num_ranks - 1) + ", or EPD_ANY_RANK (-1)");
  }
  status = check_limit(c.timeout_ms, "the daemon's default");
  if (!status.ok()) return status;
  if (c.priority < abi::kMinPriority || c.priority > abi::kMaxPriority) {
    return bad_value("priority", c.priority,
                     std::to_string(abi::kMinPriority) + " .. " + std::to_string(abi::kMaxPriority));
  }
  abi::set_text(join.group, c.name, std::strlen(c.name));
  join.rank = c.rank;
  join.timeout_ms = static_cast<std::uint32_t>(c.timeout_ms);
  join.sms = c.sms;
  join.priority = c.priority;
  return {};
}

}  // namespace epd::client
