// What follows from what the daemon found out about its GPUs.
#include "doctor.h"

#include <utility>

namespace epd::ctl {
namespace {

void add_name(std::string& list, const std::string& name) {
  if (!list.empty()) list += ", ";
  list += name;
}

Check judge_mps(const std::string& with, const std::string& without) {
  if (without.empty()) return {Level::kOk, "mps", "clients and engines share " + with + " through MPS", ""};
  return {
      Level::kWarn, "mps",
      without +
          " without MPS: clients and engines take turns, and each hand-off between them costs some 140 to "
          "280 us",
      "nvidia-cuda-mps-control -d, by the user whom epd and its clients run as (or root), and with the same "
      "CUDA_MPS_PIPE_DIRECTORY; then start epd and the clients again"};
}

Check judge_mps_control(const std::string& error) {
  if (error.empty())
    return {Level::kOk, "mps_control", "MPS can be asked to terminate work before it is cut off", ""};
  return {
      Level::kWarn, "mps_control",
      "MPS can't be asked to terminate work (" + error +
          "): a client that is evicted, or an engine that is killed, in the middle of a kernel takes along "
          "all processes of its GPU",
      "let epd find nvidia-cuda-mps-control (mps.control) and MPS's CUDA_MPS_PIPE_DIRECTORY, as the user who "
      "started MPS, and in its PID namespace"};
}

Check judge_peers(const std::string& apart, int gpus) {
  if (apart.empty())
    return {Level::kOk, "peer_access", std::to_string(gpus) + " GPUs map each other's memory", ""};
  return {Level::kFail, "peer_access", "no P2P between " + apart + ": groups with ranks on both are refused",
          "see nvidia-smi topo -p2p rw and, in a virtual machine, its settings; or serve only GPUs that "
          "reach each "
          "other (CUDA_VISIBLE_DEVICES of epd)"};
}

}  // namespace

std::vector<Check> judge_choice(const v1::GetConfigResponse& config, const DaemonFacts& daemon) {
  for (const v1::Device& device : daemon.status.devices()) {
    if (device.has_cuda()) return {};
  }
  int automatic = 0;
  for (const v1::ConfigEntry& entry : config.entries())
    automatic += (entry.key() == "devices.cuda" || entry.key() == "devices.host") && entry.value() == "auto";
  if (automatic != 2) return {};
  if (!daemon.version.cuda_kernels()) {
    return {{Level::kWarn, "devices",
             "this epd was built without kernels for GPUs, and a host device is served",
             "where GPUs are expected: build epd with nvcc 12.8 or later; else: devices.host = 1"}};
  }
  return {
      {Level::kWarn, "devices", "no GPU was found, and a host device is served in its place",
       "where GPUs are expected: see nvidia-smi, and in a container its runtime; else: devices.host = 1"}};
}

std::vector<Check> judge_gpus(const v1::GetStatusResponse& status) {
  std::vector<Check> checks;
  std::string with_mps;
  std::string without_mps;
  std::string apart;
  for (const v1::Device& device : status.devices()) {
    if (!device.has_cuda()) continue;
    const v1::CudaDevice& gpu = device.cuda();
    checks.push_back({Level::kOk, "gpu " + device.name(),
                      gpu.model() + ", compute capability " + gpu.compute_capability() + ", " +
                          std::to_string(gpu.num_sms()) + " SMs, CUDA " + gpu.cuda_version() +
                          ", memory by file descriptor",
                      ""});
    std::string& mps = gpu.mps() ? with_mps : without_mps;
    add_name(mps, device.name());
    for (const std::string& other : gpu.unreachable()) {
      if (device.name() < other) add_name(apart, device.name() + " and " + other);
    }
  }
  if (checks.empty()) return checks;
  const int gpus = static_cast<int>(checks.size());
  checks.push_back(judge_mps(with_mps, without_mps));
  if (!with_mps.empty()) checks.push_back(judge_mps_control(status.daemon().mps_control_error()));
  if (gpus > 1) checks.push_back(judge_peers(apart, gpus));
  return checks;
}

}  // namespace epd::ctl
