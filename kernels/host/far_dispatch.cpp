#include "host/deliveries.h"
#include "host/far_rows.h"
#include "host/rank_of_expert.h"
#include "host/store_policy.h"
#include "host/weights.h"
#include "kernels/far.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

namespace epd::kernels {

FarLister::FarLister(const FarShape& shape, const RoutingPlan& plan, FarNodes nodes,
                     std::span<PlanArray<std::uint32_t>> lists)
    : plan_(plan), lists_(lists) {
  const std::uint32_t targets = shape.per_expert ? shape.experts_per_rank : 1;  // of a rank
  node_of_target_.reserve(shape.num_targets());
  for (const std::uint32_t node : nodes) node_of_target_.insert(node_of_target_.end(), targets, node);
  for (PlanArray<std::uint32_t>& list : lists_) list.clear();
}

bool FarLister::advance(std::uint32_t tokens) {
  const std::uint32_t end = token_ + std::min(tokens, plan_.num_tokens() - token_);
  for (; token_ < end; ++token_) {
    for (std::uint32_t i = plan_.begin[token_]; i < plan_.begin[token_ + 1]; ++i) {
      const std::uint32_t node = node_of_target_[plan_.entries[i].target];
      if (node == kNotFar) continue;
      PlanArray<std::uint32_t>& list = lists_[node];
      if (list.empty() || list.back() != token_) list.push_back(token_);
    }
  }
  return token_ == plan_.num_tokens();
}

const char* far_field_name(FarField field) {
  static constexpr std::array<const char*, kNumFarFields> kNames = {
      "none", "token", "expert", "position", "num_entries", "target", "choices", "domain", "count", "crc"};
  const auto index = static_cast<std::size_t>(field);
  return index < kNames.size() ? kNames[index] : "unknown";
}

// ---- announced counts

void gather_far_counts(const FarShape& shape, const RoutingPlan& plan, std::span<const std::uint32_t> ranks,
                       std::byte* counts) {
  const std::size_t experts = shape.experts_per_rank;
  host::RecordWriter writer(counts, num_far_counts(shape, ranks.size()) * sizeof(std::uint32_t));
  for (const std::uint32_t rank : ranks) writer.put(plan.rank_counts[rank]);
  for (const std::uint32_t rank : ranks)
    writer.put(plan.expert_counts.data() + rank * experts, experts * sizeof(std::uint32_t));
}

namespace {

// The counts of one rank, which lie after those of the ranks before it.
FarFault judge_counts(const FarShape& shape, const std::byte* counts, std::uint32_t num_tokens,
                      std::uint32_t num_ranks, std::uint32_t i) {
  const auto count = [counts](std::size_t n) {
    return host::read_far<std::uint32_t>(counts + n * sizeof(std::uint32_t));
  };
  const auto fault = [](std::uint32_t n, std::uint64_t value) {
    return FarFault{FarField::kCount, 0, n, static_cast<std::int64_t>(value)};
  };
  const std::uint32_t tokens = count(i);
  if (tokens > num_tokens) return fault(i, tokens);
  const std::uint32_t first = num_ranks + i * shape.experts_per_rank;
  // Compact: a token may choose an expert several times.
  const std::uint64_t most = std::uint64_t{tokens} * shape.topk;
  const std::uint64_t most_of_expert = shape.per_expert ? tokens : most;
  std::uint64_t sum = 0;
  for (std::uint32_t e = 0; e < shape.experts_per_rank; ++e) {
    const std::uint32_t of_expert = count(first + e);
    sum += of_expert;
    if (of_expert > most_of_expert || sum > most) return fault(first + e, of_expert);
  }
  return sum < tokens ? fault(i, tokens) : FarFault{};
}

}  // namespace

FarFault scatter_far_counts(const FarShape& shape, const std::byte* counts, std::uint32_t num_tokens,
                            std::span<const std::uint32_t> ranks, std::uint32_t* rank_counts,
                            std::uint32_t* expert_counts) {
  const auto num_ranks = static_cast<std::uint32_t>(ranks.size());
  for (std::uint32_t i = 0; i < num_ranks; ++i) {
    if (const FarFault fault = judge_counts(shape, counts, num_tokens, num_ranks, i)) return fault;
  }
  const std::size_t bytes_of_rank = shape.experts_per_rank * sizeof(std::uint32_t);
  const std::byte* experts = counts + num_ranks * sizeof(std::uint32_t);
  for (std::uint32_t i = 0; i < num_ranks; ++i) {
    rank_counts[ranks[i]] = host::read_far<std::uint32_t>(counts + i * sizeof(std::uint32_t));
    std::memcpy(expert_counts + std::size_t{ranks[i]} * shape.experts_per_rank, experts + i * bytes_of_rank,
                bytes_of_rank);
  }
  return {};
}

// ---- rows

namespace {

constexpr abi::FarChoice kNoChoice = {-1, 0, 0.0f};

class Packer {
 public:
  Packer(host::Choice choice, const FarPackArgs& args)
      : choice_(choice),
        args_(args),
        plan_(*args.plan),
        topk_(args.shape.topk),
        rank_of_expert_(args.shape.experts_per_rank),
        writer_(choice, args.shape.format) {}

