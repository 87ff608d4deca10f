#include "host/rank_of_expert.h"
#include "host/row_kernels.h"
#include "host/store_policy.h"
#include "host/weights.h"
#include "kernels/operations.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <vector>

namespace epd::kernels {
namespace {

// One row of one token, and its place.
struct Delivery {
  const DispatchTarget* target;
  std::size_t row;
  std::uint32_t rank;
  std::uint32_t expert;  // per-expert plans only
};

class Dispatcher {
 public:
  Dispatcher(host::Choice choice, const DispatchArgs& args)
      : choice_(choice),
        args_(args),
        rank_of_expert_(args.experts_per_rank),
        per_expert_(args.plan->per_expert),
        scales_(args.format.cast ? args.format.hidden / kScaleBlock : 0),
        scale_bytes_(args.format.cast ? args.format.scale_bytes : 0) {
    const std::size_t rows = per_expert_ ? args.topk : std::min<std::size_t>(args.topk, args.targets.size());
    deliveries_.reserve(rows);
    places_.reserve(rows);
  }

  void dispatch(std::uint32_t token) {
    find_rows(token);
    if (deliveries_.empty()) return;
    for (const Delivery& delivery : deliveries_) {
      if (args_.index64) {
        store_metadata<std::int64_t>(token, delivery);
      } else {
        store_metadata<std::int32_t>(token, delivery);
      }
    }
    store_row(token);
  }

 private:
  const std::int32_t* chosen(std::uint32_t token) const {
    return args_.plan->topk.data() + std::size_t{token} * args_.topk;
  }

  void find_rows(std::uint32_t token) {
    deliveries_.clear();
    places_.clear();
    const RoutingPlan& plan = *args_.plan;
    for (std::uint32_t i = plan.begin[token]; i < plan.begin[token + 1]; ++i) {
      const RouteEntry& entry = plan.entries[i];
      const std::uint32_t rank = per_expert_ ? rank_of_expert_(entry.target) : entry.target;
      const DispatchTarget& target = args_.targets[rank];
      if (target.recv_x == nullptr) continue;
      const std::size_t row = static_cast<std::uint32_t>(args_.base[entry.target]) + entry.position;
      deliveries_.push_back({&target, row, rank, entry.target});
      places_.push_back(static_cast<char*>(target.recv_x) + row * args_.format.row_bytes);
    }
  }

  // Stores what one destination receives beside the row, in its own numbering of experts. A row for a rank
  // gets the choices of that rank's experts; a row for an expert gets that expert.
  template <typename Index>
  void store_metadata(std::uint32_t token, const Delivery& to) const {
    const std::int32_t* choices = chosen(token);
    const float* weights =
        args_.topk_weights == nullptr ? nullptr : args_.topk_weights + std::size_t{token} * args_.topk;
    auto* indices = static_cast<Index*>(to.target->recv_topk_idx);
    const std::uint32_t first_expert = to.rank * args_.experts_per_rank;
    if (per_expert_) {
      indices[to.row] = static_cast<Index>(to.expert - first_expert);
      to.target->recv_topk_weights[to.row] =
          weights == nullptr ? 0.0f : host::weight_of_expert(choices, weights, args_.topk, to.expert);
    } else {
      indices += to.row * args_.topk;
      float* recv_weights = to.target->recv_topk_weights + to.row * args_.topk;
      for (std::uint32_t k = 0; k < args_.topk; ++k) {
        const std::uint32_t local = static_cast<std::uint32_t>(choices[k]) - first_expert;
        const bool here = local < args_.experts_per_rank;
        indices[k] = here ? static_cast<Index>(local) : Index{-1};
        recv_weights[k] = here && weights != nullptr ? weights[k] : 0.0f;
      }
    }
    to.target->recv_src[2 * to.row] = static_cast<std::int32_t>(args_.source_rank);
    to.target->recv_src[2 * to.row + 1] = static_cast<std::int32_t>(token);
  }

  void store_row(std::uint32_t token) {
    const RowFormat& format = args_.format;
    const char* x = static_cast<const char*>(args_.x) + std::size_t{token} * format.x_bytes;
    if (format.cast) {
      choice_.kernels->cast_row({reinterpret_cast<const std::uint16_t*>(x), format.hidden, scales_.data(),
                                 format.scales != ScaleFormat::kFloat32},
                                places_, choice_.stores);
      store_scales(cast_scales());
    } else {
      choice_.kernels->copy_row(x, format.row_bytes, places_, choice_.stores);
      if (format.scale_bytes != 0) {
        store_scales(static_cast<const char*>(args_.x_scales) + std::size_t{token} * format.scale_bytes);
      }
    }
  }

  // Returns the scales of the row that was just cast, in the group's scale format.
  const void* cast_scales() {
    if (args_.format.scales != ScaleFormat::kUe8m0) return scales_.data();
    std::transform(scales_.begin(), scales_.end(), scale_bytes_.begin(), scale_to_ue8m0);
    return scale_bytes_.data();
  }

  void store_scales(const void* scales) const {
    const std::size_t bytes = args_.format.scale_bytes;
    for (const Delivery& to : deliveries_) {
      std::memcpy(static_cast<char*>(to.target->recv_scales) + to.row * bytes, scales, bytes);
    }
  }

  host::Choice choice_;
  const DispatchArgs& args_;
  host::RankOfExpert rank_of_expert_;
  bool per_expert_;
  std::vector<Delivery> deliveries_;  // of the current token
  std::vector<void*> places_;         // the places of their rows
  std::vector<float> scales_;
  std::vector<std::uint8_t> scale_bytes_;  // bytes past the last scale stay zero
};

}  // namespace

void host::dispatch_rows_with(Choice choice, const DispatchArgs& args, std::uint32_t begin,
                              std::uint32_t end) {
  Dispatcher dispatcher(choice, args);
  for (std::uint32_t token = begin; token < end; ++token) dispatcher.dispatch(token);
  choice.kernels->store_fence();
}

void dispatch_rows(const DispatchArgs& args, std::uint32_t begin, std::uint32_t end) {
  const RoutingPlan& plan = *args.plan;
  const std::size_t volume = plan.entries.size() * args.format.row_bytes;
  host::StorePolicy& policy = host::StorePolicy::of_process();
  const host::Stores stores = policy.choose(volume);
  const auto start = std::chrono::steady_clock::now();
  host::dispatch_rows_with({&host::best_row_kernels(), stores}, args, begin, end);
  const std::chrono::nanoseconds took = std::chrono::steady_clock::now() - start;
  const std::size_t bytes = std::size_t{plan.begin[end] - plan.begin[begin]} * args.format.row_bytes;
  policy.learn(stores, volume, bytes, static_cast<std::uint64_t>(took.count()));
}

}  // namespace epd::kernels
