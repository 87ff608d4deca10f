#include "base/quota.h"

#include <string>

namespace epd {
namespace {

constexpr std::uint64_t kReserve = 1024;
constexpr std::uint64_t kSmallReserve = 256;  // if the limit is small
constexpr std::uint64_t kSmallLimit = 8192;

}  // namespace

DescriptorShare& DescriptorShare::operator=(DescriptorShare&& other) noexcept {
  if (this == &other) return *this;
  give_back();
  budget_ = std::exchange(other.budget_, nullptr);
  uid_ = other.uid_;
  count_ = other.count_;
  return *this;
}

Status DescriptorShare::grow(std::uint64_t more) {
  EPD_CHECK(budget_ != nullptr);
  if (Status status = budget_->check(uid_, more); !status.ok()) return status;
  budget_->add(uid_, more);
  count_ += more;
  return {};
}

void DescriptorShare::give_back() {
  if (budget_ != nullptr) std::exchange(budget_, nullptr)->remove(uid_, count_);
}

DescriptorBudget::DescriptorBudget(std::uint64_t limit)
    : limit_(limit),
      reserve_(limit < kSmallLimit ? kSmallReserve : kReserve),
      allowed_(limit > reserve_ ? limit - reserve_ : 0) {}

Status DescriptorBudget::check(std::uint32_t uid, std::uint64_t count) const {
  const std::string source = "RLIMIT_NOFILE of the daemon, " + std::to_string(limit_) +
                             ", less a reserve of " + std::to_string(reserve_);
  const auto found = of_user_.find(uid);
  const std::uint64_t of_user = found == of_user_.end() ? 0 : found->second;
  if (of_user + count > allowed_per_user()) {
    return resource_exhausted("user " + std::to_string(uid) + " holds " + std::to_string(of_user) +
                              " descriptors of the daemon and needs " + std::to_string(count) +
                              " more; allowed: " + std::to_string(allowed_per_user()) + " (half of " +
                              source + ")");
  }
  if (used_ + count <= allowed_) return {};
  return resource_exhausted("clients hold " + std::to_string(used_) +
                            " descriptors of the daemon and this one needs " + std::to_string(count) +
                            " more; allowed: " + std::to_string(allowed_) + " (" + source + ")");
}

Result<DescriptorShare> DescriptorBudget::take(std::uint32_t uid, std::uint64_t count) {
  if (Status status = check(uid, count); !status.ok()) return status;
  add(uid, count);
  return DescriptorShare(*this, uid, count);
}

void DescriptorBudget::add(std::uint32_t uid, std::uint64_t count) {
  used_ += count;
  of_user_[uid] += count;
}

void DescriptorBudget::remove(std::uint32_t uid, std::uint64_t count) {
  used_ -= count;
  const auto found = of_user_.find(uid);
  if (found != of_user_.end() && (found->second -= count) == 0) of_user_.erase(found);
}

}  // namespace epd