  void pack(std::uint32_t token, std::byte* record, std::size_t stride) {
    const RowFormat& format = args_.shape.format;
    host::RecordWriter out(record, stride, args_.shape.crc);
    const void* scales = nullptr;
    if (format.cast) {
      void* const row = out.skip(format.row_bytes);
      scales = writer_.write(args_.x, args_.x_scales, token, {&row, 1});
    } else {
      out.put_row(choice_, writer_.given_row(args_.x, token), format.row_bytes);
      scales = writer_.given_scales(args_.x_scales, token);
    }
    if (scales != nullptr) out.put(scales, format.scale_bytes);
    find_choices(token);
    out.put(choices_.data(), topk_ * sizeof(abi::FarChoice));
    out.put(token);
  }

 private:
  void find_choices(std::uint32_t token) {
    const std::size_t first = std::size_t{token} * topk_;
    const std::int32_t* chosen = plan_.topk.data() + first;
    const float* weights = args_.topk_weights == nullptr ? nullptr : args_.topk_weights + first;
    std::fill_n(choices_.begin(), topk_, kNoChoice);
    std::size_t there = 0;
    for (std::uint32_t i = plan_.begin[token]; i < plan_.begin[token + 1]; ++i) {
      const RouteEntry& entry = plan_.entries[i];
      const std::uint32_t rank = plan_.per_expert ? rank_of_expert_(entry.target) : entry.target;
      if (args_.nodes[rank] != args_.node) continue;
      if (plan_.per_expert) {
        const float weight =
            weights == nullptr ? 0.0f : host::weight_of_expert(chosen, weights, topk_, entry.target);
        choices_[there++] = {static_cast<std::int32_t>(entry.target), entry.position, weight};
      } else {
        add_choices_of(rank, entry.position, chosen, weights);
      }
    }
  }

  // Layout compact: all choices on the rank share its row.
  void add_choices_of(std::uint32_t rank, std::uint32_t position, const std::int32_t* chosen,
                      const float* weights) {
    const std::uint32_t experts = args_.shape.experts_per_rank;
    for (std::uint32_t k = 0; k < topk_; ++k) {
      if (static_cast<std::uint32_t>(chosen[k]) - rank * experts >= experts) continue;
      choices_[k] = {chosen[k], position, weights == nullptr ? 0.0f : weights[k]};
    }
  }

  const host::Choice choice_;
  const FarPackArgs& args_;
  const RoutingPlan& plan_;
  const std::uint32_t topk_;
  const host::RankOfExpert rank_of_expert_;
  host::RowWriter writer_;
  std::array<abi::FarChoice, abi::kMaxTopk> choices_{};
};

class Forwarder {
 public:
  Forwarder(host::Choice choice, const FarForwardArgs& args)
      : choice_(choice),
        args_(args),
        shape_(args.shape),
        stride_(args.shape.row_stride()),
        num_experts_(args.shape.num_experts()),
        rank_of_expert_(args.shape.experts_per_rank) {
    deliveries_.reserve(shape_.topk);
    places_.reserve(shape_.topk);
  }

  FarFault forward(std::uint32_t number, const std::byte* records) {
    const std::byte* const record = records + number * stride_;
    if (shape_.crc && !host::is_whole(record, stride_)) return {FarField::kCrc, number, 0, 0};
    const RowFormat& format = shape_.format;
    const std::byte* const scales = record + format.row_bytes;
    const std::byte* const choices = scales + format.scale_bytes;
    const std::size_t bytes = shape_.topk * sizeof(abi::FarChoice);
    std::memcpy(choices_.data(), choices, bytes);
    token_ = host::read_far<std::uint32_t>(choices + bytes);
    if (const FarFault fault = find_rows(number)) return fault;
    if (shape_.index64) {
      store_metadata<std::int64_t>();
    } else {
      store_metadata<std::int32_t>();
    }
    choice_.kernels->copy_row(record, format.row_bytes, places_, choice_.stores);
    if (format.scale_bytes != 0) host::store_scales(deliveries_, scales, format);
    return {};
  }

