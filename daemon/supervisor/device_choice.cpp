#include "device_choice.h"

#include "common/build_info.h"
#include "common/gpu_uuid.h"

#include <algorithm>
#include <charconv>
#include <map>
#include <optional>
#include <utility>

namespace epd::supervisor {
namespace {

using device::DeviceFacts;
using device::DeviceName;

using Gpu = std::pair<DeviceName, DeviceFacts>;

DeviceName gpu_name(std::uint32_t index) {
  return {abi::DeviceKind::kCuda, index};
}

Status unsupported(std::string text) {
  return {StatusCode::kUnsupported, std::move(text)};
}

// Every GPU of the machine that epd can use; none on a machine without GPUs. If there are GPUs and none can
// be used, that is an error: a machine that silently served its processors instead would be slow, and nobody
// would know why.
Result<std::vector<Gpu>> find_gpus(const Machine& machine, std::vector<std::string>& skipped) {
  constexpr const char* kWayOut = "; to serve host devices all the same: devices.cuda = \"none\"";
  Result<std::uint32_t> count = machine.num_gpus();
  if (!count.ok())
    return unsupported("devices.cuda is \"auto\" and the GPUs can't be used: " + count.status().message() +
                       kWayOut);
  std::vector<Gpu> gpus;
  // A reason without the GPU's name -> what the first GPU says, and the others that say the same.
  std::map<std::string, std::string> said;
  for (std::uint32_t i = 0; i < *count; ++i) {
    Result<DeviceFacts> facts = machine.facts(gpu_name(i));
    if (facts.ok()) {
      gpus.emplace_back(gpu_name(i), *facts);
      continue;
    }
    const std::string name = gpu_name(i).text();
    const std::string& reason = skipped.emplace_back(facts.status().message());
    const auto [same, is_new] =
        said.try_emplace(reason.starts_with(name) ? reason.substr(name.size()) : reason, reason);
    constexpr const char* kLikewise = "; also ";
    if (!is_new)
      same->second += (same->second.find(kLikewise) == std::string::npos ? kLikewise : ", ") + name;
  }
  if (!gpus.empty() || *count == 0) return gpus;
  std::string reasons;
  for (const auto& [key, text] : said) reasons += (reasons.empty() ? "" : "; ") + text;
  return unsupported("devices.cuda is \"auto\" and no GPU can be used: " + reasons + kWayOut);
}

// One entry of the list: a number or a UUID.
Result<Gpu> find_gpu(const std::string& entry, std::uint32_t count, const Machine& machine) {
  std::uint32_t index = 0;
  if (std::from_chars(entry.data(), entry.data() + entry.size(), index).ptr == entry.data() + entry.size()) {
    Result<DeviceFacts> facts = machine.facts(gpu_name(index));
    if (!facts.ok()) return facts.status();
    return Gpu(gpu_name(index), *facts);
  }
  const std::string uuid =
      "GPU-" + entry.substr(entry.find('-') + 1);  // a part of a GPU (MIG) has one as well
  std::string known;
  for (index = 0; index < count; ++index) {
    Result<DeviceFacts> facts = machine.facts(gpu_name(index));
    if (!facts.ok()) continue;
    if (uuid_text(facts->uuid) == uuid) return Gpu(gpu_name(index), *facts);
    known += (known.empty() ? "" : ", ") + uuid_text(facts->uuid);
  }
  return unsupported("devices.cuda names " + entry + ", which the driver does not have; allowed: " +
                     (known.empty() ? "none, since it has no GPU that epd can use" : known));
}

Result<std::vector<Gpu>> find_listed(const std::vector<std::string>& list, const Machine& machine) {
  Result<std::uint32_t> count = machine.num_gpus();
  if (!count.ok()) return count.status();
  std::vector<Gpu> gpus;
  for (const std::string& entry : list) {
    Result<Gpu> gpu = find_gpu(entry, *count, machine);
    if (!gpu.ok()) return gpu.status();
    const bool twice = std::any_of(gpus.begin(), gpus.end(),
                                   [&](const Gpu& other) { return other.first.index == gpu->first.index; });
    if (twice)
      return invalid_argument("devices.cuda names " + gpu->first.text() + " twice; allowed: each GPU once");
    gpus.push_back(std::move(*gpu));
  }
  std::sort(gpus.begin(), gpus.end(),
            [](const Gpu& a, const Gpu& b) { return a.first.index < b.first.index; });
  return gpus;
}

}  // namespace

const char* why_no_gpu() {
  return build_info().cuda_kernels ? "no driver (libcuda.so.1), or it shows none"
                                   : "this epd was built without kernels for GPUs";
}

Result<DeviceChoice> choose_devices(const Config& config, const Machine& machine) {
  DeviceChoice choice;
  Result<std::vector<Gpu>> gpus = std::vector<Gpu>();
  if (config.cuda_devices.automatic) gpus = find_gpus(machine, choice.skipped);
  if (!config.cuda_devices.list.empty()) gpus = find_listed(config.cuda_devices.list, machine);
  if (!gpus.ok()) return gpus.status();
  for (auto& [name, facts] : *gpus) choice.devices.push_back({name, std::move(facts)});
  const bool automatic = config.host_devices == kAutomatic;
  choice.host_instead = automatic && gpus->empty() && config.cuda_devices.automatic;
  const std::uint32_t hosts = automatic ? (gpus->empty() ? 1 : 0) : config.host_devices;
  for (std::uint32_t i = 0; i < hosts; ++i) choice.devices.push_back({{abi::DeviceKind::kHost, i}, {}});
  if (!choice.devices.empty()) return choice;
  const std::string why = config.cuda_devices.automatic ? std::string(": ") + why_no_gpu() : "";
  return invalid_argument("devices.host is 0 and there is no GPU to serve (devices.cuda)" + why +
                          "; allowed: at least one device");
}

}  // namespace epd::supervisor
