#include "sms_changes.h"

#include "kit/daemon.h"

#include <algorithm>

namespace epd::bench {

SmsChanges::SmsChanges(const RunPlan& plan, std::string control_socket)
    : plan_(plan), control_socket_(std::move(control_socket)) {}

void SmsChanges::follow(std::uint32_t done) {
  if (made_ == plan_.sms_changes) return;
  const std::uint64_t total = plan_.warmup + plan_.iterations;
  if (std::uint64_t{done} * (plan_.sms_changes + 1) < total * (made_ + 1)) return;
  ++made_;
  const std::uint32_t sms = made_ % 2 == 0 ? plan_.sms : std::max(1u, plan_.sms * 2 / 3);
  for (std::uint32_t gpu = 0; gpu < plan_.gpus; ++gpu)
    kit::epctl(control_socket_, {"set", "device", plan_.device_of(gpu), "sms=" + std::to_string(sms)});
}

}  // namespace epd::bench
