#include "host_device.h"

#include "common/memory.h"
#include "host_operation.h"

#include <sys/mman.h>
#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

namespace epd::device {
namespace {

constexpr std::uint64_t kTurnNs = 50'000;        // for the operations of one lane
constexpr std::uint64_t kRoundNs = 100'000;      // for those of all
constexpr std::uint32_t kTurnsPerLowChunk = 16;  // see HostDevice::run

class HostArena final : public Arena {
 public:
  explicit HostArena(Mapping mapping) : Arena(mapping.bytes()), mapping_(std::move(mapping)) {}

  bool give_back(std::uint64_t bytes) override { return !mapping_.shrink_by(bytes); }

 private:
  Mapping mapping_;
};

}  // namespace

HostLane::HostLane(HostDevice& device, HostSms& sms, const Clock& clock, const LaneShape& shape)
    : device_(device),
      plans_(shape.kept_plans),
      priority_(shape.priority),
      calls_(shape, {sms, plans_, priority_, clock}) {
  device_.add(*this);
}

HostLane::~HostLane() {
  device_.remove(*this);
}

std::vector<std::shared_ptr<kernels::RoutingPlan>> HostLane::take_plans() {
  std::vector<std::shared_ptr<kernels::RoutingPlan>> all;
  for (const auto& plan : plans_.take_all()) all.emplace_back(plan, &plan->plan);
  return all;
}

bool HostLane::run(std::int32_t moves_from, std::uint64_t until_ns, const Clock& clock) {
  if (++turns_ % kTurnsPerLowChunk == 0) moves_from = priority_;
  bool progress = false;
  while (!(calls_.can_move() && priority_ < moves_from) && calls_.advance()) {
    progress = true;
    if (clock.now_ns() >= until_ns) break;
  }
  return progress;
}

HostDevice::HostDevice(std::string name, const Clock& clock, std::function<void()> notify)
    : name_(std::move(name)), clock_(clock), sms_(std::move(notify)) {}

// Serves the lanes by turns, until each has had its turn or the round has lasted long enough. While rows of a
// higher priority can move, operations of a lower one pause. Now and then they get a chunk, so that they end.
bool HostDevice::run() {
  std::int32_t moves_from = std::numeric_limits<std::int32_t>::min();
  for (const HostLane* lane : lanes_) {
    if (lane->can_move()) moves_from = std::max(moves_from, lane->priority());
  }
  bool progress = false;
  std::uint64_t now_ns = clock_.now_ns();
  const std::uint64_t end_ns = now_ns + kRoundNs;
  for (std::size_t left = lanes_.size(); left > 0 && now_ns < end_ns; --left) {
    next_ = next_ + 1 < lanes_.size() ? next_ + 1 : 0;
    progress |= lanes_[next_]->run(moves_from, now_ns + kTurnNs, clock_);
    now_ns = clock_.now_ns();
  }
  return progress;
}

bool HostDevice::runnable() const {
  return std::any_of(lanes_.begin(), lanes_.end(), [](const HostLane* lane) { return lane->runnable(); });
}

Result<std::unique_ptr<Arena>> HostDevice::map_arena(int fd, std::uint64_t bytes) {
  Result<Mapping> mapping = Mapping::map(fd, bytes, Access::kReadWrite);
  if (!mapping.ok()) return mapping.status();
  // Huge pages mean fewer page faults and TLB misses, where the kernel offers them for shared memory.
  // Elsewhere it refuses the advice, which does no harm.
  ::madvise(mapping->data(), bytes, MADV_HUGEPAGE);
  return std::unique_ptr<Arena>(std::make_unique<HostArena>(std::move(mapping).value()));
}

Result<std::unique_ptr<Lane>> HostDevice::open_lane(const LaneShape& shape) {
  return std::unique_ptr<Lane>(std::make_unique<HostLane>(*this, sms_, clock_, shape));
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
