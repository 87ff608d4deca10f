#include "sms_changes.h"

#include "kit/daemon.h"
#include "kit/error.h"
#include "proto/statistics.h"

#include <sys/wait.h>
#include <unistd.h>
#include <algorithm>
#include <array>
#include <vector>

#include <nlohmann/json.hpp>

namespace epd::bench {
namespace {

std::string read_all(int fd) {
  std::string text;
  char part[4096];
  for (ssize_t got = 0; (got = ::read(fd, part, sizeof(part))) > 0;)
    text.append(part, static_cast<std::size_t>(got));
  return text;
}

// What epctl, which lies beside this program, prints.
std::string epctl(const std::string& control_socket, const std::vector<std::string>& arguments) {
  std::vector<std::string> all{kit::executable_directory() + "/epctl", "--socket", control_socket, "--json"};
  all.insert(all.end(), arguments.begin(), arguments.end());
  std::vector<char*> argv;
  argv.reserve(all.size() + 1);
  for (std::string& each : all) argv.push_back(each.data());
  argv.push_back(nullptr);
  int ends[2];
  if (::pipe(ends) != 0) kit::fail_errno("a pipe for epctl");
  const pid_t pid = ::fork();
  if (pid < 0) kit::fail_errno("fork of epctl");
  if (pid == 0) {
    ::dup2(ends[1], STDOUT_FILENO);
    ::close(ends[0]), ::close(ends[1]);
    ::execv(argv[0], argv.data());
    ::_exit(127);
  }
  ::close(ends[1]);
  std::string said = read_all(ends[0]);
  ::close(ends[0]);
  int status = 0;
  ::waitpid(pid, &status, 0);
  if (status != 0) kit::fail(all[0] + " " + arguments[0] + " failed: " + said);
  return said;
}

}  // namespace

SmsChanges::SmsChanges(const RunPlan& plan, std::string control_socket)
    : plan_(plan), control_socket_(std::move(control_socket)) {}

void SmsChanges::follow(std::uint32_t done) {
  if (made_ == plan_.sms_changes) return;
  const std::uint64_t total = plan_.warmup + plan_.iterations;
  if (std::uint64_t{done} * (plan_.sms_changes + 1) < total * (made_ + 1)) return;
  ++made_;
  const std::uint32_t sms = made_ % 2 == 0 ? plan_.sms : std::max(1u, plan_.sms * 2 / 3);
  for (std::uint32_t gpu = 0; gpu < plan_.gpus; ++gpu)
    epctl(control_socket_, {"set", "device", plan_.device_of(gpu), "sms=" + std::to_string(sms)});
}

KernelStops SmsChanges::kernel_stops() const {
  KernelStops stops;
  if (plan_.sms_changes == 0) return stops;
  stops.changes = made_;
  std::array<std::uint64_t, abi::kHistogramBuckets> counts{};
  const auto told = nlohmann::json::parse(epctl(control_socket_, {"devices"}), nullptr, false);
  if (told.is_discarded()) kit::fail("what epctl says of devices is no JSON");
  for (const auto& device : told.at("devices")) {
    stops.max_us = std::max(stops.max_us, device.at("kernel_stop_max_us").get<std::uint64_t>());
    if (!device.contains("kernel_stops")) continue;
    for (const auto& bucket : device.at("kernel_stops").at("buckets")) {
      const auto from_us = bucket.at("from_us").get<std::uint32_t>();
      counts[abi::histogram_bucket(from_us)] += bucket.at("count").get<std::uint64_t>();
    }
  }
  for (const std::uint64_t count : counts) stops.count += count;
  stops.p50_us = abi::histogram_percentile(counts, 500);
  return stops;
}

}  // namespace epd::bench
