#include "host_device.h"

#include "common/memory.h"
#include "host_operation.h"

#include <sys/mman.h>
#include <cstring>
#include <utility>

namespace epd::device {
namespace {

class HostArena final : public Arena {
 public:
  explicit HostArena(Mapping mapping) : Arena(mapping.bytes()), mapping_(std::move(mapping)) {}

  bool give_back(std::uint64_t bytes) override { return !mapping_.shrink_by(bytes); }

 private:
  Mapping mapping_;
};

// The lane of one rank. Its operations run beside each other, on the loop. They share plans.
class HostLane final : public Lane {
 public:
  HostLane(HostSms& sms, const LaneShape& shape)
      : sms_(sms),
        plans_(shape.kept_plans),
        sum_ranks_(shape.sum_ranks),
        far_(shape.far),
        priority_(shape.priority) {}

  std::unique_ptr<OperationInFlight> launch(const LaunchRequest& request) override {
    return std::make_unique<HostOperation>(request.kind, *request.op,
                                           HostOperation::Needs{*request.peers,
                                                                plans_,
                                                                request.record,
                                                                {&sms_, request.sms, priority_},
                                                                sum_ranks_,
                                                                far_,
                                                                request.waits});
  }
  void set_priority(std::int32_t priority) override { priority_ = priority; }
  std::vector<std::shared_ptr<kernels::RoutingPlan>> take_plans() override {
    std::vector<std::shared_ptr<kernels::RoutingPlan>> all;
    for (const auto& plan : plans_.take_all()) all.emplace_back(plan, &plan->plan);
    return all;
  }

 private:
  HostSms& sms_;
  HostPlans plans_;
  const std::uint32_t sum_ranks_;
  far::FarGroup* const far_;
  std::int32_t priority_;
};

}  // namespace

HostDevice::HostDevice(std::string name, std::function<void()> notify)
    : name_(std::move(name)), sms_(std::move(notify)) {}

Result<std::unique_ptr<Arena>> HostDevice::map_arena(int fd, std::uint64_t bytes) {
  Result<Mapping> mapping = Mapping::map(fd, bytes, Access::kReadWrite);
  if (!mapping.ok()) return mapping.status();
  // Huge pages mean fewer page faults and TLB misses, where the kernel offers them for shared memory.
  // Elsewhere it refuses the advice, which does no harm.
  ::madvise(mapping->data(), bytes, MADV_HUGEPAGE);
  return std::unique_ptr<Arena>(std::make_unique<HostArena>(std::move(mapping).value()));
}

// The supervisor has checked the memory. But its client may have sealed it since.
Result<std::unique_ptr<Arena>> HostDevice::map_client_memory(int fd, std::uint64_t bytes, bool /*here*/) {
  Result<std::unique_ptr<Arena>> mapped = map_arena(fd, bytes);
  if (mapped.ok() || mapped.status().code() == StatusCode::kResourceExhausted) return mapped;
  return invalid_argument("can't be used: " + mapped.status().message() +
                          "; allowed: memory that may be mapped for reading and writing");
}

Result<std::unique_ptr<Lane>> HostDevice::open_lane(const LaneShape& shape) {
  return std::unique_ptr<Lane>(std::make_unique<HostLane>(sms_, shape));
}

void HostDevice::read(void* to, const void* device, std::size_t bytes) {
  std::memcpy(to, device, bytes);
}

void HostDevice::read_rows(void* to, const void* device, std::size_t bytes, std::size_t stride,
                           std::size_t rows) {
  for (std::size_t row = 0; row < rows; ++row) {
    std::memcpy(static_cast<std::byte*>(to) + row * bytes,
                static_cast<const std::byte*>(device) + row * stride, bytes);
  }
}

void HostDevice::write(void* device, const void* from, std::size_t bytes) {
  std::memcpy(device, from, bytes);
}

void HostDevice::clear(void* device, std::size_t bytes) {
  std::memset(device, 0, bytes);
}

}  // namespace epd::device
