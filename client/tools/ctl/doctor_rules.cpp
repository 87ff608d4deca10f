// epctl doctor's rules for the daemon and this host: what is good, doubtful or bad, and what to do about it.
#include "doctor.h"
#include "format.h"

#include <array>
#include <cstdio>
#include <string_view>
#include <utility>

namespace epd::ctl {
namespace {

// An engine's loop turns at least once a second, asleep or not. On few cores it may have to wait for
// its turn; the daemon itself kills an engine only after timeouts.engine_watchdog_ms.
constexpr std::uint64_t kStaleHeartbeatMs = 5000;
constexpr std::uint64_t kFewOpenFiles = 1024;
constexpr std::uint64_t kFewDaemonFiles = 4096;

Check judge_socket(const std::string& name, const std::string& path, const SocketFile& file,
                   const std::string& keys) {
  switch (file.kind) {
    case SocketFile::Kind::kMissing:
      return fail(name, path + " does not exist", "start epd, or name the socket of the one that runs");
    case SocketFile::Kind::kUnseen:
      return fail(name, "can't look at " + path + ": " + file.error,
                  "open the directories above it to this user, or use sudo");
    case SocketFile::Kind::kOther:
      return fail(name, path + " is no socket", "remove the file and restart epd, or name another path");
    case SocketFile::Kind::kForbidden:
      return fail(name, "may not open " + path + " (" + owner_and_mode(file) + ")",
                  how_to_get_in(file, keys));
    case SocketFile::Kind::kStale:
      return fail(name, path + " was left behind: nobody listens", "start epd, which replaces it");
    case SocketFile::Kind::kUsable: break;
  }
  if ((file.mode & 02) != 0) {
    return warn(name, path + " is open to every user (" + owner_and_mode(file) + ")",
                "give it mode 0660 and a group in the daemon's configuration");
  }
  return ok(name, path + " (" + owner_and_mode(file) + ")");
}

// The socket that clients attach to. The advice differs when the daemon answers, because then it need not be
// started.
Check judge_attach_socket(const DaemonFacts& daemon) {
  const std::string name = "attach_socket";
  const std::string& problem = daemon.status.daemon().socket_problem();
  if (!problem.empty()) return fail(name, problem, "restart epd");
  if (!daemon.failure && daemon.attach_file.kind == SocketFile::Kind::kMissing) {
    return fail(name, "epd runs, but " + daemon.attach_path + " does not exist here",
                "if somebody has removed it, restart epd; else mount its directory here");
  }
  return judge_socket(name, daemon.attach_path, daemon.attach_file,
                      "daemon.socket_group with daemon.socket_mode = \"0660\"");
}

std::vector<Check> judge_versions(const v1::GetVersionResponse& version, const v1::GetVersionResponse& own) {
  std::vector<Check> checks;
  if (version.version() == own.version()) {
    checks.push_back(ok("version", "epctl and epd are " + own.version()));
  } else {
    checks.push_back(warn("version", "epctl is " + own.version() + ", epd is " + version.version(),
                          "install the same release of both, then restart epd"));
  }
  if (version.layout_hash() == own.layout_hash()) {
    checks.push_back(ok("abi", "shared-memory layout " + own.layout_hash()));
  } else {
    checks.push_back(fail(
        "abi", "shared-memory layout is " + own.layout_hash() + " here, " + version.layout_hash() + " in epd",
        "clients of this installation are refused with VERSION_MISMATCH: install the same release"));
  }
  return checks;
}

Check judge_state(const v1::DaemonStatus& daemon) {
  const std::string text = word(daemon.state()) + ", up " + format_ms(daemon.uptime_ms());
  switch (daemon.state()) {
    case v1::DAEMON_STATE_SERVING: return ok("state", text);
    case v1::DAEMON_STATE_STARTING:
      return warn("state", text, "wait; if it stays so, see the devices below and the daemon's log");
    case v1::DAEMON_STATE_DRAINING:
      return warn("state", text, "it admits nobody and exits soon: start it again");
    default: return warn("state", text, "epctl does not know this state: compare with epctl version");
  }
}

Check judge_log(const v1::DaemonStatus& daemon) {
  const std::string lost = std::to_string(daemon.log_lines_lost()) + " lines lost since epd started";
  if (!daemon.log_problem().empty())
    return fail("log", "is not written: " + daemon.log_problem() + "; " + lost,
                "make room, or see who reads epd's standard error; epctl events has what is important");
  if (daemon.log_lines_lost() == 0) return ok("log", "no line was lost");
  return warn("log", lost, "its reader was too slow, or the disk was full: see \"log lines lost\" there");
}

Check judge_open_files(const std::string& name, const std::string& whose, std::uint64_t soft,
                       std::uint64_t wanted, const std::string& advice) {
  const std::string text =
      whose + " may open " + (soft == kUnlimited ? "any number of" : std::to_string(soft)) + " files";
  return soft < wanted ? warn(name, text, advice) : ok(name, text);
}

Check judge_device(const v1::Device& device) {
  const std::string name = "device " + device.name();
  const std::string beat =
      device.sleeping() ? "sleeping" : "heartbeat " + format_ms(device.heartbeat_age_ms()) + " ago";
  const std::string last = device.last_exit().empty() ? "" : ", last exit: " + device.last_exit();
  const std::string restarts = "restarts: " + std::to_string(device.restarts()) + last;
  switch (device.state()) {
    case v1::DEVICE_STATE_FAILED:
      return fail(name, "failed, " + restarts,
                  "see the engine's lines in the log, then: epctl restart device " + device.name());
    case v1::DEVICE_STATE_RESTARTING:
      return fail(name, "restarting, " + restarts, "see the engine's lines in the log if it stays so");
    case v1::DEVICE_STATE_STARTING: return warn(name, "starting", "wait; see the log if it stays so");
    case v1::DEVICE_STATE_STOPPED:
      return fail(name,
                  "stopped: its engine stands still, its last heartbeat is " +
                      format_ms(device.heartbeat_age_ms()) + " old",
                  "kill -CONT " + std::to_string(device.engine_pid()) +
                      " if somebody has stopped it; else: epctl restart device " + device.name());
    case v1::DEVICE_STATE_READY: break;
    default: return warn(name, "in a state that epctl does not know", "compare with: epctl version");
  }
  if (device.heartbeat_age_ms() > kStaleHeartbeatMs) {
    return fail(name, "ready, but its last heartbeat is " + format_ms(device.heartbeat_age_ms()) + " old",
                "its engine (pid " + std::to_string(device.engine_pid()) +
                    ") hangs or gets no processor: see top and the log");
  }
  if (device.restarts() != 0) {
    return warn(name, "ready, " + beat + ", " + restarts,
                "see why its engine ended; groups resumed, operations in flight failed");
  }
  return ok(name, "ready, " + beat);
}

Check judge_memory_lock(const HostFacts& host, bool pins) {
  const std::string size = host.locked_bytes == kUnlimited ? "unlimited" : format_bytes(host.locked_bytes);
  if (host.locked_bytes == kUnlimited) return ok("locked_memory", size);
  if (!pins) return ok("locked_memory", size + "; host devices lock none");
  return warn("locked_memory", size + ", but GPUs and RDMA lock theirs",
              "raise it: LimitMEMLOCK=infinity in the unit, or ulimit -l unlimited");
}

Check judge_huge_pages(const std::string& choice) {
  const std::string where = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";
  if (choice.empty()) return ok("huge_pages", "this kernel has no setting for shared memory");
  if (choice != "never" && choice != "deny") return ok("huge_pages", "shared memory: " + choice);
  return warn("huge_pages", "shared memory: " + choice + ", so arenas lie in 4 KiB pages",
              "echo advise > " + where + " (as root) saves address translation in large arenas");
}

Check judge_memory(const HostFacts& host) {
  if (host.memory_bytes == 0) return warn("memory", "unknown: /proc/meminfo can't be read", "mount /proc");
  const std::string text =
      format_bytes(host.available_bytes) + " of " + format_bytes(host.memory_bytes) + " available";
  if (host.available_bytes >= host.memory_bytes / 20) return ok("memory", text);
  return warn("memory", text,
              "arenas are filled when they are touched: end something, or use smaller groups");
}

Check judge_swap(const HostFacts& host) {
  if (host.swap_bytes == 0) return ok("swap", "none");
  return warn("swap", format_bytes(host.swap_bytes) + " on: arenas that were swapped out stall operations",
              "swapoff -a, or MemorySwapMax=0 in the unit");
}

Check judge_cores(const HostFacts& host, const v1::GetStatusResponse& status) {
  double cores = host.cores;
  if (host.cpu_quota > 0 && host.cpu_quota < cores) cores = host.cpu_quota;
  std::array<char, 32> shown{};
  std::snprintf(shown.data(), shown.size(), "%.4g", cores);
  std::uint64_t engines = 0;
  std::uint64_t threads = 0;
  for (const v1::Device& device : status.devices()) {
    if (!device.name().starts_with("host:")) continue;
    ++engines;
    threads += device.sms();
  }
  const std::string text = std::string(shown.data()) + " cores";
  if (engines == 0) return ok("cores", text);
  const std::string load = text + " for " + counted(threads, "thread") + " of " +
                           counted(engines, "host engine") + " and " +
                           counted(status.daemon().sessions(), "client");
  if (static_cast<double>(threads + status.daemon().sessions()) <= cores) return ok("cores", load);
  return warn("cores", load + ": they take turns, and latencies are the scheduler's",
              "while speed matters: fewer devices (devices.host) or fewer threads for each (devices.sms)");
}

Check judge_mps(const std::string& with, const std::string& without) {
  if (without.empty()) return ok("mps", "clients and engines share " + with + " through MPS");
  return warn(
      "mps",
      without +
          " without MPS: clients and engines take turns, and each hand-off between them costs some 140 to "
          "280 us",
      "nvidia-cuda-mps-control -d, by the user whom epd and its clients run as (or root), and with the same "
      "CUDA_MPS_PIPE_DIRECTORY; then start epd and the clients again");
}

Check judge_mps_control(const std::string& error) {
  if (error.empty()) return ok("mps_control", "MPS can be asked to terminate work before it is cut off");
  return warn(
      "mps_control",
      "MPS can't be asked to terminate work (" + error +
          "): a client that is evicted, or an engine that is killed, in the middle of a kernel takes along "
          "all processes of its GPU",
      "let epd find nvidia-cuda-mps-control (mps.control) and MPS's CUDA_MPS_PIPE_DIRECTORY, as the user who "
      "started MPS, and in its PID namespace");
}

Check judge_peers(const std::string& apart, int gpus) {
  if (apart.empty()) return ok("peer_access", std::to_string(gpus) + " GPUs map each other's memory");
  return fail("peer_access", "no P2P between " + apart + ": groups with ranks on both are refused",
              "see nvidia-smi topo -p2p rw and, in a virtual machine, its settings; or serve only GPUs that "
              "reach each "
              "other (CUDA_VISIBLE_DEVICES of epd)");
}

}  // namespace

std::vector<Check> judge_daemon(const DaemonFacts& daemon, const v1::GetVersionResponse& own) {
  std::vector<Check> checks{
      judge_socket("control_socket", daemon.control_path, daemon.control_file,
                   "daemon.control_socket_group with daemon.control_socket_mode = \"0660\"")};
  if (daemon.failure) {
    checks.push_back(fail("daemon", "does not answer", daemon.failure->message));
  } else {
    checks.push_back(ok("daemon", "answers in " + format_us(daemon.answer_us)));
    for (Check& check : judge_versions(daemon.version, own)) checks.push_back(std::move(check));
    const v1::DaemonStatus& status = daemon.status.daemon();
    checks.push_back(judge_state(status));
    checks.push_back(judge_log(status));
    if (status.last_reload_error().empty()) {
      checks.push_back(ok("configuration", "generation " + std::to_string(status.config_generation())));
    } else {
      checks.push_back(warn("configuration", "the last reload was refused: " + status.last_reload_error(),
                            "correct the file, then: epctl reload; the old values are in force"));
    }
  }
  if (!daemon.attach_path.empty()) checks.push_back(judge_attach_socket(daemon));
  if (daemon.open_files) {
    checks.push_back(judge_open_files("daemon_open_files", "epd", *daemon.open_files, kFewDaemonFiles,
                                      "each session and rank takes some: LimitNOFILE=65536 in the unit"));
  }
  return checks;
}

std::vector<Check> judge_devices(const v1::GetStatusResponse& status) {
  std::vector<Check> checks;
  if (status.devices().empty()) {
    checks.push_back(fail("devices", "none", "give the daemon devices in its configuration"));
  }
  for (const v1::Device& device : status.devices()) checks.push_back(judge_device(device));
  return checks;
}

std::vector<Check> judge_host(const HostFacts& host, const v1::GetStatusResponse& status) {
  std::vector<Check> checks;
  bool pins = false;
  for (const v1::Device& device : status.devices()) pins |= !device.name().starts_with("host:");
  checks.push_back(judge_open_files("open_files", "this user's processes", host.open_files, kFewOpenFiles,
                                    "ulimit -n " + std::to_string(kFewOpenFiles) + " or more"));
  checks.push_back(judge_memory_lock(host, pins));
  checks.push_back(
      host.memfd_error.empty()
          ? ok("shared_memory", "sealed memfds can be made")
          : fail("shared_memory", "no sealed memfd: " + host.memfd_error,
                 "epd needs them: see the seccomp profile and the memory limit of the container"));
  checks.push_back(judge_huge_pages(host.shmem_huge));
  checks.push_back(judge_memory(host));
  checks.push_back(judge_swap(host));
  checks.push_back(judge_cores(host, status));
  return checks;
}

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
    append(mps, device.name());
    for (const std::string& other : gpu.unreachable()) {
      if (device.name() < other) append(apart, device.name() + " and " + other);
    }
  }
  if (checks.empty()) return checks;
  const int gpus = static_cast<int>(checks.size());
  checks.push_back(judge_mps(with_mps, without_mps));
  if (!with_mps.empty()) checks.push_back(judge_mps_control(status.daemon().mps_control_error()));
  if (gpus > 1) checks.push_back(judge_peers(apart, gpus));
  return checks;
}

