// The emulated device: "SMs" are threads, and its memory is shared memory. The engine's loop is the first SM.
// The others are helper threads that sleep when there is nothing to do.
#pragma once

#include "device/launcher.h"
#include "host_rows.h"

namespace epd::device {

class HostDevice final : public Device, public Launcher {
 public:
  HostDevice(std::string name, std::function<void()> notify);

  const std::string& name() const override { return name_; }
  std::uint32_t max_sms() const override { return sms_.max(); }
  std::uint32_t num_sms() const override { return sms_.num(); }
  DeviceTraits traits() const override { return {}; }
  void set_num_sms(std::uint32_t sms) override { sms_.set_num(sms); }
  Result<std::unique_ptr<Arena>> map_arena(int fd, std::uint64_t bytes) override;
  Result<std::unique_ptr<Arena>> map_results(int /*fd*/, std::uint64_t /*bytes*/) override {
    return invalid_argument(name_ + " has no results memory, because its operations are not calls");
  }
  Result<std::unique_ptr<Arena>> map_client_memory(int fd, std::uint64_t bytes, bool here) override;
  Launcher& launcher() override { return *this; }

  Result<std::unique_ptr<Lane>> open_lane(const LaneShape& shape) override;
  void read(void* to, const void* device, std::size_t bytes) override;
  void read_rows(void* to, const void* device, std::size_t bytes, std::size_t stride,
                 std::size_t rows) override;
  void write(void* device, const void* from, std::size_t bytes) override;
  void clear(void* device, std::size_t bytes) override;
  // No stream waits for a host device.
  void close_calls(std::byte* /*words*/) override {}

 private:
  const std::string name_;
  HostSms sms_;
};

}  // namespace epd::device
