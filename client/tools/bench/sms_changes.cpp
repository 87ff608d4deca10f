#include "sms_changes.h"

#include "kit/daemon.h"
#include "kit/error.h"
#include "proto/statistics.h"

#include <algorithm>
#include <array>

#include <nlohmann/json.hpp>

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

KernelStops SmsChanges::kernel_stops() const {
  KernelStops stops;
  if (plan_.sms_changes == 0) return stops;
  stops.changes = made_;
  std::array<std::uint64_t, abi::kHistogramBuckets> counts{};
  const auto told = nlohmann::json::parse(kit::epctl(control_socket_, {"devices"}), nullptr, false);
  if (told.is_discarded()) kit::fail("what epctl says of devices is no JSON");
  for (const auto& device : told.at("devices")) {
    stops.max_us = std::max(stops.max_us, device.at("kernel_stop_max_us").get<std::uint64_t>());
    if (!device.contains("kernel_stops")) continue;
    for (const auto& bucket : device.at("kernel_stops").at("buckets")) {
      const auto from_us = bucket.at("from_us").get<std::uint32_t>();
      counts[abi::histogram_bucket(from_us)] += bucket.at("count").get<std::uint64_t>();
    }
  }
  for (const std::uint64_t count : counts) stops.count += count;
  stops.p50_us = abi::histogram_percentile(counts, 500);
  return stops;
}

}  // namespace epd::bench