// ---- rows that are copied although the engines could reach the memory that the call names

namespace {

constexpr std::uint64_t kFewTimes = 1000;
constexpr std::uint64_t kMostShare = 10;  // one in so many may be copied

std::string_view remedy(std::string_view where) {
  if (where == "not_mappable") return "take memory of cudaMalloc, or exportable memory of cuMemCreate";
  if (where == "limit")
    return "let calls name fewer allocations, or leave the device idle for some ms after memory was freed";
  if (where == "no_room")
    return "let max_recv_rows be no more than comes, or give recv_x and y room for it in their allocation";
  if (where == "unaligned") return "let rows begin at multiples of 16 bytes";
  return "see epd_memory_t in epd.h: recv_rows of blocks, and graphs under a handle of another graph";
}

// The most frequent reason for copies; null when there are too few to matter. Every group copies the rows of
// its first calls.
const v1::RowCount* worst_of(const v1::GroupMember& member) {
  std::uint64_t all = 0;
  const v1::RowCount* worst = nullptr;
  for (const v1::RowCount& count : member.rows()) {
    all += count.times();
    if (count.where() == "in_place" || count.where() == "first_calls") continue;
    if (worst == nullptr || count.times() > worst->times()) worst = &count;
  }
  const bool matters = worst != nullptr && all >= kFewTimes && worst->times() >= all / kMostShare;
  return matters ? worst : nullptr;
}

}  // namespace

std::vector<Check> judge_rows(const v1::ListGroupsResponse& groups) {
  std::vector<Check> checks;
  for (const v1::Group& group : groups.groups()) {
    for (const v1::GroupMember& member : group.members()) {
      const v1::RowCount* const worst = worst_of(member);
      if (worst == nullptr) continue;
      checks.push_back(warn("rows of " + group.name(),
                            "rank " + std::to_string(member.rank()) + " had rows copied " +
                                counted(worst->times(), "time") + ": " + worst->where(),
                            std::string(remedy(worst->where()))));
      break;  // its other ranks are likely to do the same
    }
  }
  return checks;
}

}  // namespace epd::ctl
