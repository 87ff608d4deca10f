// Which class implements a device, by its name.
#include "device/device.h"
#include "device/memory.h"

#include "common/memory.h"
#include "host_device.h"
#if EPD_WITH_CUDA
#include "cuda_device.h"
#include "cuda_driver.h"
#include "cuda_memory.h"
#endif

#include <charconv>

namespace epd::device {
namespace {

bool parse_index(std::string_view text, std::uint32_t& index) {
  const auto [stop, error] = std::from_chars(text.data(), text.data() + text.size(), index);
  return error == std::errc() && stop == text.data() + text.size() && !text.empty();
}

#if !EPD_WITH_CUDA
Status built_without(const DeviceName& device) {
  return {StatusCode::kUnsupported, device.text() + ": this epd was built without CUDA (EPD_CUDA=OFF)"};
}
#endif

}  // namespace

Result<DeviceName> parse_device_name(std::string_view text) {
  for (const abi::DeviceKind kind : {abi::DeviceKind::kHost, abi::DeviceKind::kCuda}) {
    const std::string_view prefix = kind == abi::DeviceKind::kHost ? "host:" : "cuda:";
    DeviceName name{kind, 0};
    if (text.starts_with(prefix) && parse_index(text.substr(prefix.size()), name.index)) return name;
  }
  return invalid_argument("device is \"" + std::string(text) +
                          "\"; allowed: host:N or cuda:N with N = 0, 1, 2, ...");
}

Result<std::uint32_t> num_gpus() {
#if EPD_WITH_CUDA
  return num_cuda_devices();
#else
  return 0u;
#endif
}

Result<DeviceFacts> device_facts(const DeviceName& device) {
  if (device.kind == abi::DeviceKind::kHost) return DeviceFacts{};
#if EPD_WITH_CUDA
  return cuda_facts(device);
#else
  return built_without(device);
#endif
}

Result<bool> devices_reach_each_other(const DeviceName& a, const DeviceName& b) {
  if (a.kind != abi::DeviceKind::kCuda || b.kind != abi::DeviceKind::kCuda || a.index == b.index) return true;
#if EPD_WITH_CUDA
  return cuda_devices_reach_each_other(a, b);
#else
  return built_without(a);
#endif
}

Result<UniqueFd> make_arena_memory(const DeviceName& device, const char* label, std::uint64_t bytes) {
  if (device.kind == abi::DeviceKind::kHost) return make_sealed_memfd(label, bytes);
#if EPD_WITH_CUDA
  return make_cuda_memory(device, bytes);
#else
  return built_without(device);
#endif
}

Result<UniqueFd> make_results_memory(const DeviceName& device, std::uint64_t bytes) {
  if (device.kind == abi::DeviceKind::kHost) return make_sealed_memfd("epd-results", bytes);
#if EPD_WITH_CUDA
  return make_cuda_host_memory(device, bytes);
#else
  return built_without(device);
#endif
}

void on_device_failed([[maybe_unused]] std::function<void()> last_word) {
#if EPD_WITH_CUDA
  set_last_word(std::move(last_word));
#endif
}

Result<std::unique_ptr<Device>> make_device(const std::string& name, const Clock& clock,
                                            std::function<void()> notify) {
  Result<DeviceName> parsed = parse_device_name(name);
  if (!parsed.ok()) return parsed.status();
  if (parsed->kind == abi::DeviceKind::kHost)
    return std::unique_ptr<Device>(std::make_unique<HostDevice>(name, clock, std::move(notify)));
#if EPD_WITH_CUDA
  return make_cuda_device(*parsed, clock);
#else
  return built_without(*parsed);
#endif
}

}  // namespace epd::device
