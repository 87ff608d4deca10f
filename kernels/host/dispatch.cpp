#include "host/deliveries.h"
#include "host/rank_of_expert.h"
#include "host/row_kernels.h"
#include "host/store_policy.h"
#include "host/weights.h"
#include "kernels/rows.h"

#include <algorithm>
#include <chrono>
#include <vector>

namespace epd::kernels {
namespace {

class Dispatcher {
 public:
  Dispatcher(host::Choice choice, const DispatchArgs& args)
      : args_(args),
        rank_of_expert_(args.experts_per_rank),
        per_expert_(args.plan->per_expert),
        writer_(choice, args.format) {
    const std::size_t rows = per_expert_ ? args.topk : std::min<std::size_t>(args.topk, args.targets.size());
    deliveries_.reserve(rows);
    places_.reserve(rows);
  }

  void dispatch(std::uint32_t token) {
    find_rows(token);
    if (deliveries_.empty()) return;
    for (const host::Delivery& delivery : deliveries_) {
      if (args_.index64) {
        store_metadata<std::int64_t>(token, delivery);
      } else {
        store_metadata<std::int32_t>(token, delivery);
      }
    }
    const void* scales = writer_.write(args_.x, args_.x_scales, token, places_);
    if (scales != nullptr) host::store_scales(deliveries_, scales, args_.format);
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

  // Stores what one destination receives beside the row.
  template <typename Index>
  void store_metadata(std::uint32_t token, const host::Delivery& to) const {
    const std::int32_t* choices = chosen(token);
    const float* weights =
        args_.topk_weights == nullptr ? nullptr : args_.topk_weights + std::size_t{token} * args_.topk;
    if (per_expert_) {
      const float weight =
          weights == nullptr ? 0.0f : host::weight_of_expert(choices, weights, args_.topk, to.expert);
      host::store_expert<Index>(to, weight, args_.experts_per_rank);
    } else {
      host::store_choices<Index>(to, {choices, args_.topk}, weights, args_.experts_per_rank);
    }
    host::store_source(to, args_.source_rank, token);
  }

  const DispatchArgs& args_;
  host::RankOfExpert rank_of_expert_;
  bool per_expert_;
  host::RowWriter writer_;
  std::vector<host::Delivery> deliveries_;  // of the current token
  std::vector<void*> places_;               // the places of their rows
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
