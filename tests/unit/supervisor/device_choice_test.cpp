// Which devices are served: devices.cuda, devices.host.
#include "device_choice.h"
#include "gpu_list.h"

#include <gtest/gtest.h>
#include <string>
#include <vector>

namespace epd::supervisor {
namespace {

// A machine whose GPUs have UUIDs that end in their numbers plus one.
struct FakeMachine {
  std::uint32_t gpus = 0;
  std::vector<bool> unusable{};  // by number; beyond: false
  Status broken{};               // the driver

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
      return facts;
    };
    return machine;
  }
};

Config config_of(const std::string& cuda, std::uint32_t host = kAutomatic) {
  Config config;
  EXPECT_TRUE(parse_gpu_list(cuda, config.cuda_devices)) << cuda;
  config.host_devices = host;
  return config;
}

// "cuda:0, host:0", or the refusal.
std::string chosen(const Config& config, const FakeMachine& machine) {
  Result<DeviceChoice> choice = choose_devices(config, machine.machine());
  if (!choice.ok()) return choice.status().to_string();
  std::string text;
  for (const ServedDevice& device : choice->devices) text += (text.empty() ? "" : ", ") + device.name.text();
  for (const std::string& reason : choice->skipped) text += "; skipped: " + reason;
  return text;
}

TEST(DeviceChoice, AutoTakesTheGpusThatThereAreAndElseOneHostDevice) {
  EXPECT_EQ(chosen(config_of("auto"), {}), "host:0");
  EXPECT_EQ(chosen(config_of("auto"), {.gpus = 2}), "cuda:0, cuda:1");
  EXPECT_EQ(chosen(config_of("auto", 2), {.gpus = 1}), "cuda:0, host:0, host:1");
  EXPECT_EQ(chosen(config_of("none"), {.gpus = 2}), "host:0");
  EXPECT_EQ(chosen(config_of("auto"), {.gpus = 2, .unusable = {true}}),
            "cuda:1; skipped: cuda:0 has no virtual memory management");
}

// A pod without its runtimeClassName was ready, and slow.
TEST(DeviceChoice, AHostDeviceInPlaceOfAGpuWasServedWithoutAWord) {
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

TEST(DeviceChoice, AReasonThatFourGpusShareWasSaidFourTimes) {
  const std::string said = chosen(config_of("auto"), {.gpus = 4, .unusable = {true, true, true, true}});
  EXPECT_NE(said.find("no GPU can be used: cuda:0 has no virtual memory management; also cuda:1, "
                      "cuda:2, cuda:3; to serve"),
            std::string::npos)
      << said;
}

TEST(DeviceChoice, AListNamesGpusByNumberOrUuid) {
  const FakeMachine machine{.gpus = 3};
  const std::string last = "GPU-ABABABAB-abab-abab-abab-ababababab03";
  EXPECT_EQ(chosen(config_of(last + ", 0"), machine), "cuda:0, cuda:2");
  EXPECT_EQ(chosen(config_of("1", 0), machine), "cuda:1");
  EXPECT_NE(chosen(config_of("3"), machine).find("cuda:3 is not there"), std::string::npos);
  EXPECT_EQ(chosen(config_of("2," + last), machine),
            "INVALID_ARGUMENT: devices.cuda names cuda:2 twice; allowed: each GPU once");
  const std::string unknown = chosen(config_of("GPU-00000000-0000-0000-0000-000000000000"), machine);
  for (const std::string part : {"GPU-00000000-0000", "GPU-abababab-abab-abab-abab-ababababab01"})
    EXPECT_NE(unknown.find(part), std::string::npos) << unknown;
}

TEST(DeviceChoice, WithoutAnyDeviceNothingIsServed) {
  EXPECT_NE(chosen(config_of("auto", 0), {})
                .find(std::string("no GPU to serve (devices.cuda): ") + why_no_gpu() +
                      "; allowed: at least one device"),
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
