#include "gpu_fault.h"

#include "common/signal.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>
#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

namespace epd::test {
namespace {

namespace fs = std::filesystem;

constexpr const char* kFaultDir = "EPD_FAKE_CUDA_FAULT_DIR";
constexpr const char* kMpsDir = "EPD_FAKE_MPS_DIR";

// The GPUs of the machine, or of the fake driver.
std::uint32_t gpus_there(bool true_gpus) {
  const char* number = std::getenv(true_gpus ? "EPD_TEST_GPUS" : "EPD_FAKE_CUDA_DEVICES");
  return number == nullptr ? FaultyGpus::kMost
                           : static_cast<std::uint32_t>(std::strtoul(number, nullptr, 10));
}

std::string text_of(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

}  // namespace

HeldExit::HeldExit(pid_t pid)
    : pid_(pid), traced_(::ptrace(PTRACE_SEIZE, pid, nullptr, PTRACE_O_TRACEEXIT) == 0) {}

HeldExit::~HeldExit() {
  if (traced_ && eventually(20, [this] { return reached(); }))
    ::ptrace(PTRACE_DETACH, pid_, nullptr, nullptr);
}

bool HeldExit::reached() {
  int state = 0;
  reached_ = reached_ || ::waitpid(pid_, &state, WNOHANG | __WALL) == pid_;
  return reached_;
}

FaultyGpus::FaultyGpus(std::uint32_t least)
    : true_gpus_(std::getenv("EPD_TEST_GPUS") != nullptr),
      num_gpus_(std::min(gpus_there(true_gpus_), kMost)) {
  if (!has_cuda_driver()) {
    why_not_ = "no CUDA driver to be opened here";
  } else if (num_gpus_ < least) {
    why_not_ = "needs " + std::to_string(least) + " GPUs, and there is " + std::to_string(num_gpus_) +
               (least > 1 ? ": one of them fails, and the ranks that go on are on others" : "");
  }
  std::string pattern = (fs::temp_directory_path() / "epd-gpus-XXXXXX").string();
  folder_ = ::mkdtemp(pattern.data());
  ::setenv(kFaultDir, folder_.c_str(), 1);
  ::setenv(kMpsDir, folder_.c_str(), 1);
  std::ofstream(folder_ + "/servers") << "1\n";
}

FaultyGpus::~FaultyGpus() {
  if (daemon_ != nullptr && daemon_->running()) daemon_->stop();
  daemon_.reset();
  ::unsetenv(kFaultDir);
  ::unsetenv(kMpsDir);
  std::error_code ignored;
  fs::remove_all(folder_, ignored);
}

bool FaultyGpus::start(const std::vector<std::pair<std::string, std::string>>& settings) {
  DaemonOptions options;
  use_devices(options, "cuda");
  options.devices = num_gpus_;
  options.settings = patient_settings();
  if (!true_gpus_) options.settings.emplace_back("mps.control", "\"" EPD_FAKE_MPS_CONTROL "\"");
  for (const auto& setting : settings) options.settings.push_back(setting);
  daemon_ = std::make_unique<Daemon>(std::move(options));
  return daemon_->start();
}

double FaultyGpus::strike(pid_t process, std::uint32_t device) {
  std::ofstream(folder_ + "/busy-" + std::to_string(device)).close();  // turns newcomers away
  const double killed = now_s();
  EXPECT_EQ(send_signal(process, SIGKILL), 0);
  std::ofstream(folder_ + "/device-" + std::to_string(device)).close();
  return killed;
}

void FaultyGpus::recover(std::uint32_t device) {
  fs::remove(folder_ + "/device-" + std::to_string(device));
  if (!true_gpus_) sleep_ms(60);  // some engines and clients are turned away
  fs::remove(folder_ + "/busy-" + std::to_string(device));
}

double FaultyGpus::kill_in_a_kernel(RankProcess& process, std::uint32_t device) {
  const pid_t engine = daemon_->engine(device);
  const double killed = strike(process.pid(), device);
  EXPECT_TRUE(eventually(20, [&] { return !is_running(engine); })) << "the engine has not noticed";
  std::printf("the engine was gone %.1f ms after the kill\n", (now_s() - killed) * 1000);
  recover(device);
  std::printf("the killed process ran %s\n", process.wait(10).note.c_str());
  return killed;
}

double FaultyGpus::kill_engine(RankProcess& client, std::uint32_t device) {
  const double killed = strike(daemon_->engine(device), device);
  EXPECT_TRUE(eventually(20, [&] { return !is_running(client.pid()); })) << "the client has not noticed";
  std::printf("the engine's client was gone %.1f ms after the kill\n", (now_s() - killed) * 1000);
  recover(device);
  const RankOutcome outcome = client.wait(10);
  EXPECT_FALSE(outcome.ok);
  std::printf("the client: %s\n", outcome.to_string().c_str());
  return killed;
}

void FaultyGpus::expect_no_engine_died() const {
  EXPECT_EQ(daemon_->log().find("engine died"), std::string::npos);
}

void FaultyGpus::expect_only_this_engine_died(std::uint32_t device, const std::string& how) const {
  // The log is written a moment later.
  EXPECT_TRUE(eventually(20, [&] { return daemon_->log().find("engine died") != std::string::npos; }));
  std::istringstream lines(daemon_->log());
  std::uint32_t deaths = 0;
  for (std::string line; std::getline(lines, line);) {
    for (const char* told :
         {"the GPU has failed", "engine died", "takes no new", "engine ready", "how=\"died\""}) {
      if (line.find(told) != std::string::npos) std::printf("  %s\n", line.c_str());
    }
    if (line.find("engine died") == std::string::npos) continue;
    ++deaths;
    EXPECT_NE(line.find("device=\"" + daemon_->device(device) + "\""), std::string::npos) << line;
    EXPECT_NE(line.find(how), std::string::npos) << line;
  }
  EXPECT_EQ(deaths, 1u);
}

bool FaultyGpus::can_terminate() const {
  return !true_gpus_ || run_command({"nvidia-cuda-mps-control", "--help"}).exit_code != 127;
}

void FaultyGpus::list_clients(const std::vector<pid_t>& clients) const {
  std::ofstream file(folder_ + "/clients-1");
  for (const pid_t pid : clients) file << pid << "\n";
}

bool FaultyGpus::was_terminated(pid_t pid) const {
  if (true_gpus_) {
    std::istringstream lines(daemon_->log());
    for (std::string line; std::getline(lines, line);) {
      if (line.find("terminated by MPS") != std::string::npos &&
          line.find("pid=" + std::to_string(pid) + " ") != std::string::npos)
        return true;
    }
    return false;
  }
  return text_of(folder_ + "/asked").find("terminate_client 1 " + std::to_string(pid) + "\n") !=
         std::string::npos;
}

HeldMps::HeldMps(const FaultyGpus& gpus) : folder_(gpus.folder_) {
  // The daemon's own question at its start is to be over.
  EXPECT_TRUE(eventually(20, [this] { return asked().find("get_client_list") != std::string::npos; }));
  std::ofstream(folder_ + "/hold").close();
  fs::remove(folder_ + "/asked");
}

void HeldMps::unblock() const {
  fs::remove(folder_ + "/hold");
}

std::string HeldMps::asked() const {
  return text_of(folder_ + "/asked");
}

std::string FaultyGpus::session_of(pid_t client) const {
  std::istringstream lines(daemon_->epctl({"sessions"}).out);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream fields(line);
    std::string session;
    std::string device;
    std::string pid;
    fields >> session >> device >> pid;
    if (pid == std::to_string(client)) return session;
  }
  return "";
}

}  // namespace epd::test
