// Which devices are served, and how: devices.cuda, devices.host, devices.mode.
#include "device_choice.h"
#include "gpu_list.h"

#include <gtest/gtest.h>
#include <string>
#include <vector>

namespace epd::supervisor {
namespace {

// Of GPUs whose UUIDs end in their numbers plus one.
struct FakeMachine {
  std::uint32_t gpus = 0;
  std::vector<bool> mps{};       // by number; beyond: true
  std::vector<bool> unusable{};  // by number; beyond: false
  Status broken{};               // the driver
  bool maps_host_memory = true;

  Machine machine() const {
    Machine machine;
    machine.num_gpus = [this]() -> Result<std::uint32_t> {
      if (!broken.ok()) return broken;
      return gpus;
    };
    machine.facts = [this](const device::DeviceName& name) -> Result<device::DeviceFacts> {
      if (name.index >= gpus) return Status(StatusCode::kUnsupported, name.text() + " is not there");
      if (name.index < unusable.size() && unusable[name.index])
        return Status(StatusCode::kUnsupported, name.text() + " has no virtual memory management");
      device::DeviceFacts facts;
      facts.uuid.fill(0xab);
      facts.uuid.back() = static_cast<std::uint8_t>(name.index + 1);
      facts.mps = name.index >= mps.size() || mps[name.index];
      facts.maps_host_memory = maps_host_memory;
      return facts;
    };
    return machine;
  }
};

Config config_of(const std::string& cuda, std::uint32_t host = kAutomatic,
                 DeviceMode mode = DeviceMode::kAuto) {
  Config config;
  EXPECT_TRUE(parse_gpu_list(cuda, config.cuda_devices)) << cuda;
  config.host_devices = host;
  config.mode = static_cast<std::uint32_t>(mode);
  return config;
}

// "cuda:0 resident, host:0", or the refusal.
std::string chosen(const Config& config, const FakeMachine& machine) {
  Result<DeviceChoice> choice = choose_devices(config, machine.machine());
  if (!choice.ok()) return choice.status().to_string();
  std::string text;
  for (const ServedDevice& device : choice->devices) {
    text += (text.empty() ? "" : ", ") + device.name.text();
    if (device.name.kind == abi::DeviceKind::kCuda)
      text += " " + std::string(launch_mode_text(device.mode)) + " (" + device.mode_reason + ")";
  }
  for (const std::string& reason : choice->skipped) text += "; skipped: " + reason;
  return text;
}

TEST(DeviceChoice, AutoTakesTheGpusThatThereAreAndElseOneHostDevice) {
  EXPECT_EQ(chosen(config_of("auto"), {}), "host:0");
  EXPECT_EQ(chosen(config_of("auto"), {.gpus = 2}),
            "cuda:0 resident (auto: MPS runs on it), cuda:1 resident (auto: MPS runs on it)");
  EXPECT_EQ(chosen(config_of("auto"), {.gpus = 2, .mps = {true, false}}),
            "cuda:0 resident (auto: MPS runs on it), cuda:1 launched (auto: MPS does not run on it)");
  EXPECT_EQ(chosen(config_of("auto", 2), {.gpus = 1}),
            "cuda:0 resident (auto: MPS runs on it), host:0, host:1");
  EXPECT_EQ(chosen(config_of("none"), {.gpus = 2}), "host:0");
  EXPECT_EQ(chosen(config_of("auto"), {.gpus = 2, .unusable = {true}}),
            "cuda:1 resident (auto: MPS runs on it); skipped: cuda:0 has no virtual memory management");
}

// A pod without its runtimeClassName was ready, and slow.
TEST(DeviceChoice, AHostDeviceInPlaceOfAGpuWasServedWithoutAWord) {
  const std::string refusal = chosen(config_of("auto", kAutomatic, DeviceMode::kResident), {});
  EXPECT_NE(refusal.find("UNSUPPORTED"), std::string::npos) << refusal;
  EXPECT_NE(refusal.find("devices.mode is \"resident\" and there is no GPU"), std::string::npos) << refusal;
  EXPECT_EQ(chosen(config_of("auto", 1, DeviceMode::kResident), {}), "host:0");
  const auto instead = [](const Config& config, const FakeMachine& machine) {
    return choose_devices(config, machine.machine()).value().host_instead;
  };
  EXPECT_TRUE(instead(config_of("auto"), {}));
  EXPECT_FALSE(instead(config_of("auto", 1), {}));
  EXPECT_FALSE(instead(config_of("none"), {})) << "no GPU was asked for";
  EXPECT_FALSE(instead(config_of("auto"), {.gpus = 1}));
}

TEST(DeviceChoice, AMachineWhoseGpusFailServesNoHostDevicesInTheirPlace) {
  const FakeMachine broken{.gpus = 2,
                           .broken = {StatusCode::kUnsupported, "cuInit: system not yet initialized"}};
  for (const std::string part :
       {"UNSUPPORTED", "devices.cuda is \"auto\"", "system not yet initialized", "devices.cuda = \"none\""})
    EXPECT_NE(chosen(config_of("auto"), broken).find(part), std::string::npos)
        << chosen(config_of("auto"), broken);
  EXPECT_EQ(chosen(config_of("none"), broken), "host:0");
  const FakeMachine unusable{.gpus = 1, .unusable = {true}};
  EXPECT_NE(chosen(config_of("auto"), unusable).find("no GPU can be used: cuda:0 has no virtual"),
            std::string::npos)
      << chosen(config_of("auto"), unusable);
}

TEST(DeviceChoice, AListNamesGpusByNumberOrUuid) {
  const FakeMachine machine{.gpus = 3, .mps = {false, false, false}};
  const std::string last = "GPU-ABABABAB-abab-abab-abab-ababababab03";
  EXPECT_EQ(chosen(config_of(last + ", 0"), machine),
            "cuda:0 launched (auto: MPS does not run on it), cuda:2 launched (auto: MPS does not run on it)");
  EXPECT_EQ(chosen(config_of("1", 0, DeviceMode::kLaunched), machine), "cuda:1 launched (devices.mode)");
  EXPECT_NE(chosen(config_of("3"), machine).find("cuda:3 is not there"), std::string::npos);
  EXPECT_EQ(chosen(config_of("2," + last), machine),
            "INVALID_ARGUMENT: devices.cuda names cuda:2 twice; allowed: each GPU once");
  const std::string unknown = chosen(config_of("GPU-00000000-0000-0000-0000-000000000000"), machine);
  for (const std::string part : {"GPU-00000000-0000", "GPU-abababab-abab-abab-abab-ababababab01"})
    EXPECT_NE(unknown.find(part), std::string::npos) << unknown;
}

TEST(DeviceChoice, ResidentNeedsMpsAndSomethingIsServed) {
  const FakeMachine machine{.gpus = 2, .mps = {true, false}};
  EXPECT_EQ(chosen(config_of("0", 0, DeviceMode::kResident), machine), "cuda:0 resident (devices.mode)");
  const std::string refused = chosen(config_of("auto", 0, DeviceMode::kResident), machine);
  for (const std::string part : {"UNSUPPORTED", "devices.mode is \"resident\"", "cuda:1", "\"launched\""})
    EXPECT_NE(refused.find(part), std::string::npos) << refused;
  EXPECT_NE(chosen(config_of("auto", 0), {})
                .find(std::string("no GPU to serve (devices.cuda): ") + why_no_gpu() +
                      "; allowed: at least one device"),
            std::string::npos);
}

// What their kernels tell, clients read there.
TEST(DeviceChoice, ResidentNeedsMemoryOfTheHostByDescriptors) {
  const FakeMachine machine{.gpus = 1, .maps_host_memory = false};
  EXPECT_EQ(chosen(config_of("auto"), machine),
            "cuda:0 launched (auto: it can't map the host's memory of other processes)");
  EXPECT_NE(chosen(config_of("0", 0, DeviceMode::kResident), machine).find("HOST_NUMA_VIRTUAL_MEMORY"),
            std::string::npos);
}

TEST(GpuListTest, WhatIsNoListIsRefused) {
  GpuList gpus;
  for (const char* text : {"", ",", "0,", "all", "-1", "0x1", "99999", "GPU-", "GPU-0123", "0;1", "auto,0",
                           "MIG-abababab-abab-abab-abab-ababababab0", "Auto"})
    EXPECT_FALSE(parse_gpu_list(text, gpus)) << text;
  std::string many = "0";
  for (int i = 1; i < 64; ++i) many += "," + std::to_string(i);
  EXPECT_TRUE(parse_gpu_list(many, gpus));
  EXPECT_EQ(gpus.list.size(), 64u);
  EXPECT_FALSE(parse_gpu_list(many + ",64", gpus));
  EXPECT_TRUE(parse_gpu_list("none", gpus));
  EXPECT_TRUE(!gpus.automatic && gpus.list.empty());
}

}  // namespace
}  // namespace epd::supervisor
