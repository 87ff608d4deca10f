#include "group.h"

#include <cstring>
#include <string_view>

namespace epd::client {
namespace {

static_assert(static_cast<int>(abi::Payload::kBf16) == EPD_PAYLOAD_BF16);
static_assert(static_cast<int>(abi::Payload::kFp8Cast) == EPD_PAYLOAD_FP8_CAST);
static_assert(static_cast<int>(abi::IndexType::kInt32) == EPD_INDEX_INT32);
static_assert(static_cast<int>(abi::IndexType::kInt64) == EPD_INDEX_INT64);
static_assert(static_cast<int>(abi::LossPolicy::kFailFast) == EPD_FAIL_FAST);
static_assert(static_cast<int>(abi::LossPolicy::kDegrade) == EPD_DEGRADE);

// A caller may have written any number into an enum; it must be looked at as a number first.
template <typename Enum>
std::uint32_t raw(const Enum& value) {
  std::uint32_t number;
  static_assert(sizeof(value) == sizeof(number));
  std::memcpy(&number, &value, sizeof(number));
  return number;
}

bool good_name(std::string_view name) {
  constexpr std::string_view kAllowed = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-";
  return !name.empty() && name.size() <= abi::kMaxGroupName &&
         name.find_first_not_of(kAllowed) == std::string_view::npos;
}

Status check_range(const char* field, std::uint32_t value, std::uint32_t low, std::uint32_t high) {
  if (value >= low && value <= high) return {};
  return bad_value(field, value, std::to_string(low) + " .. " + std::to_string(high));
}

Status check_shape(const epd_group_config_t& c) {
  const std::uint32_t payload = raw(c.payload);
  const std::uint32_t index_type = raw(c.index_type);
  const std::uint32_t policy = raw(c.policy);
  for (const Status& status :
       {check_range("num_ranks", c.num_ranks, 1, abi::kMaxRanks),
        check_range("num_experts", c.num_experts, 1, abi::kMaxExperts),
        check_range("max_tokens", c.max_tokens, 1, abi::kMaxTokens),
        check_range("hidden", c.hidden, abi::kHiddenMultiple, abi::kMaxHidden),
        check_range("topk", c.topk, 1, abi::kMaxTopk), check_range("depth", c.depth, 0, abi::kMaxDepth),
        check_range("payload", payload, EPD_PAYLOAD_BF16, EPD_PAYLOAD_FP8_CAST),
        check_range("index_type", index_type, EPD_INDEX_INT32, EPD_INDEX_INT64),
        check_range("policy", policy, EPD_FAIL_FAST, EPD_DEGRADE)}) {
    if (!status.ok()) return status;
  }
  if (c.num_experts % c.num_ranks != 0) {
    return bad_value("num_experts", c.num_experts,
                     "multiples of num_ranks, which is " + std::to_string(c.num_ranks));
  }
  if (c.hidden % abi::kHiddenMultiple != 0) {
    return bad_value("hidden", c.hidden, "multiples of " + std::to_string(abi::kHiddenMultiple));
  }
  return {};
}

}  // namespace

Status make_join(const epd_group_config_t& c, abi::Join& join) {
  if (c.name == nullptr || !good_name(c.name)) {
    return invalid_argument("name is " + (c.name != nullptr ? "\"" + std::string(c.name) + "\"" : "NULL") +
                            "; allowed: 1 .. 63 characters of [A-Za-z0-9._-]");
  }
  Status status = check_shape(c);
  if (!status.ok()) return status;
  if (c.rank < -1 || c.rank >= static_cast<std::int32_t>(c.num_ranks)) {
    return bad_value("rank", c.rank, "-1 (any free one) .. " + std::to_string(c.num_ranks - 1));
  }
  if (c.timeout_ms < 0) {
    return bad_value("timeout_ms", c.timeout_ms, "0 (the daemon's default) or more milliseconds");
  }
  abi::set_text(join.group, c.name, std::strlen(c.name));
  join.rank = c.rank;
  join.timeout_ms = static_cast<std::uint32_t>(c.timeout_ms);
  join.sms = c.sms;
  join.shape = {c.num_ranks,
                c.num_experts,
                c.max_tokens,
                c.hidden,
                c.topk,
                c.depth != 0 ? c.depth : abi::kDefaultDepth,
                static_cast<abi::Payload>(c.payload),
                static_cast<abi::IndexType>(c.index_type),
                static_cast<abi::LossPolicy>(c.policy)};
  return {};
}

}  // namespace epd::client