 private:
  FarFault find_rows(std::uint32_t number) {
    deliveries_.clear();
    places_.clear();
    if (token_ >= args_.num_tokens) return {FarField::kToken, number, 0, token_};
    for (std::uint32_t k = 0; k < shape_.topk; ++k) {
      const abi::FarChoice& choice = choices_[k];
      experts_[k] = choice.expert;
      weights_[k] = choice.weight;
      if (choice.expert == -1) continue;
      const auto expert = static_cast<std::uint32_t>(choice.expert);
      const FarFault bad_expert = {FarField::kExpert, number, k, choice.expert};
      if (expert >= num_experts_) return bad_expert;
      const std::uint32_t rank = rank_of_expert_(expert);
      const DispatchTarget& target = args_.targets[rank];
      if (target.recv_x == nullptr) return bad_expert;
      const std::uint32_t which = shape_.per_expert ? expert : rank;
      const FarFault bad_position = {FarField::kPosition, number, k, choice.position};
      if (choice.position >= args_.places->counts[which]) return bad_position;
      const std::size_t row = static_cast<std::uint32_t>(args_.places->base[which]) + choice.position;
      if (const host::Delivery* same = shape_.per_expert ? nullptr : delivery_to(rank)) {
        if (same->row != row) return bad_position;
        continue;
      }
      k_of_[deliveries_.size()] = k;
      deliveries_.push_back({&target, row, rank, expert});
      places_.push_back(static_cast<char*>(target.recv_x) + row * shape_.format.row_bytes);
    }
    return deliveries_.empty() ? FarFault{FarField::kExpert, number, 0, -1} : FarFault{};
  }

  const host::Delivery* delivery_to(std::uint32_t rank) const {
    for (const host::Delivery& delivery : deliveries_) {
      if (delivery.rank == rank) return &delivery;
    }
    return nullptr;
  }

  template <typename Index>
  void store_metadata() const {
    for (std::size_t i = 0; i < deliveries_.size(); ++i) {
      const host::Delivery& to = deliveries_[i];
      if (shape_.per_expert) {
        host::store_expert<Index>(to, weights_[k_of_[i]], shape_.experts_per_rank);
      } else {
        host::store_choices<Index>(to, {experts_.data(), shape_.topk}, weights_.data(),
                                   shape_.experts_per_rank);
      }
      host::store_source(to, args_.places->source, token_);
    }
  }

  const host::Choice choice_;
  const FarForwardArgs& args_;
  const FarShape& shape_;
  const std::size_t stride_;
  const std::uint32_t num_experts_;
  const host::RankOfExpert rank_of_expert_;
  // The current record:
  std::uint32_t token_ = 0;
  std::array<abi::FarChoice, abi::kMaxTopk> choices_{};
  std::array<std::int32_t, abi::kMaxTopk> experts_{};
  std::array<float, abi::kMaxTopk> weights_{};
  std::array<std::uint32_t, abi::kMaxTopk> k_of_{};  // the choice that led to each delivery
  std::vector<host::Delivery> deliveries_;
  std::vector<void*> places_;
};

}  // namespace

void host::pack_rows_with(Choice choice, const FarPackArgs& args, std::uint32_t begin, std::uint32_t end,
                          std::byte* records) {
  Packer packer(choice, args);
  const std::size_t stride = args.shape.row_stride();
  for (std::uint32_t i = begin; i < end; ++i, records += stride) {
    packer.pack(args.tokens[i], records, stride);
  }
  choice.kernels->store_fence();
}

// The transport reads the records at once.
void pack_rows(const FarPackArgs& args, std::uint32_t begin, std::uint32_t end, std::byte* records) {
  host::pack_rows_with({&host::best_row_kernels(), host::Stores::kCached}, args, begin, end, records);
}

FarFault host::forward_rows_with(Choice choice, const FarForwardArgs& args, const std::byte* records,
                                 std::uint32_t begin, std::uint32_t end) {
  Forwarder forwarder(choice, args);
  FarFault fault;
  for (std::uint32_t i = begin; i < end && !fault; ++i) fault = forwarder.forward(i, records);
  choice.kernels->store_fence();
  return fault;
}

FarFault forward_rows(const FarForwardArgs& args, const std::byte* records, std::uint32_t begin,
                      std::uint32_t end) {
  const host::Stores stores = host::StorePolicy::of_process().preferred(args.volume);
  return host::forward_rows_with({&host::best_row_kernels(), stores}, args, records, begin, end);
}

}  // namespace epd::kernels
