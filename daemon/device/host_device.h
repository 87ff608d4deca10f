// The emulated device: "SMs" are threads, and its memory is shared memory. The engine's loop is the first SM.
// The others are helper threads that sleep when there is nothing to do.
#pragma once

#include "base/clock.h"
#include "device/launcher.h"
#include "host_calls.h"
#include "host_rows.h"

#include <vector>

namespace epd::device {

class HostDevice;

// The lane of one rank.
class HostLane final : public Lane {
 public:
  HostLane(HostDevice& device, HostSms& sms, const Clock& clock, const LaneShape& shape);
  ~HostLane() override;

  void set_priority(std::int32_t priority) override { priority_ = priority; }
  CallPort& calls() override { return calls_; }
  std::vector<std::shared_ptr<kernels::RoutingPlan>> take_plans() override;

  // Carries out calls until they wait, or until then. `moves_from`: rows of a lower priority do not move.
  bool run(std::int32_t moves_from, std::uint64_t until_ns, const Clock& clock);
  bool runnable() const { return calls_.can_advance(); }
  std::int32_t priority() const { return priority_; }
  bool can_move() const { return calls_.can_move(); }

 private:
  HostDevice& device_;
  HostPlans plans_;
  std::int32_t priority_;
  std::uint32_t turns_ = 0;
  HostCalls calls_;
};

class HostDevice final : public Device, public Launcher {
 public:
  HostDevice(std::string name, const Clock& clock, std::function<void()> notify);

  const std::string& name() const override { return name_; }
  std::uint32_t max_sms() const override { return sms_.max(); }
  std::uint32_t num_sms() const override { return sms_.num(); }
  DeviceTraits traits() const override { return {}; }
  void set_num_sms(std::uint32_t sms) override { sms_.set_num(sms); }
  Result<std::unique_ptr<Arena>> map_arena(int fd, std::uint64_t bytes) override;
  Result<std::unique_ptr<Arena>> map_results(int fd, std::uint64_t bytes) override {
    return map_arena(fd, bytes);
  }
  Launcher& launcher() override { return *this; }
  bool run() override;
  bool runnable() const override;

  Result<std::unique_ptr<Lane>> open_lane(const LaneShape& shape) override;
  void read(void* to, const void* device, std::size_t bytes) override;
  void read_rows(void* to, const void* device, std::size_t bytes, std::size_t stride,
                 std::size_t rows) override;
  void write(void* device, const void* from, std::size_t bytes) override;
  void clear(void* device, std::size_t bytes) override;
  // No stream waits for a host device.
  void close_calls(std::byte* /*words*/) override {}

  // A lane that has calls, from its begin to its end.
  void add(HostLane& lane) { lanes_.push_back(&lane); }
  void remove(const HostLane& lane) { std::erase(lanes_, &lane); }

 private:
  const std::string name_;
  const Clock& clock_;
  HostSms sms_;
  std::vector<HostLane*> lanes_;
  std::size_t next_ = 0;  // the lane whose turn it is
};

}  // namespace epd::device
