#include "membership/join_rules.h"

#include <cstring>
#include <string_view>

namespace epd::membership {
namespace {

using abi::GroupShape;

Status out_of_range(const char* field, std::uint64_t value, const std::string& allowed) {
  return invalid_argument(std::string(field) + " is " + std::to_string(value) + "; allowed: " + allowed);
}

Status check_range(const char* field, std::uint32_t value, std::uint32_t low, std::uint32_t high) {
  if (value >= low && value <= high) return {};
  return out_of_range(field, value, std::to_string(low) + ".." + std::to_string(high));
}

Status check_name(const abi::Join& join) {
  const std::size_t length = abi::text_length(join.group);
  if (length == 0 || length > abi::kMaxGroupName) {
    return invalid_argument("group name has " + std::to_string(length) + " characters; allowed: 1.." +
                            std::to_string(abi::kMaxGroupName));
  }
  for (const char c : std::string_view(join.group, length)) {
    const bool fine = (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') ||
                      c == '.' || c == '_' || c == '-';
    if (!fine) {
      return invalid_argument("group name holds character code " +
                              std::to_string(static_cast<unsigned char>(c)) + "; allowed: [A-Za-z0-9._-]");
    }
  }
  return {};
}

Status check_sizes(const GroupShape& s) {
  if (Status status = check_range("num_ranks", s.num_ranks, 1, abi::kMaxRanks); !status.ok()) return status;
  if (Status status = check_range("num_experts", s.num_experts, 1, abi::kMaxExperts); !status.ok())
    return status;
  if (s.num_experts % s.num_ranks != 0) {
    return out_of_range("num_experts", s.num_experts,
                        "multiples of num_ranks = " + std::to_string(s.num_ranks) + " up to " +
                            std::to_string(abi::kMaxExperts));
  }
  if (Status status = check_range("max_tokens", s.max_tokens, 1, abi::kMaxTokens); !status.ok())
    return status;
  if (s.hidden == 0 || s.hidden > abi::kMaxHidden || s.hidden % abi::kHiddenMultiple != 0) {
    return out_of_range(
        "hidden", s.hidden,
        "multiples of " + std::to_string(abi::kHiddenMultiple) + " up to " + std::to_string(abi::kMaxHidden));
  }
  if (Status status = check_range("topk", s.topk, 1, abi::kMaxTopk); !status.ok()) return status;
  return check_range("depth", s.depth, 1, abi::kMaxDepth);
}

}  // namespace

Status check_join(const abi::Join& join) {
  if (Status status = check_name(join); !status.ok()) return status;
  const GroupShape& s = join.shape;
  if (Status status = check_sizes(s); !status.ok()) return status;
  if (s.payload != abi::Payload::kBf16 && s.payload != abi::Payload::kFp8Cast)
    return out_of_range("payload", static_cast<std::uint32_t>(s.payload), "0 (bf16), 1 (fp8 cast)");
  if (s.index_type != abi::IndexType::kInt32 && s.index_type != abi::IndexType::kInt64)
    return out_of_range("index_type", static_cast<std::uint32_t>(s.index_type), "0 (int32), 1 (int64)");
  if (s.policy != abi::LossPolicy::kFailFast && s.policy != abi::LossPolicy::kDegrade)
    return out_of_range("policy", static_cast<std::uint32_t>(s.policy), "0 (fail_fast), 1 (degrade)");
  if (join.rank < -1 || join.rank >= static_cast<std::int32_t>(s.num_ranks)) {
    return invalid_argument("rank is " + std::to_string(join.rank) + "; allowed: 0.." +
                            std::to_string(s.num_ranks - 1) + ", or -1 for any");
  }
  return {};
}

Status check_same_shape(const GroupShape& first, const GroupShape& joiner, const std::string& group) {
  struct Field {
    const char* name;
    std::uint32_t ours;
    std::uint32_t theirs;
  };
  const Field fields[] = {
      {"num_ranks", first.num_ranks, joiner.num_ranks},
      {"num_experts", first.num_experts, joiner.num_experts},
      {"max_tokens", first.max_tokens, joiner.max_tokens},
      {"hidden", first.hidden, joiner.hidden},
      {"topk", first.topk, joiner.topk},
      {"depth", first.depth, joiner.depth},
      {"payload", static_cast<std::uint32_t>(first.payload), static_cast<std::uint32_t>(joiner.payload)},
      {"index_type", static_cast<std::uint32_t>(first.index_type),
       static_cast<std::uint32_t>(joiner.index_type)},
      {"policy", static_cast<std::uint32_t>(first.policy), static_cast<std::uint32_t>(joiner.policy)},
  };
  for (const Field& field : fields) {
    if (field.ours == field.theirs) continue;
    return invalid_argument(std::string(field.name) + " is " + std::to_string(field.theirs) +
                            ", but the ranks already in group \"" + group + "\" have " +
                            std::to_string(field.ours));
  }
  return {};
}

}  // namespace epd::membership
