#include "gpu_work.h"

#include "base/log.h"
#include "device_list.h"
#include "fleet.h"
#include "live_config.h"

#include <algorithm>
#include <utility>

namespace epd::supervisor {

Status GpuWork::start() {
  if (!rooms_.devices.any_under_mps()) return {};
  if (rooms_.config->mps_control.empty()) {
    error_ = "turned off: mps.control is empty";
    return {};
  }
  Result<std::unique_ptr<MpsControl>> control = MpsControl::start(
      rooms_.loop, rooms_.clock, {rooms_.config->mps_control, rooms_.config->mps_timeout_ms});
  if (!control.ok()) return control.status();
  mps_ = std::move(*control);
  return {};
}

void GpuWork::probe() {
  if (mps_ == nullptr) return;
  mps_->probe(engine_pids(), [this](const Result<std::string>& answer) {
    if (answer.ok()) return;
    error_ = answer.status().message();
    log_event(LogLevel::kWarning,
              "MPS can't be asked to terminate work on a GPU: a client that is evicted or an engine that is "
              "killed in the middle of a kernel takes along all processes of its GPU",
              {{"reason", error_}});
  });
}

std::vector<pid_t> GpuWork::engine_pids() const {
  std::vector<pid_t> pids;
  for (std::uint32_t i = 0; i < rooms_.fleet.size(); ++i) {
    if (rooms_.fleet[i].process() != nullptr) pids.push_back(rooms_.fleet[i].process()->pid());
  }
  return pids;
}

// `then` is called when nothing of the process runs on the GPU any more, or when that can't be achieved in
// time: now, or later on the loop. `left`: see MpsControl::Target.
void GpuWork::terminate(std::uint32_t device, pid_t pid, int pidfd,
                        std::shared_ptr<const std::atomic<bool>> left, std::function<void()> then) {
  Result<UniqueFd> same = mps_ == nullptr || !rooms_.devices[device].facts.mps || pidfd < 0
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
                        {{"device", rooms_.fleet[device].name()},
                         {"pid", pid},
                         {"how", how.ok() ? how.value() : how.status().to_string()}});
                    then();
                  });
}

void GpuWork::before_kill(std::uint32_t device, std::function<void()> then) {
  const EngineProcess* process = rooms_.fleet[device].process();
  terminate(device, process->pid(), process->pidfd(), nullptr, std::move(then));
}

// Such a client mostly ends as well, by itself or because of its evictor, while its kernels may run.
// So MPS first terminates its kernels. That ends all work of the process on GPUs, so it is not done while the
// process has another session.
void GpuWork::expel(const session::Session& session, const Status& status) {
  if (expelled_.contains(session.id)) return;  // MPS has been asked
  const auto& all = rooms_.sessions.connections();
  const bool stays = std::any_of(all.begin(), all.end(), [&](const auto& entry) {
    return entry.second.attached && entry.first != session.id && entry.second.peer.pid == session.peer.pid;
  });
  const auto end = [this, id = session.id, status] { rooms_.sessions.end(id, status); };
  if (stays) {
    end();
  } else {
    const auto left = std::make_shared<std::atomic<bool>>(false);
    expelled_[session.id] = left;
    terminate(session.device, session.peer.pid, session.peer.pidfd.get(), left, end);
  }
}

// The client's process may be about to end. MPS must not be asked to hasten that.
void GpuWork::session_closed(std::uint64_t session_id) {
  const auto asked = expelled_.extract(session_id);
  if (!asked.empty()) *asked.mapped() = true;
}

}  // namespace epd::supervisor
