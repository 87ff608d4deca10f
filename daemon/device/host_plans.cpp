#include "host_plans.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace epd::device {

std::shared_ptr<HostPlan> HostPlans::renew(std::uint32_t record) {
  if (const auto found = by_record_.find(record); found != by_record_.end()) forget(found->second);
  if (spare_.empty() && kept_.size() >= most_) {
    const auto unused = std::find_if(kept_.rbegin(), kept_.rend(),
                                     [](const Kept& kept) { return kept.plan.use_count() == 1; });
    if (unused != kept_.rend()) forget(std::next(unused).base());
  }
  if (spare_.empty()) return std::make_shared<HostPlan>();
  std::shared_ptr<HostPlan> plan = std::move(spare_.back());
  spare_.pop_back();
  plan->tag = 0;
  return plan;
}

std::shared_ptr<HostPlan> HostPlans::find(std::uint32_t record, std::uint64_t tag) {
  const auto found = by_record_.find(record);
  if (found == by_record_.end() || found->second->plan->tag != tag) return nullptr;
  kept_.splice(kept_.begin(), kept_, found->second);
  return kept_.front().plan;
}

// Plans that operations hold come back when those end.
void HostPlans::forget(std::list<Kept>::iterator kept) {
  if (kept->plan.use_count() == 1) spare_.push_back(std::move(kept->plan));
  by_record_.erase(kept->record);
  kept_.erase(kept);
}

void HostPlans::keep(std::uint32_t record, std::shared_ptr<HostPlan> plan) {
  if (const auto found = by_record_.find(record); found != by_record_.end()) forget(found->second);
  if (kept_.size() >= most_) forget(std::prev(kept_.end()));
  kept_.push_front({record, std::move(plan)});
  by_record_[record] = kept_.begin();
}

void HostPlans::give_back(std::shared_ptr<HostPlan> plan) {
  if (plan != nullptr && plan.use_count() == 1) spare_.push_back(std::move(plan));
}

std::vector<std::shared_ptr<HostPlan>> HostPlans::take_all() {
  std::vector<std::shared_ptr<HostPlan>> all = std::exchange(spare_, {});
  for (Kept& kept : kept_) all.push_back(std::move(kept.plan));
  kept_.clear();
  by_record_.clear();
  return all;
}

}  // namespace epd::device
