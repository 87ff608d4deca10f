// GPUs: what can be told about them at start, and how work on them is ended under MPS.
#include "base/event.h"
#include "node.h"
#include "process_state.h"

#include <algorithm>

namespace epd {
namespace {

bool is_cuda(const DeviceName& name) {
  return name.kind == abi::DeviceKind::kCuda;
}

void tell_of(const ServedDevice& device) {
  const DeviceName& name = device.name;
  const DeviceFacts& facts = device.facts;
  log_event(LogLevel::kInfo, "GPU found",
            {{"device", name.text()},
             {"model", facts.model},
             {"sms", facts.num_sms},
             {"driver", facts.driver},
             {"partition_sms", facts.sm_partition},
             {"mps", facts.mps},
             {"mode", launch_mode_text(device.mode)},
             {"mode_by", device.mode_reason}});
  if (!facts.mps) {
    log_event(
        LogLevel::kWarning,
        "without MPS clients and the engine take turns on the GPU: each hand-off between them costs about "
        "280 us, and no kernel can stay resident; start nvidia-cuda-mps-control -d before epd and its "
        "clients",
        {{"device", name.text()}});
  }
}

}  // namespace

Status Node::find_devices() {
  Result<DeviceChoice> choice = choose_devices(config_);
  if (!choice.ok()) return choice.status();
  for (const std::string& reason : choice->skipped)
    log_event(LogLevel::kWarning, "GPU not served", {{"reason", reason}});
  for (ServedDevice& device : choice->devices) {
    if (is_cuda(device.name)) tell_of(device);
    devices_.push_back({std::move(device), {}});
  }
  return find_unreachable();
}

// The daemon serves such devices all the same: groups within one, or on others, need no way between them.
Status Node::find_unreachable() {
  for (std::uint32_t i = 0; i < devices_.size(); ++i) {
    for (std::uint32_t k = 0; k < i; ++k) {
      Result<bool> reach = devices_reach_each_other(devices_[k].name, devices_[i].name);
      if (!reach.ok()) return reach.status();
      if (*reach) continue;
      devices_[i].unreachable.push_back(k);
      devices_[k].unreachable.push_back(i);
      log_event(LogLevel::kError,
                "two GPUs can't map each other's memory (no P2P); groups with ranks on both are refused",
                {{"device", devices_[k].name.text()}, {"other", devices_[i].name.text()}});
    }
  }
  return {};
}

Status Node::check_reach(std::uint32_t device, std::uint32_t other) const {
  const std::vector<std::uint32_t>& unreachable = devices_[device].unreachable;
  if (std::find(unreachable.begin(), unreachable.end(), other) == unreachable.end()) return {};
  return {StatusCode::kUnsupported, devices_[device].name.text() + " can't map the memory of " +
                                        devices_[other].name.text() +
                                        " (no P2P between them; nvidia-smi topo -p2p rw)"};
}

Status Node::check_commands(std::uint32_t device) const {
  const DeviceName& name = devices_[device].name;
  const bool stays = devices_[device].mode == LaunchMode::kResident;
  if (is_cuda(name) && stays) return {};
  return {StatusCode::kUnsupported,
          "commands is 1 (by stream) on " + name.text() +
              (is_cuda(name) ? ", which runs launched (" + devices_[device].mode_reason +
                                   "); allowed: where kernels stay, devices.mode = \"resident\""
                             : std::string("; allowed: on CUDA devices, with devices.mode = \"resident\""))};
}

// ---- MPS

Status Node::start_mps_control() {
  const bool wanted =
      std::any_of(devices_.begin(), devices_.end(), [](const NodeDevice& d) { return d.facts.mps; });
  if (!wanted) return {};
  if (config_.mps_control.empty()) {
    mps_error_ = "turned off: mps.control is empty";
    return {};
  }
  Result<std::unique_ptr<MpsControl>> control =
      MpsControl::start(*loop_, clock_, {config_.mps_control, config_.mps_timeout_ms});
  if (!control.ok()) return control.status();
  mps_ = std::move(*control);
  return {};
}

// When engines are on their GPUs.
void Node::probe_mps_control() {
  if (mps_ == nullptr) return;
  mps_->probe(engine_pids(), [this](const Result<std::string>& answer) {
    if (answer.ok()) return;
    mps_error_ = answer.status().message();
    log_event(LogLevel::kWarning,
              "MPS can't be asked to terminate work on a GPU: a client that is evicted or an engine that is "
              "killed in the middle of a kernel takes along all processes of its GPU",
              {{"reason", mps_error_}});
  });
}

std::vector<pid_t> Node::engine_pids() const {
  std::vector<pid_t> pids;
  for (std::uint32_t i = 0; i < fleet_->size(); ++i) {
    if (fleet_->process(i) != nullptr) pids.push_back(fleet_->process(i)->pid());
  }
  return pids;
}

// `then` is called when nothing of the process runs on the GPU any more, or that can't be had in time: now,
// or later on the loop. `left`: see MpsControl::Target.
void Node::terminate_work(std::uint32_t device, pid_t pid, int pidfd,
                          std::shared_ptr<const std::atomic<bool>> left, std::function<void()> then) {
  Result<UniqueFd> same = mps_ == nullptr || !devices_[device].facts.mps || pidfd < 0
                              ? Result<UniqueFd>(not_found("nobody to ask"))
                              : duplicate(pidfd);
  if (!same.ok()) {
    then();
    return;
  }
  mps_->terminate(MpsControl::Target{pid, std::move(*same), engine_pids(), std::move(left)},
                  [this, device, pid, then = std::move(then)](const Result<std::string>& how) {
                    const bool fine = how.ok() || how.status().code() == StatusCode::kNotFound;
                    log_event(
                        fine ? LogLevel::kInfo : LogLevel::kWarning,
                        how.ok() ? "work on the GPU terminated by MPS" : "work on the GPU not terminated",
                        {{"device", fleet_->name(device)},
                         {"pid", pid},
                         {"how", how.ok() ? how.value() : how.status().to_string()}});
                    then();
                  });
}

void Node::before_kill(std::uint32_t device, std::function<void()> then) {
  const EngineProcess* process = fleet_->process(device);
  terminate_work(device, process->pid(), process->pidfd(), nullptr, std::move(then));
}

// Ends a session because the operator wants it gone. Such a client mostly ends as well, by itself or by
// whoever had it evicted, and its kernels may run: MPS terminates them first. That ends all of its process's
// work on GPUs, so it is left out while the process has another session.
void Node::expel(const Session& session, const Status& status) {
  if (expelled_.contains(session.id)) return;  // MPS is being asked
  const auto& all = sessions_->connections();
  const bool stays = std::any_of(all.begin(), all.end(), [&](const auto& entry) {
    return entry.second.attached && entry.first != session.id && entry.second.peer.pid == session.peer.pid;
  });
  const auto end = [this, id = session.id, status] { sessions_->end(id, status); };
  if (stays) {
    end();
  } else {
    const auto left = std::make_shared<std::atomic<bool>>(false);
    expelled_[session.id] = left;
    terminate_work(session.device, session.peer.pid, session.peer.pidfd.get(), left, end);
  }
}

// Its client may be about to end, which MPS must not be asked to hasten.
void Node::stop_expelling(std::uint64_t session_id) {
  const auto asked = expelled_.extract(session_id);
  if (!asked.empty()) *asked.mapped() = true;
}

// A GPU mostly fails because a client was killed in the middle of its kernel. That one needs half a second to
// end, with all that it has mapped of the GPU, and only then are its socket and its process seen to have; the
// other ranks of its groups need not wait for that.
void Node::end_dying_sessions(std::uint32_t device) {
  std::vector<std::uint64_t> dying;
  for (const auto& [id, session] : sessions_->connections()) {
    if (session.attached && session.device == device && session.peer.pidfd.valid() &&
        is_ending(session.peer.pid))
      dying.push_back(id);
  }
  for (const std::uint64_t id : dying) sessions_->died(id);
}

void Node::engine_waits(std::uint32_t device) {
  std::string pids;
  for (const auto& [id, session] : sessions_->connections()) {
    if (session.attached && session.device == device)
      pids += (pids.empty() ? "" : ", ") + std::to_string(session.peer.pid);
  }
  log_event(
      LogLevel::kWarning,
      "the GPU's MPS server takes no new process until all that its fault has hit are gone; the engine waits",
      {{"device", fleet_->name(device)}, {"clients", pids}});
}

}  // namespace epd
